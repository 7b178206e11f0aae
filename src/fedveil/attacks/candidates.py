"""Which of some candidates are behind a message? A server that has a list of records tests each, and rebuilds nothing.

A candidate is compared with the message by what it alone would have sent: its gradient at the weights of the question,
or its slopes along the same directions. What both have along the mean over all candidates is taken off, and the score
is the cosine of the rest. So the test works on tokens, and on messages from which no record can be rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from fedveil.attacks.scores import CANDIDATES, Range, bootstrap
from fedveil.attacks.seen import Estimate, Seen
from fedveil.attacks.slopes import Measured, measured, regrown
from fedveil.core.seeds import Seed
from fedveil.core.task import Task
from fedveil.methods.baffle.baffle import Baffle
from fedveil.methods.baffle.estimate import key_of
from fedveil.methods.baffle.probing import forward_only

HELD = 1 << 25  # numbers of candidates' messages that are held at once, in float32 or float64
AT_ONCE = 64  # candidates whose gradients are computed at once, at most
CONTROLS = 8  # messages of the control

Made = Callable[[Tensor, Tensor], Tensor]  # candidates x, y [n, …] -> what each alone would have sent, [n, M]
Truths = Mapping[int, Mapping[int, Mapping[str, Tensor]]]  # by round and client


class Picked(msgspec.Struct, frozen=True):
    """What testing candidates finds.

    messages:   how many were tested
    candidates: the records of all these messages, and others
    share:      of a message's n records, those among the n candidates with the highest scores
    chance:     the same for a random order
    auc:        the probability that a record of the message has a higher score than a candidate that is none
    control:    the share for messages that are the gradient of one test record at the initial weights
    """

    messages: int
    candidates: int
    share: Range
    chance: float
    auc: Range
    control: float


def picked(task: Task, seen: Seen, victims: Sequence[Estimate], truths: Truths) -> Picked | None:
    """Test candidates on the messages of some victims. Return None if there is no record behind any of them.

    task: with all records, of which only those behind the messages become candidates; the others are test records
    """
    seed = seen.seed.child("audit", "candidates")
    behind = [torch.unique(torch.cat(_rows(each, seen, truths))) for each in victims]
    victims = [each for each, own in zip(victims, behind, strict=True) if len(own)]
    behind = [own for own in behind if len(own)]
    if not victims:
        return None
    held = torch.unique(torch.cat(behind))
    order = torch.from_numpy(seed.numpy().permutation(len(task.test_x)))
    others = order[: max(2, CANDIDATES - len(behind[0]))]
    x, y = (torch.cat([t[held.to(t.device)], u[others.to(u.device)]]) for t, u in _sources(task))
    places = [torch.searchsorted(held, own) for own in behind]
    found = scores(task, seen, victims, x, y)
    hits = [_hits(each, own) for each, own in zip(found, places, strict=True)]
    areas = [_areas(each, own) for each, own in zip(found, places, strict=True)]
    chance = sum(map(len, places)) / len(places) / len(x)
    figures = [_over(each, seed.child(name)) for name, each in (("share", hits), ("auc", areas))]
    return Picked(len(victims), len(x), figures[0], chance, figures[1], control(task, order))


def _over(each: Sequence[Tensor], seed: Seed) -> Range:
    """The mean over messages of the mean over a message's records [n]; of one message, the records are resampled."""
    return bootstrap(each[0] if len(each) == 1 else torch.stack([own.mean() for own in each]), seed)


def control(task: Task, order: Tensor) -> float:
    """The share of test records that are picked by their own gradients at the initial weights."""
    x, y = (t[order[:AT_ONCE].to(t.device)] for t in (task.test_x, task.test_y))
    made = partial(_gradients, task, task.initial)
    found = similar(made, made(x[:CONTROLS], y[:CONTROLS]), x, y).cpu()
    return sum(float(_hits(own, torch.tensor([i]))) for i, own in enumerate(found)) / len(found)


def scores(task: Task, seen: Seen, victims: Sequence[Estimate], x: Tensor, y: Tensor) -> Tensor:
    """The scores [V, N] of candidates x, y [N, …] for each victim's message.

    What candidates would have sent is computed once for all victims that were asked the same.
    """
    found = torch.empty(len(victims), len(x))
    if isinstance(seen.method, Baffle):
        asked = [probes(seen, victim) for victim in victims]
        for same in _alike([[(m.round, m.key, len(m.slopes)) for m in own] for own in asked]):
            messages = torch.stack([torch.cat([m.slopes for m in asked[i]]) for i in same])
            found[same] = similar(partial(_slopes, seen.method, task, asked[same[0]]), messages, x, y).float().cpu()
        return found
    for same in _alike([victim.weights.cpu().numpy().tobytes() for victim in victims]):
        vectors = [victims[i].vector if victims[i].means == "gradient" else -victims[i].vector for i in same]
        made = partial(_gradients, task, victims[same[0]].weights.to(task.device))
        found[same] = similar(made, torch.stack(vectors).to(task.device), x, y).cpu()
    return found


