"""Clients on Ray: actors that each answer a stack at a time, on this machine or on a cluster. Needs the extra `ray`."""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from fedveil.core.clients import Clients, Letter, Reply
from fedveil.core.memory import Memory
from fedveil.core.task import Task
from fedveil.engines import cluster, kept
from fedveil.engines.local import LocalEngine, cores

STARTING = 300.0  # seconds an actor has to import PyTorch and to load the task
STORE = 1 << 30  # bytes of messages in the shared memory of a Ray of the engine's own; what is more goes to the disk

Came = tuple[int, bytes, str, int, dict[str, float], bytes]  # client, frame, problem, passes, figures, what it keeps


class Actor:
    """One process of the cluster: it holds the task and the method, and answers for any client.

    like: the arguments of `Clients`
    key:  what secrets of a secure sum are sealed with between two questions
    """

    def __init__(self, like: tuple[Any, ...], key: bytes) -> None:
        self.clients, self.key = Clients(*like), key
        self.engine = LocalEngine(stack=len(self.clients.task.clients), workers=1)
        self.engine.open(self.clients)

    def ready(self) -> None:
        """Return when the actor has started."""

    def answer(self, frame: bytes, ids: Sequence[int], before: Sequence[bytes]) -> list[Came]:
        """Answer one question for these clients as one stack, given what each of them keeps."""
        here, first = self.clients, Letter.read(frame)
        here.memory, here.notes, here.round = Memory(), {}, 0
        for client, held in zip(ids, before, strict=True):
            if held:
                kept.unpack(held, here, client, self.key)
        letters = [replace(first, envelope=replace(first.envelope, client=client)) for client in ids]
        return [
            (r.client, r.frame, r.problem, r.passes, dict(r.figures), kept.pack(here, r.client, self.key))
            for r in self.engine.deliver(letters, None)
        ]


