"""FedSGD, FedAvg, FedProx, SCAFFOLD and q-FedAvg: clients send their update as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from msgspec import Meta
from msgspec.structs import replace
from torch import Tensor

from fedveil import message
from fedveil.clients import Crowd
from fedveil.cost import Turn, Work
from fedveil.federation import About, Answers, Cohort, Method, State
from fedveil.local import Local, full_gradient, full_work
from fedveil.message import Answer, Question, Record, Refused, Size, Weights
from fedveil.privacy.secagg import SecureSum
from fedveil.server import Merge, Server, ServerState
from fedveil.task import Task
from fedveil.updates.codec import Codec, CodeSpace, Magnitude, Raw, Send, Tuned, Update
from fedveil.updates.down import Down, Follow, Held, Train, TrainFrom, TrainFull, TrainHere
from fedveil.updates.fit import cosine, normal


def raw_about(summary: str, sends: str, paper: str, sums: bool = True) -> About:
    """What holds for every method that sends updates in the clear, and for those that can sum them securely."""
    proved = (("proved", "with secure: the server learns the sum over the clients, and nothing else of any one."),)
    return About(
        summary,
        sends,
        server_sees="every client's update, exactly; from one record's gradient its input can be rebuilt",
        network_sees="the same bytes, unless the transport encrypts them",
        claims=(
            ("measured", "by others: inputs are rebuilt from updates by inversion. It protects nothing."),
            *(proved if sums else ()),
        ),
        paper=paper,
    )


@dataclass(frozen=True)
class FedAvg(Method):
    """Local training, then the mean of the updates (McMahan et al. 2017, algorithm 1).

    up, down:    how an update travels to the server, and the server's to the clients (None: full weights)
    feedback:    a client adds what the codec lost of its update to its next one (Seide et al. 2014)
    full_rounds: the last so many rounds send full updates and full weights (TOFU's switch₂)
    clip, noise: cut each update's norm to `clip` and add Gaussian noise of deviation noise × clip to each weight,
                 before it is encoded; without accounting, so it promises nothing by itself
    secure:      the server learns the sum of the updates only, or of the codes; with a codec whose messages do not add
                 up, that of the full rounds
    """

    name: ClassVar[str] = "fedavg"
    about: ClassVar[About] = raw_about(
        "Clients train locally; the server averages what changed.",
        "the weight update w_k - w (d floats) and the record count n_k",
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017",
    )

    local: Local = field(default_factory=Local)
    up: Codec = field(default_factory=Raw)
    down: Codec | None = None
    server: Server = field(default_factory=Server)
    merge: Merge = field(default_factory=Merge)
    feedback: bool = False
    full_rounds: int = 0
    clip: float | None = None
    noise: float = 0.0
    secure: SecureSum | None = None

    def __post_init__(self) -> None:
        if self.full_rounds < 0 or self.noise < 0 or (self.clip is not None and self.clip <= 0):
            raise ValueError("full_rounds and noise are 0 or more, and clip is above 0")
        if self.noise and self.clip is None:
            raise ValueError("noise is relative to clip; set clip too")
        if self.down and not self.down.downward:
            raise ValueError(f"method.down is {self.down.name}, which is for the way up only; give it another codec")
        if isinstance(self.up, CodeSpace) and self.merge.kind != "mean":
            raise ValueError(
                f"method.merge.kind is {self.merge.kind}, but of {self.up.name}'s codes only the mean is decoded and "
                "there are no single updates to choose among; use mean, with method.clip against large ones"
            )
        if self.feedback and isinstance(self.up, CodeSpace) and self.up.fixed:
            raise ValueError(
                f"method.feedback adds what {self.up.name} lost to the next update, but a code that is the same in "
                "every round never sends it; set method.up.permute=true"
            )
        if self.secure and self.full_rounds and isinstance(self.up, CodeSpace):
            raise ValueError(
                f"method.secure sums either {self.up.name}'s codes or full updates, which have another range; "
                "set full_rounds to 0"
            )

    @property
    def fewest(self) -> int:
        return self.secure.least if self.secure else 1

    def begin(self, task: Task) -> State:
        for codec in (self.up, self.down):
            if codec:
                codec.refuse(task)
        if how := self.summing:
            summed = self.up.payload if self.up.payload.sums or not self.full_rounds else Update
            how.refuse(task, summed, self.merge.kind)
        return self.server.begin(task.initial)

    @property
    def summing(self) -> SecureSum | None:
        """How sums are taken. Codes have a range of their own, whatever that of updates is said to be."""
        if self.secure and isinstance(self.up, CodeSpace):
            return dataclasses.replace(self.secure, clip=self.up.reach)
        return self.secure

    def round(self, state: ServerState, cohort: Cohort) -> State:
        if cohort.rounds_left < self.full_rounds:
            return self.full_round(state, cohort)
        down = Down(self.down)
        base, question, cohort = down.reach(state, cohort)
        if isinstance(self.up, CodeSpace):
            mean, share, _ = in_code_space(self.up, cohort.ask(question), cohort, self.summing)
            delta = mean / share
        elif self.secure and self.up.payload.sums:
            delta = cohort.ask_sum(question, self.secure).mean("update").to(base.device)
        else:
            delta = self.merged(base, cohort.ask(question), cohort)
        return down.step(self.server, state, delta, cohort)

    def full_round(self, state: ServerState, cohort: Cohort) -> State:
        """Full weights down, full updates up, or with `secure` their sum."""
        question, device = TrainFull(state.weights), cohort.task.device
        if self.secure:
            return self.server.step(state, cohort.ask_sum(question, self.secure).mean("update").to(device))
        answers = cohort.ask(question)
        delta = self.merge(answers.stack("update", device), answers.stack("records", device))
        return self.server.step(state, delta)

    def merged(self, base: Tensor, answers: Answers, cohort: Cohort) -> Tensor:
        """Decode at the weights the clients had and merge; an update that does not decode is refused by name."""
        usable = checked(self.up, answers, cohort)
        if shown := self.up.exhibit(next(iter(usable.values()))):
            cohort.exhibit(*shown)
        decoded = self.up.decode(cohort.task, base.expand(len(usable), -1), list(usable.values()))
        finite = decoded.sum(1).isfinite().tolist()
        for client, fine in zip(usable, finite, strict=True):
            if not fine:
                cohort.refuse(client, Refused("not finite", "the decoded update holds a value that is not a number"))
        cohort.require(sum(finite), len(cohort))
        records = torch.tensor([p.records for p in usable.values()], device=decoded.device)
        if not all(finite):
            rows = torch.tensor(finite, device=decoded.device)
            decoded, records = decoded[rows], records[rows]
        return self.merge(decoded, records)

    def reply(self, question: Question) -> type[Answer]:
        if isinstance(question, Train | TrainHere | TrainFrom) and isinstance(self.up, CodeSpace):
            return Magnitude
        return self.up.payload if _brings_payload(question) else type(question).reply

    def schema(self, task: Task, question: Question, client: int) -> Mapping[str, Size]:
        return self.up.of(client).sizes(task) if _brings_payload(question) else task.sizes

    def questions(self, task: Task, turn: Turn) -> list[Question]:
        if turn.rounds - turn.round < self.full_rounds:
            asked: list[Question] = [message.blank(TrainFull, task.sizes)]
        else:
            asked = Down(self.down).questions(task, turn) + [Send(0.0)] * isinstance(self.up, CodeSpace)
        if (how := self.summing) and isinstance(asked[-1], tuple(self.summed)):
            asked[-1:] = how.questions(self, task, asked[-1], turn)
        return asked

    def work(self, turn: Turn) -> Work:
        trained = self.training(turn.records)
        return trained if turn.rounds - turn.round < self.full_rounds else trained + self.up.of(turn.client).work()

    def training(self, records: int) -> Work:
        """What `update` takes of a client with so many records."""
        return self.local.work(records)

    @property
    def answer(self) -> Mapping[type[Question], Callable[[Crowd, Any], Sequence[Answer]]]:
        down = Down(self.down)
        table: dict[type[Question], Callable[[Crowd, Any], Sequence[Answer]]] = {
            Train: lambda crowd, q: self.encoded(crowd, q.weights.to(crowd.task.device)),
            TrainFull: lambda crowd, q: self.raw(crowd, q.weights.to(crowd.task.device)),
            Follow: down.follow,
            TrainHere: lambda crowd, q: self.encoded(crowd, down.held(crowd, q)),
            TrainFrom: lambda crowd, q: self.encoded(crowd, down.drawn(crowd, q)),
            Send: self.sent,
        }
        if how := self.summing:
            table |= how.stages({kind: table.pop(kind) for kind in self.summed})
        return table

    @property
    def summed(self) -> list[type[Question]]:
        """The questions whose answers are summed, with `secure`, and not given in the clear."""
        if isinstance(self.up, CodeSpace):
            return [Send]
        return [Train, TrainHere, TrainFrom, TrainFull] if self.up.payload.sums else [TrainFull]

    def update(self, crowd: Crowd, w: Tensor) -> Tensor:
        """Each client's update after local training from `w` [d], [C, d]."""
        trained, _ = self.local.train(crowd, w, self.correction(w))
        return trained - w

    def correction(self, w: Tensor) -> Callable[[Tensor], Tensor] | None:
        """What is added to each local gradient: nothing."""
        return None

    def raw(self, crowd: Crowd, w: Tensor) -> list[Update]:
        return counted(crowd, Raw().encode(crowd.task, w, self.privatised(crowd, self.update(crowd, w)), [], crowd))

    def encoded(self, crowd: Crowd, w: Tensor) -> list[Any]:
        """Train, add what was lost last time, and encode, or in code space say first how large it is."""
        true = self.privatised(crowd, self.update(crowd, w))
        if isinstance(self.up, Raw):
            return counted(crowd, self.up.encode(crowd.task, w, true, [], crowd))
        if isinstance(self.up, CodeSpace):  # the mean of codes is unweighted, so weights come first
            true = true * shares(crowd).to(true)
        if self.feedback:
            true = true + torch.stack([lost(m, w) for m in crowd.memory])
        if isinstance(self.up, CodeSpace):
            return [Magnitude(largest) for largest in noted(crowd, true)]
        return counted(crowd, self.coded(crowd, self.up, w.expand(len(crowd), -1), true))

    def sent(self, crowd: Crowd, question: Send) -> list[Any]:
        """The codes of what was trained in this round, at the scale that was agreed on."""
        up, true = tuned(self.up, crowd, question), recalled(crowd)
        payloads = self.coded(crowd, up, true, true)
        return [replace(payload, share=row) for payload, row in zip(payloads, shares(crowd), strict=True)]

    def coded(self, crowd: Crowd, up: Codec, base: Tensor, true: Tensor) -> list[Any]:
        """Encode, and remember what is lost this time."""
        task = crowd.task
        payloads = up.encode(task, base, true, crowd.seeds("encoding"), crowd)
        decoded = up.decode(task, base, payloads)
        crowd.measure(cosine=cosine(decoded, true))
        for layer in task.layout.layers:
            part = slice(layer.start, layer.stop)
            crowd.measure(**{f"cosine/{layer.name}": cosine(decoded[:, part], true[:, part])})
        if self.feedback:
            kept = [m or Held() for m in crowd.memory]
            crowd.remember([replace(m, residual=r) for m, r in zip(kept, (true - decoded).cpu(), strict=True)])
        return payloads

    def privatised(self, crowd: Crowd, updates: Tensor) -> Tensor:
        """Clipped to norm `clip`, with noise from each client's private root."""
        if self.clip is None:
            return updates
        norms = torch.linalg.vector_norm(updates, dim=1, keepdim=True)
        updates = updates * (self.clip / norms.clamp(min=self.clip))
        return updates + self.noise * self.clip * normal(crowd.secrets("noise"), "", updates.shape[1:], updates.device)


def _brings_payload(question: Question) -> bool:
    return isinstance(question, Train | TrainHere | TrainFrom | Send)


def checked(up: Codec, answers: Answers, cohort: Cohort) -> dict[int, Any]:
    """The payloads that can be decoded; others are refused by name."""
    usable = {}
    for client, payload in answers.items():
        try:
            up.of(client).check(cohort.task, payload)
            usable[client] = payload
        except Refused as error:
            cohort.refuse(client, error)
    cohort.require(len(usable), len(cohort))
    return usable


def in_code_space(
    up: CodeSpace, told: Answers, cohort: Cohort, secure: SecureSum | None = None
) -> tuple[Tensor, float, Sequence[int]]:
    """Agree on a scale, collect codes and decode their mean: the mean vector [d], the mean share, and whose it is."""
    scale = up.agree(told.stack("largest"), cohort.round)
    asked, question = cohort.only(told), Send(scale, up.digest)
    cohort.note(scale=scale)
    if secure:
        total = asked.ask_sum(question, secure)
        usable = {-1: up.payload(**{name: total.mean(name) for name in total.totals})}
    else:
        usable = checked(up, asked.ask(question), asked)
    payloads, clients = list(usable.values()), total.clients if secure else tuple(usable)
    mean = up.at(scale, cohort.seed).merge(cohort.task, payloads)
    return mean, float(message.stack(payloads, "share").mean()), clients


def shares(crowd: Crowd) -> Tensor:
    """λ_k: each client's records by the public maximum, [C, 1]."""
    return torch.from_numpy(crowd.rows.counts / crowd.task.largest).float()[:, None]


def noted(crowd: Crowd, vectors: Tensor) -> list[float]:
    """Keep what each client will send, [C, d], until the scale is known; the largest magnitude of each."""
    for note, vector in zip(crowd.notes, vectors, strict=True):
        note["vector"] = vector
    largest: list[float] = vectors.abs().amax(1).tolist()
    return largest


def recalled(crowd: Crowd) -> Tensor:
    """What was noted, [C, d]."""
    return torch.stack(crowd.recall("vector"))


def tuned(up: Codec, crowd: Crowd, question: Send) -> Tuned:
    """The codec of this round; a client with another code than the server's would send what nobody can decode."""
    if not isinstance(up, CodeSpace):
        raise Refused("wrong kind", f"{up.name} agrees on no scale")
    if question.digest != up.digest:
        raise Refused("out of step", "the server decodes with another pair; use the file that it uses")
    return up.at(question.scale, crowd.seed)


def counted(crowd: Crowd, payloads: Sequence[Any]) -> list[Any]:
    """Payloads with the number of records behind each."""
    return [replace(payload, records=int(n)) for payload, n in zip(payloads, crowd.rows.counts, strict=True)]


def lost(memory: Held | None, w: Tensor) -> Tensor:
    """What the codec has lost of a client's updates so far, [d]."""
    return torch.zeros_like(w) if memory is None or memory.residual is None else memory.residual.to(w.device)


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with local loss F_k(v) + (μ/2)‖v - w‖² (Li et al. 2020, eq. 2)."""

    name: ClassVar[str] = "fedprox"
    about: ClassVar[About] = raw_about(
        "FedAvg whose local training is held near the global weights.",
        "the weight update w_k - w (d floats) and the record count n_k",
        "Li et al., Federated Optimization in Heterogeneous Networks, 2020",
    )

    mu: float = 0.1

    def correction(self, w: Tensor) -> Callable[[Tensor], Tensor] | None:
        return lambda v: self.mu * (v - w)


@dataclass(frozen=True)
class FedSGD(FedAvg):
    """One gradient over all of a client's records; `server.lr` is the step (McMahan et al. 2017, section 2)."""

    name: ClassVar[str] = "fedsgd"
    about: ClassVar[About] = raw_about(
        "Clients send the gradient over all their records; the server takes one step.",
        "the negative gradient (d floats) and the record count n_k",
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017",
    )

    def update(self, crowd: Crowd, w: Tensor) -> Tensor:
        return -full_gradient(crowd, w)[0]

    def training(self, records: int) -> Work:
        return full_work(records)


# ---------------------------------------------------------------------------------------------------- SCAFFOLD


@message.kind(5)
class Controlled(Answer, frozen=True):
    """The client's update and the change of its control variate."""

    update: Weights
    control: Weights


@message.kind(6)
class TrainControlled(Question, frozen=True):
    """Train from these weights, correcting the drift with the server's control variate c."""

    reply = Controlled
    weights: Weights
    control: Weights


@message.kind(7)
class Control(Record, frozen=True):
    """A client's memory: its own control variate c_k."""

    control: Weights


@message.kind(8)
class ScaffoldState(State, frozen=True):
    """Global weights and control variate."""

    control: Weights


@dataclass(frozen=True)
class Scaffold(Method):
    """Control variates against client drift (Karimireddy et al. 2020, algorithm 1, option II)."""

    name: ClassVar[str] = "scaffold"
    about: ClassVar[About] = raw_about(
        "Clients correct their drift by the difference of their own and the mean gradient.",
        "the weight update and the change of the control variate (2d floats)",
        "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, 2020",
        sums=False,
    )

    local: Local = field(default_factory=Local)
    server_lr: float = 1.0

    def begin(self, task: Task) -> State:
        return ScaffoldState(task.initial, torch.zeros_like(task.initial))

    def round(self, state: ScaffoldState, cohort: Cohort) -> State:
        answers = cohort.ask(TrainControlled(state.weights, state.control))
        device = cohort.task.device
        share = len(answers) / len(cohort.task.clients)
        return ScaffoldState(
            state.weights + self.server_lr * answers.stack("update", device).mean(0),
            state.control + share * answers.stack("control", device).mean(0),
        )

    @property
    def answer(self) -> Mapping[type[Question], Callable[[Crowd, Any], Sequence[Answer]]]:
        return {TrainControlled: self.train}

    def work(self, turn: Turn) -> Work:
        return self.local.work(turn.records)

    def train(self, crowd: Crowd, question: TrainControlled) -> list[Controlled]:
        device = crowd.task.device
        w, c = question.weights.to(device), question.control.to(device)
        own = torch.stack([torch.zeros_like(c) if m is None else m.control.to(device) for m in crowd.memory])
        trained, steps = self.local.train(crowd, w, lambda v: c - own)
        new = own - c + (w - trained) / (steps * self.local.rate(crowd.round))[:, None]  # option II
        crowd.remember([Control(row) for row in new.cpu()])
        return [Controlled(u, d) for u, d in zip((trained - w).cpu(), (new - own).cpu(), strict=True)]


# ---------------------------------------------------------------------------------------------------- q-FedAvg


@message.kind(9)
class FairUpdate(Answer, frozen=True):
    """Δ_k and h_k of q-FedAvg: a weighted update and its share of the step's denominator."""

    update: Weights
    weight: Annotated[float, Meta(gt=0, lt=1e12)]


@message.kind(27)
class FairMagnitude(Answer, frozen=True):
    """h_k, and the largest magnitude in Δ_k, which follows in code."""

    largest: Annotated[float, Meta(ge=0, le=1e6)]
    weight: Annotated[float, Meta(gt=0, lt=1e12)]


@message.kind(10)
class TrainFair(Question, frozen=True):
    """Train from these weights and weight the update by your loss at them."""

    reply = FairUpdate
    weights: Weights


@dataclass(frozen=True)
class QFedAvg(Method):
    """Clients with a high loss count more (Li et al. 2020, algorithm 2). q = 0 is the unweighted FedAvg."""

    name: ClassVar[str] = "q-fedavg"
    about: ClassVar[About] = raw_about(
        "FedAvg that weights clients by their loss to the power q, for a fairer model.",
        "the loss-weighted update Δ_k (d floats) and the scalar h_k",
        "Li et al., Fair Resource Allocation in Federated Learning, 2020",
        sums=False,
    )

    local: Local = field(default_factory=Local)
    up: Codec = field(default_factory=Raw)
    q: float = 0.2

    def __post_init__(self) -> None:
        if self.q < 0:
            raise ValueError("q must be 0 or more")
        if not isinstance(self.up, Raw | CodeSpace):
            raise ValueError(f"method.up is {self.up.name}; q-fedavg takes raw, or fedage, whose codes it can sum")

    def begin(self, task: Task) -> State:
        self.up.refuse(task)
        return Server().begin(task.initial)

    def round(self, state: ServerState, cohort: Cohort) -> State:
        answers = cohort.ask(TrainFair(state.weights))
        if isinstance(self.up, CodeSpace):
            mean, _, clients = in_code_space(self.up, answers, cohort)
            return ServerState(state.weights - mean * (len(clients) / sum(answers[k].weight for k in clients)))
        device = cohort.task.device
        step = answers.stack("update", device).sum(0) / answers.stack("weight", device).sum().float()
        return ServerState(state.weights - step)

    def reply(self, question: Question) -> type[Answer]:
        if isinstance(self.up, CodeSpace):
            return self.up.payload if isinstance(question, Send) else FairMagnitude
        return type(question).reply

    def schema(self, task: Task, question: Question, client: int) -> Mapping[str, Size]:
        return self.up.sizes(task) if isinstance(question, Send) else task.sizes

    @property
    def answer(self) -> Mapping[type[Question], Callable[[Crowd, Any], Sequence[Answer]]]:
        return {TrainFair: self.train} | ({Send: self.send} if isinstance(self.up, CodeSpace) else {})

    def send(self, crowd: Crowd, question: Send) -> list[Any]:
        codec, delta = tuned(self.up, crowd, question), recalled(crowd)
        payloads = codec.encode(crowd.task, delta, delta, crowd.seeds("encoding"), crowd)
        crowd.measure(cosine=cosine(codec.decode(crowd.task, delta, payloads), delta))
        return payloads

    def work(self, turn: Turn) -> Work:
        return full_work(turn.records) + self.local.work(turn.records)

    def train(self, crowd: Crowd, question: TrainFair) -> list[FairUpdate] | list[FairMagnitude]:
        w = question.weights.to(crowd.task.device)
        _, loss = full_gradient(crowd, w)
        trained, _ = self.local.train(crowd, w)
        lipschitz = 1 / self.local.rate(crowd.round)  # the paper's L
        change = lipschitz * (w - trained)  # [C, d]
        power = (loss + 1e-10) ** self.q
        delta = power[:, None] * change
        weight = self.q * (loss + 1e-10) ** (self.q - 1) * change.square().sum(1) + lipschitz * power
        if isinstance(self.up, CodeSpace):
            largest = noted(crowd, delta)
            return [FairMagnitude(*pair) for pair in zip(largest, weight.tolist(), strict=True)]
        return [FairUpdate(d, float(h)) for d, h in zip(delta.cpu(), weight, strict=True)]