def _alike(keys: Sequence[object]) -> list[list[int]]:
    """Indices of equal keys, together."""
    firsts = [keys.index(key) for key in keys]
    return [[i for i, own in enumerate(firsts) if own == first] for first in dict.fromkeys(firsts)]


def similar(made: Made, messages: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The cosine of messages [V, M] with what each candidate x, y [N, …] would have sent, both at right angles to the
    mean candidate's: [V, N]. The length of a message does not count."""
    at_once = max(1, min(AT_ONCE, HELD // messages.shape[1]))

    def parts() -> Iterator[Tensor]:
        return (made(u, v) for u, v in zip(x.split(at_once), y.split(at_once), strict=True))

    held = list(parts()) if len(x) * messages.shape[1] <= HELD else None
    mean = torch.zeros_like(messages[0])
    for part in held or parts():
        mean += part.sum(0)
    mean /= mean.norm().clamp(min=1e-30)

    def beside(rows: Tensor) -> Tensor:
        return F.normalize(rows - (rows @ mean)[:, None] * mean, dim=1, eps=1e-30)

    own = beside(messages)
    return torch.cat([own @ beside(part).T for part in held or parts()], 1)


def probes(seen: Seen, victim: Estimate) -> list[Measured]:
    """The slopes behind an estimate: of one client in one round or in all, or the mean over clients."""
    method = seen.method
    assert isinstance(method, Baffle)
    if victim.kind.startswith("slopes"):
        kept = [each for each in seen.rounds if victim.kind == "slopes over rounds" or each.round == victim.round]
        return [m for each in kept for m in measured(seen, each) if (m.client,) == victim.clients]
    key, prober = key_of(seen.round_seed(victim.round)), method.prober(seen.task)
    places, z = method.places(seen.task), regrown(prober, ((key, method.fewest),)).double()
    vector = victim.vector if places is None else victim.vector[places]
    return [Measured(victim.round, -1, victim.weights, key, z @ vector.double(), victim.records or 0)]


def _slopes(method: Baffle, task: Task, asked: Sequence[Measured], x: Tensor, y: Tensor) -> Tensor:
    """The slopes of single records in each of some questions, one after another: float64 [n, M]."""
    prober = method.prober(task)
    found = list[Tensor]()
    with forward_only(task.device):
        for each in asked:
            w, key = each.weights.to(task.device)[None], torch.tensor([each.key], device=task.device)
            found.append(prober.each(w, key, x[None], y[None], len(each.slopes))[0])
    return torch.cat(found, 1)


def _gradients(task: Task, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The gradients of single records at `w` [d], [n, d]."""
    ones = torch.ones(len(x), 1, device=x.device)
    return task.gradient(w.expand(len(x), -1), x[:, None], y[:, None], ones)[0]


def _rows(victim: Estimate, seen: Seen, truths: Truths) -> list[Tensor]:
    """The records behind a message, as the truth has them; of slopes over rounds, those of all rounds."""
    rounds = [each.round for each in seen.rounds] if victim.kind == "slopes over rounds" else [victim.round]
    found = [torch.empty(0, dtype=torch.int64)]
    for number in rounds:
        own = truths[number]
        for client in victim.clients or own:
            if "records" in own.get(client, {}):
                found.append(own[client]["records"].long().cpu())
    return found


def _sources(task: Task) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return (task.x, task.test_x), (task.y, task.test_y)


def _hits(found: Tensor, own: Tensor) -> Tensor:
    """Which of the n candidates `own` are among the n with the highest scores [N]: 1 or 0, [n]."""
    return torch.isin(own, found.argsort(descending=True)[: len(own)]).double()


def _areas(found: Tensor, own: Tensor) -> Tensor:
    """For each of the candidates `own` the share of others [N - n] with a lower score, where ties count a half: [n]."""
    mask = torch.zeros(len(found), dtype=torch.bool)
    mask[own] = True
    ours, others = found[mask].contiguous(), found[~mask].sort().values
    below, upto = torch.searchsorted(others, ours), torch.searchsorted(others, ours, right=True)
    return (below + upto).double() / 2 / len(others)
