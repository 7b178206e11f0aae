"""What kept messages expose: each becomes an estimate, the estimate becomes labels and records, and these are scored.

The attacks see a `Seen`. The truth enters in `scored` alone, after every attack has ended. Who is attacked is drawn by
the public seed before. Beside the attack stand guesses without any message (baselines), and the same attack where it
must succeed (the control): on the raw gradient of one record at the initial weights. If the control fails, the attack
says nothing about the messages.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import torch
from torch import Tensor

from fedveil.attacks import labels, linear
from fedveil.attacks.candidates import Picked, picked
from fedveil.attacks.epochs import Simulation, invert_epochs
from fedveil.attacks.estimate import Estimate, cosines, estimates, masked
from fedveil.attacks.inversion import Found, Inversion, Target, invert, steps_of
from fedveil.attacks.scores import Nearness, Pool, Range, bootstrap, matching, overlap, score
from fedveil.attacks.seen import Seen
from fedveil.core.seeds import Seed
from fedveil.core.task import Task
from fedveil.runs.messages import Truths
from fedveil.train.local import LocalTraining

Tell = Callable[[str], object]

FOUND, NOT_FOUND, INCONCLUSIVE = "found", "not found", "inconclusive"
CONTROLS = 8  # records on which the control is run
WORKS = 0.5  # the share of them that it must identify
NO_LABELS, TOKENS = "records have no class labels", "records are tokens"  # why records are not rebuilt
NO_LAST = "the last layer is not trained, so labels cannot be told"
MASKED, CODES = "masked", ("code", "difference")  # kinds of estimates
FAITHFUL = 0.95  # a cosine from which a code hides nothing
DEVIATIONS = 5.0  # of the cosine of noise, 1/√d, beyond which a masked vector is no noise
SIMULATED = 256  # records in all local steps up to which an attack goes through a client's training
PICTURED = 8  # records that are drawn
MATCHING = Inversion(steps=1200, tv=1e-4, restarts=4, screen=100)


@dataclass(frozen=True)
class Attack:
    """How messages are attacked.

    inversion: how records are fitted to a gradient
    victims:   the most messages of a kind
    records:   the most records of all these messages together; where one message has more, one is attacked
    seconds:   for all of it; what is not finished then is inconclusive
    """

    inversion: Inversion = MATCHING
    victims: int = 8
    records: int = 256
    seconds: float = 120.0


class Exposure(msgspec.Struct, frozen=True):
    """What the messages of one kind expose.

    kind:      of estimate, see `attacks.estimate`
    rounds:    of the messages attacked
    messages:  how many, each of `records` records
    cosine:    of the estimate with the true gradient or update
    labels:    the share of records whose label was found
    reached:   by the attack on records
    baselines: what guesses reach: the "mean" record, a "random" one, and the held-out one "nearest" to the truth
    control:   what the attack reaches on raw gradients of one record at the initial weights
    verdict:   "found", "not found" or "inconclusive"
    why:       one sentence on the verdict
    picked:    what testing candidates finds, see `attacks.candidates`
    """

    kind: str
    rounds: list[int]
    messages: int
    records: int
    cosine: Range
    labels: Range | None
    reached: Nearness | None
    baselines: dict[str, Nearness]
    control: Nearness | None
    verdict: str
    why: str
    picked: Picked | None = None


@dataclass(frozen=True)
class Attempt:
    """What an attack made of some messages of one kind, before anybody looks at the truth."""

    kind: str
    victims: tuple[Estimate, ...]
    records: int
    labels: Tensor | None  # [V, n]
    found: Found | None
    how: str  # the attack, in a few words
    missing: str = ""  # why there is no attack on records


@dataclass(frozen=True)
class Pictures:
    """Records of victims [N, *input], what was made of them, and the nearest record that was held out."""

    true: Tensor
    found: Tensor
    nearest: Tensor


def attempts(seen: Seen, how: Attack, tell: Tell = lambda _: None, chosen_kinds: Sequence[str] = ()) -> list[Attempt]:
    """Attack the messages of each kind, or of some kinds. Nobody's records are looked at."""
    tell("reading messages")
    found = [each for each in estimates(seen) if not chosen_kinds or each.kind in chosen_kinds]
    kinds = list(dict.fromkeys(each.kind for each in found))
    began, made = time.monotonic(), list[Attempt]()
    for i, kind in enumerate(kinds):
        left = how.seconds - (time.monotonic() - began)
        deadline = time.monotonic() + max(0.0, left) / (len(kinds) - i)
        chosen, records = victims([each for each in found if each.kind == kind], seen, how)
        made.append(attempt(seen, chosen, records, how, deadline, partial(_said, tell, kind)))
    if (vectors := masked(seen)) and (not chosen_kinds or MASKED in chosen_kinds):
        made.append(Attempt(MASKED, tuple(vectors[: how.victims]), 0, None, None, "", "the vectors are masked"))
    return made


def _said(tell: Tell, kind: str, sentence: str) -> None:
    tell(f"{kind}: {sentence}")


