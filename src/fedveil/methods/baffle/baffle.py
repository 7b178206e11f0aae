"""BAFFLE: clients run the model forward only and answer with a few scalars."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Annotated, Any, ClassVar

import torch
from msgspec import Meta
from msgspec.structs import replace
from torch import Tensor

from fedveil.codecs.directions import LAWS, Directions, order, words
from fedveil.core import message
from fedveil.core.cohort import Cohort
from fedveil.core.forecast import Compute, Turn
from fedveil.core.message import Answer, Count, Question, Refused, Shape, Size, Weights
from fedveil.core.method import SUMMED, About, Method
from fedveil.core.seeds import Seed, is_weak
from fedveil.core.stack import ClientStack
from fedveil.core.task import FORWARD_PASSES, Task
from fedveil.gpu.graphs import one_thread
from fedveil.links.replay import Key, Step, longest, replay
from fedveil.links.steps import CatchUp, Steps, Version
from fedveil.methods.baffle import edge
from fedveil.methods.baffle.probing import Prober, forward_only
from fedveil.privacy.secagg.protocol import SecureSum
from fedveil.train.aggregators import shortened
from fedveil.train.local import LocalTraining
from fedveil.train.optimizers import ServerOptimizer, ServerState

K = Annotated[int, Meta(ge=1, le=10**6)]
SIGMAS = {"float32": 1e-4, "float16": 1e-3}  # half precision rounds away most of what a smaller one changes


@message.kind(edge.SLOPES)
class Slopes(Answer, frozen=True):
    """How the client's mean loss changes along each direction, and the number of records behind it."""

    additive = True
    slopes: Annotated[Tensor, Shape(("directions",))]
    records: Count = 1


@message.kind(edge.PROBE)
class Probe(Question, frozen=True):
    """Probe these weights along the first so many directions of this key."""

    reply = Slopes
    weights: Weights
    key: Key
    directions: K

    def sizes(self) -> dict[str, Size]:
        return {"directions": self.directions}


@message.kind(49)
class ProbeHere(Question, frozen=True):
    """The same with the weights you hold, which are those of this version."""

    reply = Slopes
    version: Version
    key: Key
    directions: K

    def sizes(self) -> dict[str, Size]:
        return {"directions": self.directions}


@message.kind(50)
class Walked(Answer, frozen=True):
    """w_k - w after local steps along estimated gradients, and the number of records behind it."""

    additive = True
    update: Weights
    records: Count = 1


@message.kind(51)
class Walk(Question, frozen=True):
    """Train from these weights on your own records, with gradients estimated along so many directions a step."""

    reply = Walked
    weights: Weights
    key: Key
    directions: K


@message.kind(56)
class BaffleState(ServerState, frozen=True):
    """The weights that are trained where those that are published, `weights`, are their moving average."""

    live: Weights | None = None
    steps: int = 0