class RayEngine(LocalEngine):
    """Lets the actors of a Ray cluster answer the stacks of `LocalEngine`.

    The results are those of `LocalEngine` with the same `stack` and as many workers, bit for bit.

    address: HOST:PORT of a Ray cluster that runs already. None: the Ray to which this process is connected, or else one
             of the engine's own on this machine, which ends with the run
    workers: actors, each with a GPU if the task is on one, otherwise with a core and one thread; more actors than GPUs
             share them. None: as many as the cluster has
    stack:   clients trained as one; None lets the engine choose by device and model
    logs:    show Ray's log
    tell:    called with a sentence when Ray is started or connected
    """

    def __init__(
        self,
        address: str | None = None,
        workers: int | None = None,
        stack: int | None = None,
        *,
        logs: bool = False,
        tell: Callable[[str], object] = cluster.note,
    ) -> None:
        super().__init__(stack, workers, wire="bytes")
        self.address, self.logs, self.tell = address, logs, tell
        self._ray = cluster.load("the Ray engine", "ray")
        self._actors: list[Any] = []
        self._at_the_end, self._connected = ExitStack(), False

    def open(self, clients: Clients) -> None:
        """Start the actors. Raises ConnectionError where there is no Ray, or where it starts none."""
        try:
            super().open(clients)
            self._start(clients)
        except BaseException:
            self.close()
            raise

    def _start(self, clients: Clients) -> None:
        task = clients.task
        gpus = 1 / math.ceil(self._lanes / self._resources(task)) if task.device.type == "cuda" else 0
        method, own = clients.method, task.at(task.norms.values)  # compiled steps stay here
        like = self._ray.put((method, own, clients.run, clients.seed, clients.secret, clients.identities))
        make, key = self._ray.remote(num_cpus=1, num_gpus=gpus)(Actor), secrets.token_bytes(32)
        self._carried = kept.Carried(clients)
        self._make: Callable[[], Any] = lambda: make.remote(like, key)
        self._fill()

    def lanes(self, task: Task) -> int:
        """How many actors there are for a task. Raises ValueError if the cluster has no room for them."""
        self._connect(task)
        most = self._resources(task)
        lanes = self.workers or max(1, most)
        if most < (1 if task.device.type == "cuda" else lanes):
            self.close()
            told = f"the Ray cluster has {most} {_resource(task)}s, and {lanes} workers on {task.device} need more"
            raise ValueError(f"{told}; use fewer --workers or another cluster")
        return lanes

    def chosen(self, task: Task) -> tuple[int | None, int]:
        """What was asked for: without a stack, each actor gets one."""
        return self.stack, self.lanes(task)

    def _resources(self, task: Task) -> int:
        """How many GPUs the cluster has, or how many cores."""
        return int(self._ray.cluster_resources().get(_resource(task), 0))

    def close(self) -> None:
        """End the actors, and Ray if the engine has started it."""
        super().close()
        for actor in self._actors if self._ray.is_initialized() else ():
            self._ray.kill(actor)
        self._actors, self._connected = [], False
        self._at_the_end.close()

    def deliver(self, letters: Sequence[Letter], deadline: float | None) -> Iterable[Reply]:
        """Answer every letter, a stack at a time by whichever actor is free; a time limit is simulated elsewhere."""
        self._fill()
        stacks = self._stacks(letters)
        waiting, running, replies = deque(range(len(stacks))), dict[Any, tuple[Any, int]](), dict[int, list[Reply]]()
        free, errors = list(self._actors), self._ray.exceptions
        while waiting or running:
            while waiting and free:
                actor, number = free.pop(), waiting.popleft()
                running[self._ask(actor, stacks[number])] = actor, number
            (done,), _ = self._ray.wait(list(running))
            actor, number = running.pop(done)
            try:
                replies[number] = [self._read(came) for came in self._ray.get(done)]
            except errors.RayTaskError as error:
                replies[number] = [Reply(each.client, problem=Clients.problem(error.cause)) for each in stacks[number]]
            except errors.RayError as error:
                told = f"failed: the Ray actor that answered for its stack has died ({type(error).__name__})"
                replies[number] = [Reply(each.client, problem=told) for each in stacks[number]]
                self._actors.remove(actor)
                if not self._actors:
                    self._fill()
                    free = list(self._actors)
                continue
            free.append(actor)
        return [reply for _, own in sorted(replies.items()) for reply in own]

    def _ask(self, actor: Any, stack: Sequence[Letter]) -> Any:
        """Send a stack to an actor: one question, and what each client keeps."""
        ids, round_ = [letter.client for letter in stack], stack[0].envelope.round
        return actor.answer.remote(stack[0].frame, ids, [self._carried.along(client, round_) for client in ids])

    def _read(self, came: Came) -> Reply:
        client, frame, problem, passes, figures, after = came
        self._carried.back(client, after)
        return Reply(client, frame, problem, passes, figures)

    def _fill(self) -> None:
        """Start the actors that are missing."""
        fresh = [self._make() for _ in range(self._lanes - len(self._actors))]
        self._actors += fresh
        try:
            self._ray.get([actor.ready.remote() for actor in fresh], timeout=STARTING)
        except self._ray.exceptions.RayError as error:
            told = str(error).strip().splitlines()[-1].strip()
            raise ConnectionError(f"Ray's actors do not start: {told}; --debug shows Ray's log") from None

    def _connect(self, task: Task) -> None:
        """Connect to Ray, unless this process is connected already."""
        if self._connected:
            return
        if not self._ray.is_initialized():
            cpus = self.workers or (cores() if _resource(task) == "CPU" else torch.cuda.device_count())
            store = STORE + sum(each.nbytes for each in (task.x, task.y, task.test_x, task.test_y))
            own = cluster.connected(self.address, cpus, debug=self.logs, tell=self.tell, object_store_memory=store)
            self._at_the_end.enter_context(own)
        elif self.address is not None:
            told = f"this process is connected to Ray already, so it cannot connect to {self.address}"
            raise ValueError(f"{told}; leave the address out, or call ray.shutdown() first")
        self._connected = True


def _resource(task: Task) -> str:
    """What each actor needs for itself, as Ray calls it."""
    return "GPU" if task.device.type == "cuda" else "CPU"
