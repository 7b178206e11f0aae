"""BAFFLE's batch level: clients run the model forward only and answer with a few scalars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedveil.core.capability import FORWARD_PASSES
from fedveil.core.cohort import Cohort
from fedveil.core.directions import order, words
from fedveil.core.exchange import Handler
from fedveil.core.forecast import Compute, Turn
from fedveil.core.message import Question, Refused, Size
from fedveil.core.method import IN_TURN, SUMMED, About, Method, State
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.core.version import ADDED
from fedveil.gpu.graphs import one_thread
from fedveil.links.replay import longest, replay, step_of
from fedveil.links.steps import CatchUp, Steps
from fedveil.methods.about import PRIVATE
from fedveil.methods.baffle import private
from fedveil.methods.baffle.estimate import Estimate, key_of, signal
from fedveil.methods.baffle.local import LocalSteps
from fedveil.methods.baffle.probing import forward_only
from fedveil.methods.baffle.questions import Probe, ProbeHere, Slopes
from fedveil.privacy.account import Account
from fedveil.privacy.dpsgd import DpSgd
from fedveil.privacy.secagg.client import stages
from fedveil.privacy.secagg.server import ask_sum
from fedveil.privacy.secagg.settings import SecureSum
from fedveil.train.aggregators import shortened
from fedveil.train.moments import clipped, same_root
from fedveil.train.optimizers import ServerOptimizer

PAPER = "Feng et al., BAFFLE: A Baseline of Backpropagation-Free Federated Learning"


@dataclass(frozen=True)
class Baffle(Estimate, Method):
    """Backpropagation-free federated learning (BAFFLE, algorithm 1): the K slopes of a batch go up, as in FedSGD.

    batch:   records that a client draws for a question, and for each of its local steps; None: all it has
    centered: subtract the mean of a round's K coefficients. With forward differences, all slopes share half the
             curvature's trace times σ and the rounding of the loss at the weights, which point nowhere
    down:    "weights", or "replay": the K coefficients of the server's step, which clients regrow
    local:   local steps along a round's K directions; None: all slopes are measured at the server's weights
    secure:  learn sums only, through the secure sum
    privacy: clip each record's slopes and add noise; `batch` records are then drawn on average, by Poisson sampling
    """

    name: ClassVar[str] = "baffle"
    about: ClassVar[About] = About(
        "Clients only run the model forward and return how its loss changes along random directions.",
        sends="K slopes of its loss (4 K bytes) and the record count n_k",
        server_sees="K linear measurements of each client's gradient: its products with K directions that the server "
        "knows, from which it has the gradient's projection onto them, and more of it with every round; with secure "
        "those of the sum of gradients only",
        network_sees="the same scalars; who knows the seed knows what they measure",
        claims=(
            SUMMED,
            ("heuristic", "few numbers: K of d. That histograms of slopes look alike for data and noise, as in the "
            "paper, proves nothing: they are what a known linear map makes of the gradient."),
            ("measured", "'fedveil audit' rebuilds the record of a client with one of them from as many slopes as the "
            "model has weights. It identifies it from some tenths as many, and sometimes from a sixteenth where only a "
            "linear layer is trained. Slopes of several rounds add up. A server with a list of candidates needs only a "
            "few slopes to pick the record of a client with one."),
            PRIVATE[0],
        ),
        paper=PAPER,
    )  # fmt: skip
    unsupported: ClassVar[Mapping[str, str]] = {
        "user_privacy": "it clips and noises updates, and baffle sends slopes of the loss; use baffle-epochs, with "
        'method.up.name="sketch" for as few numbers',
    }

    batch: int | None = None
    centered: bool = field(default=False, metadata=ADDED)
    down: str = "weights"
    local: LocalSteps | None = field(default=None, metadata=ADDED)
    server: ServerOptimizer = field(default_factory=lambda: ServerOptimizer("adam", 0.01, tau=1e-8))
    secure: SecureSum | None = None
    privacy: DpSgd | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.down not in ("weights", "replay"):
            raise ValueError(f"method.down is '{self.down}'; use weights or replay")
        if self.batch is not None and self.batch < 1:
            raise ValueError(f"method.batch is {self.batch}; it is at least 1; leave it out for all records")
        if self.centered and (self.weak is not None or self.directions < 2):
            raise ValueError(
                "method.centered subtracts the mean of slopes along the same directions, at least 2; set "
                "method.directions to 2 or more and leave method.weak out"
            )
        if self.local:
            self.local.validate(self.directions, self.privacy is not None, self.seeds == "own" or self.weak is not None)
        if self.down == "replay" and self.seeds != "shared":
            raise ValueError('method.down is "replay", which repeats K shared slopes; it needs seeds "shared"')
        if self.privacy and (self.precision != "float32" or self.losses != "float64"):
            raise ValueError(
                "method.privacy runs the model in float64, so that no rounding moves more than a record's clip; leave "
                "method.precision and method.losses out"
            )
        if self.secure and self.seeds == "own":
            raise ValueError(
                'method.secure sums what all clients have along the same directions; set method.seeds="shared"'
            )

    def over(self, rounds: int) -> Baffle:
        server = self.server.over(rounds)
        return self if server == self.server else replace(self, server=server)

    @property
    def min_clients(self) -> int:
        return self.secure.min_clients if self.secure else 1

    @property
    def waits(self) -> str:
        return IN_TURN if self.secure else ""

    @property
    def promise(self) -> DpSgd | None:
        return self.privacy

    def client_cost(self, task: Task) -> Account | None:
        return self.privacy.account(task, self._drawn(task), 1, self.directions) if self.privacy else None

    def _drawn(self, task: Task) -> int:
        """How many records the client with the most draws, on average under differential privacy."""
        return task.largest if self.batch is None else min(self.batch, task.largest)

    @property
    def _sum(self) -> SecureSum | None:
        """The settings of the secure sum. How many records a client has is private, so private answers weigh 1."""
        return self.secure.even() if self.secure and self.privacy else self.secure

    @property
    def needs(self) -> tuple[str, ...]:
        return (FORWARD_PASSES,)

    def init_state(self, task: Task) -> State:
        self.validate(task)
        if self._sum:
            self._sum.validate(task, Slopes)
        if self.privacy:
            private.validate(task)
        return self.server.init_state(task.initial)

    # ------------------------------------------------------------------------------------------------ the server

    def round(self, state: State, cohort: Cohort) -> State:
        now = self.server.training(state)
        if self.down == "replay":
            cohort = self.steps.reach(now, cohort)
        keys, coefficients = self.probed(now, cohort)
        if self.centered:  # the mean of K - 1 degrees of freedom: the estimate stays unbiased
            coefficients = [(c - c.mean()) * (len(c) / (len(c) - 1)) for c in coefficients]
        if self.down == "weights":
            return self.server.published(state, self.take(cohort.task, now, keys, coefficients, cohort.round))
        longest = max(map(len, coefficients))  # clients take the step that the server takes, zeros and all
        coefficients = [F.pad(row, (0, longest - len(row))) for row in coefficients]
        after = self.take(cohort.task, now, keys, coefficients, self.steps.version(now) + 1)
        after = self.steps.record(now, after, step_of(keys, coefficients), cohort)
        return self.server.published(state, after)

    def probed(self, now: State, cohort: Cohort) -> tuple[list[int], list[Tensor]]:
        """Ask for slopes: keys j, and coefficients c_j of the estimated gradient Σ_j Σ_k c_jk z_jk (eq. 7)."""
        key = key_of(cohort.seed)
        if self._sum:
            mean = ask_sum(cohort, self.question(now, key, self.directions), self._sum).mean("slopes")
            return [key], [mean / self.fewest]
        made = {k: self.question(now, key, k) for k in {self.count(client) for client in cohort.ids}}
        asked = {client: made[self.count(client)] for client in cohort.ids}
        arrived = [(about, k, answer) for about, own in cohort.arrivals(asked, Slopes) for k, answer in own.items()]
        cohort.require(len(arrived), len(cohort))
        told = {client: answer.slopes * about.weight for about, client, answer in arrived}
        slopes, total = shortened(cohort, "slopes", told), sum(answer.records for *_, answer in arrived)
        rows = [(key_of(about.seed), k, own, a.records) for (about, k, a), own in zip(arrived, slopes, strict=True)]
        if self.seeds == "shared":  # but by those who were asked in one round
            keys = list(dict.fromkeys(row[0] for row in rows))
            if len(keys) == 1 < len(rows) and self.fewest > 1:
                along = torch.stack([own[: self.fewest] for _, _, own, _ in rows])
                cohort.note(signal=signal(along, torch.tensor([n for *_, n in rows])))
            return keys, [_mean([(own, n) for k, _, own, n in rows if k == each], total) for each in keys]
        every: list[int] = words(*(torch.tensor([row[i] for row in rows]) for i in (0, 1))).tolist()
        return every, [own * (n / total / len(own)) for _, _, own, n in rows]

    def question(self, now: State, key: int, count: int) -> Question:
        if self.down == "replay":
            return ProbeHere(self.steps.version(now), key, count)
        return Probe(now.weights, key, count)

    def take(self, task: Task, now: State, keys: Sequence[int], coefficients: Sequence[Tensor], number: int) -> State:
        """The server's step of a round, or with `replay` of a number, which every client takes too; with shared seeds
        in arithmetic that all round alike."""
        with forward_only(task.device), one_thread():
            gradient = self.prober(task).combine(keys, coefficients)
            return self.server.step(now, -clipped(torch, gradient, self.clip), number, same_root(torch))

    # ------------------------------------------------------------------------------------------------ the clients

    @property
    def handlers(self) -> Mapping[type[Question], Handler]:
        own: dict[type[Question], Handler]
        if self.down == "replay":
            own = {ProbeHere: lambda stack, q: self.probe(stack, self.steps.held(stack, q.version), q)}
        else:
            own = {Probe: lambda stack, q: self.probe(stack, q.weights.to(stack.task.device), q)}
        own = stages(self._sum, (own, Slopes)) if self._sum else own
        return own | {CatchUp: self.steps.follow} if self.down == "replay" else own

    def probe(self, stack: ClientStack, w: Tensor, question: Probe | ProbeHere) -> list[Slopes]:
        """Slopes at `w` [d]. What is summed securely is of one length: a client of K_c directions answers with
        s_k · min K / K_c and then zeros, so no value is larger than its slope."""
        asked = self.asked(question)
        if cost := self.client_cost(stack.task):
            stack.charge(cost)
        if not self.secure:
            return self._probe(stack, w, question.key, asked)
        counts = [min(asked, self.count(client)) for client in stack.clients]
        answers, drawn = dict[int, Slopes](), dict[int, Tensor]()
        for count in sorted(set(counts)):
            rows = [i for i, own in enumerate(counts) if own == count]
            part = stack if len(rows) == len(stack) else stack.part(rows)
            for i, own in zip(rows, self._probe(part, w, question.key, count), strict=True):
                answers[i] = Slopes(F.pad(own.slopes * (self.fewest / count), (0, asked - count)), own.records)
            if part is not stack:
                stack.passes += part.passes
                drawn.update(zip(rows, part.truth.get("records", ()), strict=False))
        if drawn:
            stack.reveal(records=[drawn[i] for i in range(len(stack))])
        return [answers[i] for i in range(len(stack))]

    def _probe(self, stack: ClientStack, w: Tensor, key: int, count: int) -> list[Slopes]:
        """The first `count` slopes. With shared seeds all clients' records run through the same perturbed models."""
        task = stack.task
        keys = words(torch.tensor([key]), torch.tensor(stack.clients))
        if self.privacy:  # how many records were drawn, or are there, is not told
            batch, own = self._drawn(task), keys if self.seeds == "own" else torch.tensor([key])
            stack.passes += int(np.minimum(batch, stack.rows.counts).sum()) * self.passes(count)
            found = private.answer(self.privacy, self.prober(task), stack, w, own, count, batch)
            return [Slopes(row) for row in found.cpu()]
        if self.local:
            return self._walked(self.local, stack, w, key, keys, count)
        index, mask = self.drawn(stack, keys)
        stack.reveal(records=[own[here > 0] for own, here in zip(index, mask, strict=True)])
        mask = mask / mask.sum(1, keepdim=True)
        stack.passes += int((mask > 0).sum()) * self.passes(count)
        x, y, mask, keys = task.x[index], task.y[index], mask.to(task.device), keys.to(task.device)
        with forward_only(task.device):
            if self.seeds == "own":
                weights, share = w.expand(len(stack), -1), mask[..., None]
            else:
                weights, share = w[None], torch.block_diag(*mask.split(1)).T[None]
                x, y, keys = x.flatten(0, 1)[None], y.flatten(0, 1)[None], keys.new_tensor([key])
            slopes = self.prober(task).slopes(weights, keys, x, y, share, count).reshape(len(stack), count).cpu()
        return [Slopes(row, int(n)) for row, n in zip(slopes, stack.rows.counts, strict=True)]

    def _walked(
        self, local: LocalSteps, stack: ClientStack, w: Tensor, key: int, keys: Tensor, count: int
    ) -> list[Slopes]:
        """The answers of clients that take local steps, each with a draw of records of its own."""
        task = stack.task
        drawn = [self.drawn(stack, words(keys, torch.tensor([step]))) for step in range(local.steps)]
        rows = [torch.cat([index[i][mask[i] > 0] for index, mask in drawn]) for i in range(len(stack))]
        stack.reveal(records=rows)
        stack.passes += sum(map(len, rows)) * self.passes(local.directions)
        batches = ((task.x[index], task.y[index], mask.to(task.device)) for index, mask in drawn)
        with forward_only(task.device):
            slopes = local.slopes(self.prober(task), w, key, batches, count).cpu()
        return [Slopes(row, int(n)) for row, n in zip(slopes, stack.rows.counts, strict=True)]

    def asked(self, question: Probe | ProbeHere) -> int:
        """K of a question, unless it is more work than the recipe says."""
        if question.directions > self.directions:
            raise Refused(
                "too large", f"{question.directions} directions are asked for, {self.directions} are answered"
            )
        if self.local and question.directions < self.directions:
            raise Refused(
                "wrong field", f"{question.directions} directions are asked for, local steps use {self.directions}"
            )
        return question.directions

    def drawn(self, stack: ClientStack, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The records of a batch: indices [C, B], and 1 for each, 0 for padding."""
        index, mask = (torch.from_numpy(a) for a in stack.rows.padded())
        if self.batch is None or index.shape[1] <= self.batch:
            return index, mask
        chosen = torch.zeros(len(stack), self.batch, dtype=torch.int64)
        for row, key, n in zip(chosen, keys, stack.rows.counts.tolist(), strict=True):
            picked = order(torch, key[None], n)[0, : self.batch]
            row[: len(picked)] = picked
        counts = torch.from_numpy(stack.rows.counts)[:, None]
        return index.gather(1, chosen), (torch.arange(self.batch) < counts).float()

    # ------------------------------------------------------------------------------------------------ both sides

    @property
    def fewest(self) -> int:
        """The smallest K that a client has."""
        return self.directions if self.weak is None else self.weak

    @property
    def steps(self) -> Steps:
        return replay(lambda task: self.server.init_state(task.initial), self.take, self.directions)

    def schema(self, task: Task, question: Question, client: int) -> Mapping[str, Size]:
        sizes = {**task.sizes, **question.sizes()}
        return {**sizes, "records": 1} if self.privacy else sizes

    def forecast_messages(self, task: Task, turn: Turn) -> list[Question]:
        count = self.directions if self.secure else self.count(turn.client)
        weights = torch.empty(task.layout.size, device="meta")
        asked: list[Question] = [Probe(weights, 2**62, count)]
        if self.down == "replay":
            caught = self.steps.foreseen(task, longest(self.directions), turn.round - 1, turn.missed)
            asked = [caught, ProbeHere(turn.round - 1, 2**62, count)]
        if self._sum:
            asked[-1:] = self._sum.forecast_messages(self, task, asked[-1], turn)
        return asked

    def forecast_compute(self, turn: Turn) -> Compute:
        records = min(self.batch or turn.records, turn.records)
        if self.local:
            return Compute(self.local.steps * records * self.passes(self.local.directions), 4, records)
        return Compute(records * self.passes(self.count(turn.client)), 3, records)


def _mean(answers: Sequence[tuple[Tensor, int]], records: int | None = None) -> Tensor:
    """Coefficients c_k = Σ_c (N_c / N) s_ck / K_c [K] of the estimate Σ c_k z_k, where client c probed K_c directions:
    the mean by records of the clients' own means (eq. 7). N counts records of other answers too, where it is given."""
    longest, records = max(len(slopes) for slopes, _ in answers), records or sum(n for _, n in answers)
    total = torch.zeros(longest, dtype=torch.float64)
    for slopes, n in answers:
        total[: len(slopes)] += slopes.double() * (n * (longest / len(slopes)))
    return (total / records / longest).float()
