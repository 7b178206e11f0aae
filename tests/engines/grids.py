"""Flower grids for tests: one in this process that misbehaves on request, and apps for one simulation of many runs."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

import fedveil as fv
from fedveil.core.clients import Clients, Letter
from fedveil.engines.flower import Flower, client_app, wire
from fedveil.methods.parts import Parts
from fedveil.runs import recipe
from fedveil.testing import grid
from fedveil.train.vectors import Vectors


@dataclass(frozen=True)
class Made:
    """Makes the clients of a test; two are the same if they have one label."""

    label: str
    clients: Any = None

    def __call__(self, context: Context) -> Clients:
        return self.clients

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Made) and self.label == other.label

    def __hash__(self) -> int:
        return hash(self.label)


def made(task: fv.Task, method: fv.Method, seed: int = 0, secret: fv.Seed | None = None) -> Made:
    clients = Clients(method, task, bytes(8), fv.Seed.root(seed), secret)
    return Made(str(id(clients)), clients)


class Nodes(grid.Nodes):
    """Nodes that misbehave on request.

    change: (node, reply) -> reply, None for a node that never answers, or an exception that Flower raises at the reply
    """

    def __init__(
        self, app: ClientApp, partitions: Iterable[int], change: Callable[[int, Message], Any] | None = None
    ) -> None:
        super().__init__(app, partitions)
        self.change = change
        self.questions: list[Message] = []

    def answer(self, node: int, question: Message) -> Any:
        if question.metadata.message_type == "train":
            self.questions.append(question)
        reply = super().answer(node, question)
        return self.change(node, reply) if self.change else reply

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        found: list[Any] = super().pull_messages(message_ids)
        for reply in found:
            if isinstance(reply, Exception):
                raise reply
        return [reply for reply in found if reply is not None]


# ---------------------------------------------------------------------------------------------------- one Ray


@dataclass(frozen=True)
class Recorded:
    """Makes the clients of whichever run this is, from what the server's side wrote down when it began."""

    file: str

    def __call__(self, context: Context) -> Clients:
        build, method, seed, secret = pickle.loads(Path(self.file).read_bytes())
        return Clients(method, build(), bytes(8), seed, secret)


@dataclass(frozen=True)
class AnyRun:
    """A client app's answer in a simulation of many runs."""

    folder: str

    def __call__(self, message: Message, context: Context) -> Message:
        frame = wire.take(message, "frame", bytes)
        return client_app(Recorded(f"{self.folder}/{Letter.read(frame).envelope.run.hex()}"))(message, context)


def any_run(folder: Path) -> ClientApp:
    app = client_app(Recorded(""))
    app._registered_funcs["train.default"] = AnyRun(str(folder))
    return app


class Recording:
    """An engine on such a simulation; `build` makes the task in each of its processes."""

    def __init__(self, engine: Flower, folder: Path, build: Callable[[], fv.Task]) -> None:
        self.engine, self.folder, self.build = engine, folder, build

    def open(self, clients: Clients) -> None:
        written = pickle.dumps((self.build, clients.method, clients.seed, clients.secret))
        (self.folder / clients.run.hex()).write_bytes(written)
        self.engine.nodes = len(clients.task.clients)
        self.engine.open(clients)
        self.deliver, self.close = self.engine.deliver, self.engine.close


@dataclass(frozen=True)
class FromToml:
    """Makes a recipe's task."""

    toml: str

    def __call__(self) -> fv.Task:
        return recipe.parse(tomllib.loads(self.toml)).build()


class Failing(fv.FedAvg):
    """Client 2 fails."""

    def released(self, stack: fv.ClientStack, question: Any, w: Tensor, parts: Parts | None = None) -> Vectors:
        if 2 in stack.clients:
            raise ArithmeticError("client 2 divides by zero")
        return super().released(stack, question, w, parts)


# ---------------------------------------------------------------------------------------------------- processes


def descendants(root: int) -> set[int]:
    """The processes below one, by id (Linux)."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            below.setdefault(int(entry.read_text().rpartition(")")[2].split()[1]), []).append(int(entry.parts[2]))
    found, left = set(), [root]
    while left:
        children = below.get(left.pop(), [])
        found.update(children)
        left += children
    return found


def alive(processes: Iterable[int]) -> list[str]:
    """Which of them are still there, by their command; a zombie is not."""
    found = []
    for pid in processes:
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z":
                found.append(f"{pid} " + Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip())
    return found


def gone(processes: Iterable[int], seconds: float = 10.0) -> list[str]:
    """Who of them is left after so many seconds at most."""
    end = time.monotonic() + seconds
    while (left := alive(processes)) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def peers(processes: Iterable[int]) -> set[str]:
    """Every address at which some processes listen or to which they are connected, as Linux writes it."""
    sockets = set()
    for pid in processes:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, remote, state, *more = line.split()
            if more[5] in sockets:
                found.add((local if state == "0A" else remote).partition(":")[0])
    return found
