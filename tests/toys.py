"""Small tasks, the hardest shapes a method can take, and engines that misbehave."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedveil as fv
from fedveil.core import message
from fedveil.core.clients import Clients, Letter, Reply
from fedveil.core.message import Answer, Question, Record, Refused, Shape, Weights
from fedveil.data import from_tensors
from fedveil.engines import LocalEngine
from fedveil.runs.folder import RunFolder


def linear_task(clients: int = 4, records: int = 24, seed: int = 0, uneven: bool = False) -> fv.Task:
    """A linear model on 3 features and 2 classes: 8 weights. With `uneven`, client k has about k+1 times client 0's."""
    draw = fv.Seed.root(seed).torch()
    x = torch.randn(records, 3, generator=draw)
    y = (x.sum(1) > 0).long()
    data = from_tensors(x, y, x, y, classes=2)
    split = fv.split("iid", data, clients, fv.Seed.root(seed))
    if uneven:
        ends = torch.arange(1, clients + 1).cumsum(0)
        starts = torch.cat([torch.zeros(1), ends * records / ends[-1]]).long().numpy()
        split = fv.Split(split.order, starts, "uneven")
    split = replace(split, max_records=split.largest)
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).view(2, 3) / 10)
        model.bias.zero_()
    return fv.Task(model, data, split)


def kept(path: Path) -> tuple[Any, ...]:
    """What a run folder holds, to be compared: state and memories bit for bit, rows without their seconds."""
    with contextlib.closing(RunFolder(path)) as folder:
        saved = folder.load()
    assert saved
    memory = {k: [(*e[:3], message.pack(e[3])) for e in entries] for k, entries in saved.memory.items()}
    rows = [row.untimed() for row in fv.Ledger.read(path / "ledger.jsonl").rows]
    return saved.round, message.pack(saved.state), memory, rows


# ---------------------------------------------------------------------------------------------------- toy methods

Scalar = Annotated[Tensor, Shape((1,))]


@message.kind
class Number(Answer, frozen=True):
    value: Scalar


@message.kind
class First(Question, frozen=True):
    reply = Number
    value: Scalar


@message.kind
class Second(Question, frozen=True):
    reply = Number
    value: Scalar


@dataclass(frozen=True)
class Twice(fv.Method):
    """Asks for a number, then asks again and finds what the client kept in between."""

    name: ClassVar[str] = "toy-twice"

    def init_state(self, task: fv.Task) -> fv.State:
        return Plain(task.initial)

    def round(self, state: Any, cohort: fv.Cohort) -> fv.State:
        most = cohort.ask(First(torch.ones(1))).stack("value").amax(0)
        answers = cohort.ask(Second(most))
        return Plain(state.weights + answers.stack("value").sum(0))

    @property
    def handlers(self) -> Mapping[type[Question], Callable[..., Sequence[Answer]]]:
        return {First: self.first, Second: self.second}

    def first(self, stack: fv.ClientStack, question: First) -> list[Number]:
        own = [torch.tensor([float(k)]) + question.value for k in stack.clients]
        for note, value in zip(stack.notes, own, strict=True):
            note["own"] = value
        return [Number(v) for v in own]

    def second(self, stack: fv.ClientStack, question: Second) -> list[Number]:
        return [Number(v / question.value) for v in stack.recall("own")]


@message.kind
class Plain(fv.State, frozen=True):
    pass


@message.kind
class Stage(Question, frozen=True):
    """One of four stages of a toy sum; `mail` is what others sent to this client."""

    reply = Number
    stage: int
    value: Scalar


@dataclass(frozen=True)
class FourStages(fv.Method):
    """A sum in four stages, each asked of the survivors of the one before, each client something else."""

    name: ClassVar[str] = "toy-four-stages"

    def init_state(self, task: fv.Task) -> fv.State:
        return Plain(task.initial)

    def round(self, state: Any, cohort: fv.Cohort) -> fv.State:
        mail = dict.fromkeys(cohort.ids, torch.zeros(1))
        for stage in range(4):
            answers = cohort.ask({k: Stage(stage, mail[k]) for k in cohort.ids})
            cohort = cohort.only(answers)
            mail = {k: answers[k].value + k for k in answers}
            cohort.note(**{f"stage{stage}": len(answers)})
        return Plain(state.weights + sum(mail.values(), torch.zeros(1)))

    @property
    def handlers(self) -> Mapping[type[Question], Callable[..., Sequence[Answer]]]:
        return {Stage: lambda stack, question: [Number(question.value + 1) for _ in stack.clients]}


@message.kind
class Step(Record, frozen=True):
    change: Weights


@message.kind
class Digest(Answer, frozen=True):
    total: Scalar


@message.kind
class CatchUp(Question, frozen=True):
    """The steps a client has missed, oldest first."""

    reply = Digest
    steps: list[Step]


@message.kind
class FollowState(fv.State, frozen=True, kw_only=True):
    history: list[Step]
    versions: Annotated[Tensor, Shape(("clients",), torch.int64)]


@message.kind
class Followed(Record, frozen=True):
    weights: Weights