@dataclass(frozen=True)
class Baffle(Method):
    """Backpropagation-free federated learning (BAFFLE, algorithm 1).

    level:      "batch": the K slopes go up (FedSGD); "epoch": clients take local steps along estimated gradients and
                send their update (FedAvg)
    directions: K, a batch
    weak:       K of weak clients, who are `share` of all, drawn by number: their capability is public; None: all can
    scheme:     "forward" (K + 1 passes) or "central" (2 K); the paper's "twice-FD" is forward with twice as many
    seeds:      "shared": all clients probe the same K directions, so slopes can be summed; "own": each has others
    batch:      records that a client draws for a question of the batch level; None: all it has
    layers:     patterns of the names of layers that are trained, such as "fc*"; none: all are
    clip:       an estimated gradient is scaled so that no entry is larger; None: it is not
    ema:        publish a moving average of the weights, with coefficient min(ema, (1+t)/(10+t)) in step t; 0: do not
    down:       "weights", or "replay": the K coefficients of the server's step, which clients regrow
    sigma:      σ, how far a perturbed model is away; None: 1e-4, in float16 1e-3
    precision:  "float32", or "float16": perturbed models but for their linear layers run in half precision
    secure:     learn sums only, through the secure sum
    memory:     about how many megabytes a forward pass may hold; None lets the device decide
    """

    name: ClassVar[str] = "baffle"
    about: ClassVar[About] = About(
        "Clients only run the model forward and return how its loss changes along random directions.",
        sends="K slopes of its loss (4 K bytes) and the record count n_k; at the epoch level its update (d floats)",
        server_sees="K linear measurements of each client's gradient: its products with K directions that the server "
        "knows, from which it has the gradient's projection onto them, and more of it with every round; with secure "
        "those of the sum of gradients only; at the epoch level every client's update, or with secure their sum",
        network_sees="the same scalars; who knows the seed knows what they measure",
        claims=(
            SUMMED,
            ("heuristic", "few numbers: K of d. That histograms of slopes look alike for data and noise, as in the "
            "paper, proves nothing: they are what a known linear map makes of the gradient."),
        ),
        paper="Feng et al., BAFFLE: A Baseline of Backpropagation-Free Federated Learning",
    )  # fmt: skip
    unsupported: ClassVar[Mapping[str, str]] = {
        "privacy": "its slopes are of the loss of a whole batch, in which no record's part is cut or covered by noise",
        "user_privacy": "updates are cut and noised there, and it sends slopes of the loss",
    }

    level: str = "batch"
    directions: int = 100
    weak: int | None = None
    share: float = 0.5
    sigma: float | None = None
    precision: str = "float32"
    law: str = "gaussian"
    scheme: str = "forward"
    seeds: str = "shared"
    batch: int | None = None
    layers: list[str] = field(default_factory=list)
    clip: float | None = 0.3
    ema: float = 0.0
    down: str = "weights"
    local: LocalTraining = field(default_factory=lambda: LocalTraining("adam", 0.01, beta2=0.99, weight_decay=5e-4))
    server: ServerOptimizer = field(default_factory=lambda: ServerOptimizer("adam", 0.01, tau=1e-8))
    secure: SecureSum | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        for name, known in (
            ("level", ("batch", "epoch")),
            ("law", LAWS),
            ("scheme", ("forward", "central")),
            ("seeds", ("shared", "own")),
            ("down", ("weights", "replay")),
            ("precision", tuple(SIGMAS)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"method.{name} is '{getattr(self, name)}'; use {' or '.join(known)}")
        weak, batch, memory = (1 if value is None else value for value in (self.weak, self.batch, self.memory))
        if self.directions < 1 or not 1 <= weak <= self.directions or not 0 <= self.share <= 1:
            raise ValueError("method.directions is at least 1, method.weak from 1 to that, method.share from 0 to 1")
        if self.scale <= 0 or (self.clip is not None and self.clip <= 0) or not 0 <= self.ema < 1:
            raise ValueError("method.sigma and method.clip are above 0, and method.ema is from 0 to below 1")
        if min(batch, memory) < 1:
            raise ValueError("method.batch and method.memory are at least 1; leave them out for all records or memory")
        if self.down == "replay" and (self.level, self.seeds) != ("batch", "shared"):
            raise ValueError(
                'method.down is "replay", which repeats K shared slopes; it needs level "batch" and seeds "shared"'
            )
        if self.secure and (self.weak is not None or (self.level, self.seeds) == ("batch", "own")):
            raise ValueError(
                "method.secure sums what all clients have along the same directions; "
                'set method.seeds="shared" and leave method.weak out'
            )

    @property
    def min_clients(self) -> int:
        return self.secure.min_clients if self.secure else 1

    @property
    def needs(self) -> tuple[str, ...]:
        return (FORWARD_PASSES,)

    def init_state(self, task: Task) -> BaffleState:
        self.places(task)
        if self.secure:
            self.secure.validate(task, Slopes if self.level == "batch" else Walked)
        first = self.server.init_state(task.initial)
        return BaffleState(first.weights, first.first, first.second, live=task.initial if self.ema else None)

    # ------------------------------------------------------------------------------------------------ the server

    def round(self, state: BaffleState, cohort: Cohort) -> BaffleState:
        live = state.weights if state.live is None else state.live
        now = ServerState(live, state.first, state.second, state.history, state.versions)
        if self.level == "epoch":
            return self.published(state, self.server.step(now, self.walked(now, cohort)))
        if self.down == "replay":
            cohort = self.steps.reach(now, cohort)
        keys, coefficients = self.probed(now, cohort)
        after = self.take(cohort.task, now, keys, coefficients)
        if self.down == "replay":
            history, versions = self.steps.record(now, Step(keys[0], coefficients[0]), cohort)
            after = replace(after, history=history, versions=versions)
        return self.published(state, after)

    def probed(self, now: ServerState, cohort: Cohort) -> tuple[list[int], list[Tensor]]:
        """Ask for slopes: keys j, and coefficients c_j of the estimated gradient Σ_j Σ_k c_jk z_jk (eq. 7)."""
        key = _key(cohort.seed)
        made = {k: self.question(now, key, k) for k in {self.of(client) for client in cohort.ids}}
        if self.secure:
            mean = cohort.ask_sum(made[self.directions], self.secure).mean("slopes")
            return [key], [mean / len(mean)]
        answers = cohort.ask({client: made[self.of(client)] for client in cohort.ids})
        slopes, records = shortened(cohort, answers, "slopes"), [answer.records for answer in answers.values()]
        if self.seeds == "shared":
            return [key], [_mean(list(zip(slopes, records, strict=True)))]
        own: list[int] = words(torch.tensor([key]), torch.tensor(list(answers))).tolist()
        return own, [row * (n / sum(records) / len(row)) for row, n in zip(slopes, records, strict=True)]

    def question(self, now: ServerState, key: int, count: int) -> Question:
        if self.down == "replay":
            return ProbeHere(len(now.history), key, count)
        return Probe(now.weights, key, count)

    def take(self, task: Task, now: ServerState, keys: Sequence[int], coefficients: Sequence[Tensor]) -> ServerState:
        """The server's step, which with `replay` every client takes too; on one thread, so that all round alike."""
        with forward_only(task.device), one_thread():
            gradient = self.prober(task).combine(keys, coefficients)
            return self.server.step(now, -self.clipped(gradient))

    def walked(self, now: ServerState, cohort: Cohort) -> Tensor:
        """The mean of the clients' updates, [d]."""
        key, device = _key(cohort.seed), cohort.task.device
        made = {k: Walk(now.weights, key, k) for k in {self.of(client) for client in cohort.ids}}
        if self.secure:
            return cohort.ask_sum(made[self.directions], self.secure).mean("update").to(device)
        answers = cohort.ask({client: made[self.of(client)] for client in cohort.ids})
        records = answers.stack("records", device).float()
        return (records / records.sum()) @ torch.stack(shortened(cohort, answers, "update")).to(device)

    def published(self, state: BaffleState, after: ServerState) -> BaffleState:
        """The state with what is published: the weights, or their moving average (section 4.1)."""
        steps, weights, live = state.steps + 1, after.weights, None
        if self.ema:
            keep = min(self.ema, (1 + steps) / (10 + steps))
            weights, live = torch.lerp(after.weights, state.weights, keep), after.weights
        return BaffleState(weights, after.first, after.second, after.history, after.versions, live, steps)

    # ------------------------------------------------------------------------------------------------ the clients

    @property
    def handlers(self) -> Mapping[type[Question], Callable[[ClientStack, Any], Sequence[Answer]]]:
        own: dict[type[Question], Callable[[ClientStack, Any], Sequence[Answer]]] = {Walk: self.walk}
        if self.level == "batch" and self.down == "replay":
            own = {ProbeHere: lambda stack, q: self.probe(stack, self.steps.held(stack, q.version), q)}
        elif self.level == "batch":
            own = {Probe: lambda stack, q: self.probe(stack, q.weights.to(stack.task.device), q)}
        own = dict(self.secure.stages(own)) if self.secure else own
        return own | {CatchUp: self.steps.follow} if self.down == "replay" else own

    def probe(self, stack: ClientStack, w: Tensor, question: Probe | ProbeHere) -> list[Slopes]:
        """Slopes at `w` [d]. With shared seeds all clients' records run through the same perturbed models."""
        task, count = stack.task, self.asked(question)
        keys = words(torch.tensor([question.key]), torch.tensor(stack.clients))
        index, mask = self.drawn(stack, keys)
        mask = mask / mask.sum(1, keepdim=True)
        stack.passes += int((mask > 0).sum()) * self.passes(count)
        x, y, mask, keys = task.x[index], task.y[index], mask.to(task.device), keys.to(task.device)
        with forward_only(task.device):
            if self.seeds == "own":
                weights, share = w.expand(len(stack), -1), mask[..., None]
            else:
                weights, share = w[None], torch.block_diag(*mask.split(1)).T[None]
                x, y, keys = x.flatten(0, 1)[None], y.flatten(0, 1)[None], keys.new_tensor([question.key])
            slopes = self.prober(task).slopes(weights, keys, x, y, share, count).reshape(len(stack), count).cpu()
        return [Slopes(row, int(n)) for row, n in zip(slopes, stack.rows.counts, strict=True)]

    def asked(self, question: Probe | ProbeHere | Walk) -> int:
        """K of a question, unless it is more work than the recipe says."""
        if question.directions > self.directions:
            raise Refused(
                "too large", f"{question.directions} directions are asked for, {self.directions} are answered"
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

    def walk(self, stack: ClientStack, question: Walk) -> list[Walked]:
        """Local training whose gradients are estimated, each along directions of its own step."""
        task, count, w = stack.task, self.asked(question), question.weights.to(stack.task.device)
        prober, taken = self.prober(task), torch.zeros(1, dtype=torch.int64, device=task.device)
        keys = torch.tensor([question.key], device=task.device).expand(len(stack))
        if self.seeds == "own":
            keys = words(keys, torch.tensor(stack.clients, device=task.device))

        def estimate(weights: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
            gradient = prober.gradient(weights, words(keys, taken), x, y, mask, count)
            taken.add_(1)
            return self.clipped(gradient)

        local, correction, before = self.local, None, stack.passes
        if self.layers and local.weight_decay:  # what is not trained does not decay
            trained = prober.spread(w.new_ones(prober.directions.size))
            local = dataclasses.replace(local, weight_decay=0)
            correction = lambda v: self.local.weight_decay * trained * v  # noqa: E731
        with forward_only(task.device):
            weights, _ = local.train(stack, w, correction, estimate)
        stack.passes += (stack.passes - before) * (self.passes(count) - 1)
        return [Walked(row, int(n)) for row, n in zip((weights - w).cpu(), stack.rows.counts, strict=True)]

    # ------------------------------------------------------------------------------------------------ both sides

    def of(self, client: int) -> int:
        """K of a client: its public capability."""
        if self.weak is not None and is_weak(client, self.share):
            return self.weak
        return self.directions

    def passes(self, count: int) -> int:
        """Forward passes for so many directions."""
        return count + 1 if self.scheme == "forward" else 2 * count

    def clipped(self, gradient: Tensor) -> Tensor:
        """Each row scaled so that its largest entry is at most `clip`: the infinity norm's clip."""
        if self.clip is None:
            return gradient
        return gradient * (self.clip / gradient.abs().amax(-1, keepdim=True).clamp(min=self.clip))

    @property
    def steps(self) -> Steps:
        def take(task: Task, now: ServerState, step: Step) -> ServerState:
            return self.take(task, now, [step.key], [step.coefficients])

        return replay(lambda task: self.server.init_state(task.initial), take, self.directions)

    def prober(self, task: Task) -> Prober:
        places = self.places(task)
        size = task.layout.size if places is None else len(places)
        directions = Directions.of(self.law, size, self.directions)
        memory = None if self.memory is None else self.memory << 20
        precision: torch.dtype = getattr(torch, self.precision)
        return Prober(task, directions, self.scale, self.scheme, places, memory, precision)

    @property
    def scale(self) -> float:
        return SIGMAS[self.precision] if self.sigma is None else self.sigma

    def places(self, task: Task) -> Tensor | None:
        """Which entries of the flat weights are trained; None: all."""
        if not self.layers:
            return None
        layers = task.layout.layers
        for pattern in self.layers:
            if not any(fnmatch(layer.name, pattern) for layer in layers):
                names = ", ".join(layer.name for layer in layers)
                raise ValueError(f"method.layers has '{pattern}', which no layer is called; there are {names}")
        chosen = [layer for layer in layers if any(fnmatch(layer.name, pattern) for pattern in self.layers)]
        return torch.cat([torch.arange(layer.start, layer.stop, device=task.device) for layer in chosen])

    def schema(self, task: Task, question: Question, client: int) -> Mapping[str, Size]:
        return {**task.sizes, **question.sizes()}

    def forecast_messages(self, task: Task, turn: Turn) -> list[Question]:
        count, weights = self.of(turn.client), torch.empty(task.layout.size, device="meta")
        asked: list[Question] = [Walk(weights, 2**62, count)]
        if self.level == "batch" and self.down == "replay":
            caught = self.steps.foreseen(task, longest(self.directions), turn.round - 1, turn.missed)
            asked = [caught, ProbeHere(turn.round - 1, 2**62, count)]
        elif self.level == "batch":
            asked = [Probe(weights, 2**62, count)]
        if self.secure:
            asked[-1:] = self.secure.forecast_messages(self, task, asked[-1], turn)
        return asked

    def forecast_compute(self, turn: Turn) -> Compute:
        count = self.of(turn.client)
        if self.level == "epoch":
            local = self.local.forecast_compute(turn.records)
            return Compute(local.passes * self.passes(count), local.vectors + 1, local.held)
        records = min(self.batch or turn.records, turn.records)
        return Compute(records * self.passes(count), 3, records)


def _key(seed: Seed) -> int:
    """The key of a round's directions: 64 bits of its public seed."""
    return int.from_bytes(seed.child("directions").key[:8], "little", signed=True)


def _mean(answers: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Coefficients c_k [K] of the estimate Σ c_k z_k: for each direction the mean over those who probed it."""
    longest = max(len(slopes) for slopes, _ in answers)
    total, weight = torch.zeros(longest, dtype=torch.float64), torch.zeros(longest, dtype=torch.float64)
    for slopes, records in answers:
        total[: len(slopes)] += slopes.double() * records
        weight[: len(slopes)] += records
    return (total / weight / longest).float()