def victims(found: Sequence[Estimate], seen: Seen, how: Attack) -> tuple[list[Estimate], int]:
    """Draw the messages to attack, all of as many records, by the public seed."""
    sizes = [each.records or seen.task.largest * len(each.clients) for each in found]
    records = Counter(sizes).most_common(1)[0][0]
    alike = [each for each, size in zip(found, sizes, strict=True) if size == records]
    order = seen.seed.child("audit", "victims", found[0].kind).numpy().permutation(len(alike))
    count = max(1, min(how.victims, how.records // records))
    return [alike[i] for i in sorted(order[:count])], records


def attempt(seen: Seen, chosen: Sequence[Estimate], records: int, how: Attack, deadline: float, tell: Tell) -> Attempt:
    """Make labels and records of the estimates."""
    first, task = chosen[0], seen.task
    local = getattr(seen.method, "local", None) if len(first.clients) == 1 else None  # a sum is as of one batch
    target = Target(
        torch.stack([each.weights for each in chosen]).to(task.device),
        torch.stack([each.vector for each in chosen]).to(task.device),
        first.means,
        records,
        local=_training(local, first.round, records),
    )
    if not task.data.labelled:
        return Attempt(first.kind, tuple(chosen), records, None, None, "", NO_LABELS)
    if not task.data.x.is_floating_point():
        return Attempt(first.kind, tuple(chosen), records, None, None, "", TOKENS)
    try:
        guessed = labels.count(task, target, seen.seed.child("audit", "labels")).y
    except ValueError:
        return Attempt(first.kind, tuple(chosen), records, None, None, "", NO_LAST)
    target = replace(target, labels=guessed)
    seed = seen.seed.child("audit", "records", first.kind)
    try:
        found, words = rebuilt(task, target, how.inversion, seed, tell, deadline)
    except torch.OutOfMemoryError:
        why = f"the device ran out of memory on {len(chosen)} messages of {records} records; use fewer --victims"
        return Attempt(first.kind, tuple(chosen), records, guessed, None, "", why)
    return Attempt(first.kind, tuple(chosen), records, guessed, found, words)


def _training(local: object, round_: int, records: int) -> LocalTraining:
    """The local training of a round; one step on all records where a method has none of its own."""
    if not isinstance(local, LocalTraining):
        return LocalTraining(batch=records)
    return replace(local, lr=local.rate(round_))


def rebuilt(task: Task, target: Target, how: Inversion, seed: Seed, tell: Tell, deadline: float) -> tuple[Found, str]:
    """Records from a gradient or an update, by the attack that suits it best, and its name."""
    assert target.labels is not None
    read = linear.find(task)
    if read and read[1] and target.records == 1:
        x = linear.recover(task, target.vector, 1).x
        return Found(x, target.labels, torch.zeros(len(x)), True), "read off the first linear layer"
    steps = steps_of(target.local, target.records) if target.means == "update" and target.local else 1
    plain = target.local is not None and target.local.optimizer == "sgd" and not target.local.weight_decay
    used = steps * min(target.local.step_size, target.records) if target.local else 0
    if steps > 1 and used <= SIMULATED and plain:
        found = invert_epochs(task, target, how, Simulation(), seed, tell=tell, deadline=deadline)
        return found, f"a simulation of {steps} local steps"
    return invert(task, target, how, seed, tell=tell, deadline=deadline), "gradient matching"


# ---------------------------------------------------------------------------------------------------- the scorer


def control(task: Task, how: Inversion, seed: Seed, tell: Tell = lambda _: None) -> Nearness:
    """What the attack reaches on raw gradients of single test records at the initial weights."""
    order = torch.from_numpy(seed.numpy().permutation(len(task.test_x)))
    chosen, rest = (part.to(task.device) for part in (order[:CONTROLS], order[CONTROLS:]))
    x, y = task.test_x[chosen][:, None], task.test_y[chosen][:, None]
    w = task.initial.expand(len(chosen), -1)
    gradient = task.gradient(w, x, y, torch.ones(y.shape, device=task.device))[0]
    target = Target(w, gradient, "gradient", 1)
    target = replace(target, labels=labels.count(task, target, seed.child("labels")).y)
    found, _ = rebuilt(task, target, how, seed.child("records"), lambda said: tell(f"control: {said}"), math.inf)
    pool = Pool.of(task.data, seed.child("pool"), task.test_x[rest])
    return score(found.x, x, pool, found.y, y).figures(seed.child("figures"))


def scored(
    task: Task, seen: Seen, made: Sequence[Attempt], truths: Truths, checked: Nearness | None
) -> tuple[list[Exposure], dict[str, Pictures]]:
    """Hold attempts against the truth: a row of the table for each, and pictures by kind.

    checked: the control; None where no attempt is on records
    """
    rows, pictures = list[Exposure](), dict[str, Pictures]()
    for each in made:
        row, drawn = _scored(task, seen, each, truths, checked)
        rows.append(row)
        if drawn:
            pictures[each.kind] = drawn
    return rows, pictures


def _scored(
    task: Task, seen: Seen, made: Attempt, truths: Truths, checked: Nearness | None
) -> tuple[Exposure, Pictures | None]:
    seed = seen.seed.child("audit", "scores")
    near = bootstrap(torch.tensor(cosines(task, _compared(seen, made.victims), truths)), seed)
    held = [_records(victim, truths[victim.round]) for victim in made.victims]
    reached, guesses, told, ahead, pictures = None, dict[str, Nearness](), None, 0.0, None
    if all(len(own) == made.records for own in held):
        index = torch.stack(held).to(task.device)
        x, y = task.x[index], task.y[index]
        if made.labels is not None:
            told = bootstrap(overlap(made.labels.cpu(), y.cpu(), task.data.classes), seed)
        if made.found:
            pool = Pool.of(task.data, seed, task.test_x)
            attack, made_up = score(made.found.x, x, pool, made.found.y, y), pool.baselines(x, seed)
            others = {name: score(guess, x, pool) for name, guess in made_up.items()}
            reached = attack.figures(seed)
            guesses = {name: other.figures(seed) for name, other in others.items()}
            compared = [others[name].identified for name in ("mean", "random")]
            ahead = _ahead(attack.identified, compared, reached.chance, seed)
            pictures = _pictures(pool, made.found.x, x, made_up["nearest"])
    tested = None if made.kind == MASKED else picked(task, seen, made.victims, truths)
    verdict, why = judged(made, near, task.layout.size, reached, ahead, checked, tested)
    rounds, count = sorted({victim.round for victim in made.victims}), len(made.victims)
    row = Exposure(made.kind, rounds, count, made.records, near, told, reached, guesses, checked, verdict, why, tested)
    return row, pictures


def judged(
    made: Attempt,
    near: Range,
    weights: int,
    reached: Nearness | None,
    ahead: float,
    checked: Nearness | None,
    tested: Picked | None = None,
) -> tuple[str, str]:
    """The verdict on an attempt, and why.

    near:    the cosine with the truth
    weights: d, which decides how large the cosine of noise is
    ahead:   by how much larger a share of records it identifies than guesses do, at least
    tested:  what testing candidates finds, which decides where no record can be rebuilt
    """
    if made.kind == MASKED:
        if max(near.low, -near.high) > DEVIATIONS / math.sqrt(weights):
            return FOUND, f"masked vectors tell about updates (cosine {near.value:.2f}), so the mask does not hide them"
        return NOT_FOUND, "masked vectors of single clients look like noise"
    if made.kind in CODES and near.low > FAITHFUL:
        return FOUND, f"the server decodes the codes of single clients to their updates (cosine {near.value:.2f})"
    if made.missing in (NO_LABELS, NO_LAST, TOKENS) and tested and tested.control >= WORKS:
        if tested.share.low > tested.chance:
            return FOUND, f"of {tested.candidates:,} candidates, {tested.share.value:.0%} of the true ones are picked"
        return (
            NOT_FOUND,
            f"testing {tested.candidates:,} candidates picks no more records than chance; its control works",
        )
    if reached is None or made.found is None:
        return INCONCLUSIVE, f"no attack on records: {made.missing or 'the truth is of other records'}"
    if reached.exact.low > 0 or ahead > 0:
        exact = f", {reached.exact.value:.0%} exactly" if reached.exact.value else ""
        late = "" if made.found.finished else "; time ran out before the attack ended"
        return FOUND, f"{reached.identified.value:.0%} of records are identified{exact}, by {made.how}{late}"
    if checked is None or checked.identified.value < WORKS:
        return INCONCLUSIVE, "the control failed: this attack does not even rebuild records from their raw gradients"
    if not made.found.finished:
        return INCONCLUSIVE, f"time ran out during {made.how}; raise --budget-seconds"
    return NOT_FOUND, f"{made.how} identifies no more records than guesses do; its control works"


def _ahead(hits: Tensor, guesses: Sequence[Tensor], chance: float, seed: Seed) -> float:
    """The lower limit, over victims, of the share of records that an attack identifies less what the better guess and
    chance reach; hits are [V, n]. Of one victim, the records are resampled."""
    better = torch.stack([guess.float() for guess in guesses]).amax(0) - hits.float()
    each = -better.mean(1) if len(hits) > 1 else -better[0]
    return bootstrap(each - chance, seed).low


def _compared(seen: Seen, victims: Sequence[Estimate]) -> Sequence[Estimate]:
    """Estimates as they are compared with the truth. The true update of DP-SGD holds the noise, so it is compared with
    the gradient of the records."""
    if getattr(seen.method.promise, "key", "") != "privacy":
        return victims
    return [v if v.means == "gradient" else replace(v, means="gradient", vector=-v.vector) for v in victims]


def _records(victim: Estimate, truth: Mapping[int, Mapping[str, Tensor]]) -> Tensor:
    return torch.cat([truth[client]["records"] for client in victim.clients])


def _pictures(pool: Pool, found: Tensor, true: Tensor, nearest: Tensor) -> Pictures:
    """The first records, with the reconstruction that is matched to each."""
    matched = torch.stack([f[matching(pool.pixels(f), pool.pixels(t))] for f, t in zip(found, true, strict=True)])
    return Pictures(*(pool.pixels(each).flatten(0, 1)[:PICTURED] for each in (true, matched, nearest)))