@dataclass(frozen=True)
class LastReference(fv.Method):
    """The server sends only changes since a client was last seen; a client that was away gets all it missed."""

    name: ClassVar[str] = "toy-last"

    def init_state(self, task: fv.Task) -> fv.State:
        return FollowState(task.initial, history=[], versions=torch.zeros(len(task.clients), dtype=torch.int64))

    def round(self, state: Any, cohort: fv.Cohort) -> fv.State:
        step = Step(torch.full_like(state.weights, float(cohort.round)))
        history = [*state.history, step]
        answers = cohort.ask({k: CatchUp(history[int(state.versions[k]) :]) for k in cohort.ids})
        weights = state.weights + step.change
        versions = state.versions.clone()
        for client, answer in answers.items():
            assert torch.allclose(answer.total, weights.sum()[None]), f"client {client} is out of step"
            versions[client] = len(history)
        return FollowState(weights, history=history, versions=versions)

    @property
    def handlers(self) -> Mapping[type[Question], Callable[..., Sequence[Answer]]]:
        return {CatchUp: self.follow}

    def follow(self, stack: fv.ClientStack, question: CatchUp) -> list[Digest]:
        here = [stack.task.initial if m is None else m.weights for m in stack.slot("followed")]
        here = [w + sum(s.change for s in question.steps) for w in here]
        stack.remember("followed", [Followed(w) for w in here])
        return [Digest(w.sum()[None]) for w in here]


for toy in (Twice, FourStages, LastReference):
    del fv.METHODS[toy.name]  # `fedveil list` shows no toys


# ---------------------------------------------------------------------------------------------------- engines


class Tamper:
    """A local engine whose replies pass through `change(round, replies) -> replies` before the server sees them."""

    def __init__(self, change: Callable[[int, list[Reply]], Iterable[Reply]]) -> None:
        self.change, self.inner, self.stack = change, LocalEngine(stack=1, workers=1), 1

    def open(self, clients: Clients) -> None:
        self.inner.open(clients)

    def deliver(self, letters: Sequence[Letter], deadline: float | None) -> Iterable[Reply]:
        replies = sorted(self.inner.deliver(letters, deadline), key=lambda reply: reply.client)
        return self.change(letters[0].envelope.round if letters else 0, replies)

    def close(self) -> None:
        self.inner.close()


class OtherProcess:
    """Clients in a process of their own; only frames cross the pipe."""

    def open(self, clients: Clients) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, far = context.Pipe()
        self.process = context.Process(target=_serve, args=(clients, far), daemon=True)
        self.process.start()

    def deliver(self, letters: Sequence[Letter], deadline: float | None) -> Iterable[Reply]:
        self.pipe.send_bytes(len(letters).to_bytes(4, "little"))
        for letter in letters:
            self.pipe.send_bytes(letter.frame)
        replies = []
        for letter in letters:
            frame, problem = self.pipe.recv_bytes(), self.pipe.recv_bytes().decode()
            replies.append(Reply(letter.client, frame, problem))
        return replies

    def close(self) -> None:
        self.pipe.send_bytes(b"")
        self.process.join(10)
        assert self.process.exitcode == 0


def _serve(clients: Clients, pipe: Any) -> None:
    torch.set_num_threads(1)
    while count := pipe.recv_bytes():
        for frame in [pipe.recv_bytes() for _ in range(int.from_bytes(count, "little"))]:
            try:
                reply = clients.answer([Letter.read(frame)])[0]
            except Exception as error:
                reply = Reply(-1, problem=Clients.problem(error))
            pipe.send_bytes(reply.frame)
            pipe.send_bytes(reply.problem.encode())


class Fold:
    """Stands in for the kernel that sums windows, where there is no GPU."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.launch

    @staticmethod
    def launch(parts: Tensor, out: Tensor, places: int, channels: int, height: int, width: int, *more: int) -> None:
        _, _, across, kh, kw, sh, sw, ph, pw, *_ = more
        for one, target in zip(parts, out.view(len(parts), -1, channels, height, width), strict=True):
            columns = one.view(channels, kh * kw, len(target), across // len(target)).permute(2, 0, 1, 3).flatten(1, 2)
            target.copy_(F.fold(columns, (height, width), (kh, kw), stride=(sh, sw), padding=(ph, pw)))


class Spread:
    """The same for the kernel that copies windows."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.launch

    @staticmethod
    def launch(x: Tensor, out: Tensor, places: int, channels: int, height: int, width: int, *more: int) -> None:
        *_, kh, kw, sh, sw, ph, pw, _ = more
        for one, target in zip(x, out.view(len(x), channels * kh * kw, places), strict=True):
            seen = F.unfold(one, (kh, kw), stride=(sh, sw), padding=(ph, pw))  # [B, channels · kh · kw, rows · columns]
            target.copy_(seen.transpose(0, 1).flatten(1))


__all__ = [
    "Fold",
    "FourStages",
    "LastReference",
    "OtherProcess",
    "Refused",
    "Spread",
    "Tamper",
    "Twice",
    "kept",
    "linear_task",
]
