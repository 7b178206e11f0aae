"""Clients in this process, as stacks: one stack is one `vmap`, and on a CPU a few stacks run beside each other."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context

import torch

from fedveil.core.clients import Clients, Letter, Reply
from fedveil.core.loose import Loose
from fedveil.core.message import KINDS
from fedveil.core.stack import at_once
from fedveil.core.task import Task
from fedveil.gpu.context import using
from fedveil.gpu.graphs import one_thread
from fedveil.gpu.host import keep_freed_memory
from fedveil.gpu.separate import LARGE

# On a CPU a step of a small model costs mostly its dispatch, which threads take turns at, so clients are stacked; but a
# stack that leaves the caches takes twice as long a client. A step of a larger model costs arithmetic, which is no
# faster in a stack: then few clients are stacked, and of the largest models none. `LARGE` and `HUGE` are numbers of
# multiply-adds a record; the digits CNN has 25 thousand, LeNet5 416 thousand (`python -m benchmarks.rivals`).
HUGE = 5_000_000
SMALL_STACK, LARGE_STACK = 25, 5
AHEAD = 4  # stacks a worker that are begun before the first is handed over
WIRES = ("memory", "bytes")


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _most(task: Task) -> int:
    """The most clients in a stack whose size is not chosen."""
    if task.device.type != "cpu" or task.work < LARGE:
        return 10**9
    return LARGE_STACK if task.work < HUGE else 1


class ClientFailure(Exception):
    """In debug mode: which client failed, at which question, with which shapes."""


class LocalEngine:
    """The default engine.

    stack:   clients trained as one; None lets the engine choose by device and model, fewer if memory runs out
    workers: stacks trained beside each other, each on one thread; None lets the engine choose
    debug:   one client at a time, and the first failure ends the run with its client, question and shapes
    compile: compile the heaviest steps (see graphs.Fused): up to a minute each at first, then faster; pays on a GPU
    wire:    "memory" hands records over as they are, "bytes" encodes and reads every message as if it travelled; both
             have the same results and count the same bytes
    """

    def __init__(
        self,
        stack: int | None = None,
        workers: int | None = None,
        debug: bool = False,
        compile: bool = False,
        wire: str = "memory",
    ) -> None:
        if wire not in WIRES:
            raise ValueError(f"wire is '{wire}'; use {' or '.join(WIRES)}")
        if (stack is not None and stack < 1) or (workers is not None and workers < 1):
            raise ValueError("stack and workers are at least 1; leave them out to let the engine choose")
        self.stack, self.workers, self.debug, self.compile, self.wire = stack, workers, debug, compile, wire
        self._clients: Clients | None = None
        self._pool: ThreadPoolExecutor | None = None

    def open(self, clients: Clients) -> None:
        self._clients = clients
        clients.debug = self.debug
        task = clients.task
        if task.device.type == "cuda":
            keep_freed_memory()
            torch.set_float32_matmul_precision("high")  # as convolutions are by default, so what stands in for them
            torch.backends.cudnn.deterministic = True  # or server and clients decode one message differently
        self._stack, self._lanes = self.chosen(task)
        self._fits = 1 if self.debug or not task.stackable else self._stack or _most(task)
        if self._lanes > 1:
            self._pool = ThreadPoolExecutor(self._lanes, "fedveil", initializer=torch.set_num_threads, initargs=(1,))

    def lanes(self, task: Task) -> int:
        """How many workers there are for a task."""
        return 1 if self.debug else self.workers or (cores() if task.device.type == "cpu" else 1)

    def chosen(self, task: Task) -> tuple[int | None, int]:
        """The stack and the workers with which an engine makes the same stacks on any machine. Without a stack, they
        depend on the number of workers."""
        small = task.device.type == "cpu" and task.work < LARGE
        if small and self.stack is None and self.workers is None:
            return min(SMALL_STACK, at_once(task)), self.lanes(task)
        return self.stack, self.lanes(task)

    def launching(self) -> AbstractContextManager[object]:
        """How steps are launched, the server's own among them."""
        return using(compile=self.compile)

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown()
            self._pool = None

    def deliver(self, letters: Sequence[Letter], deadline: float | None) -> Iterable[Reply]:
        """Answer every letter, stack by stack. Letters of one question are stacked; a time limit is simulated
        elsewhere."""
        stacks = self._stacks(letters)
        if self._pool:
            under_way: deque[Future[list[Reply]]] = deque()
            for stack in stacks:
                if len(under_way) == AHEAD * self._lanes:
                    yield from under_way.popleft().result()
                with self.launching():
                    context = copy_context()  # of this run, for a thread of the pool
                under_way.append(self._pool.submit(context.run, self._answer, stack))
            while under_way:
                yield from under_way.popleft().result()
            return
        for stack in stacks:
            with self.launching(), one_thread():
                done = self._answer(stack)
            yield from done

    def _stacks(self, letters: Sequence[Letter]) -> list[list[Letter]]:
        """Clients of like size together, so that little of a stack is padding. Where no size is chosen, there are as
        many stacks as workers, or more where one would hold too much."""
        assert self._clients
        sizes, most = self._clients.task.clients.sizes, at_once(self._clients.task)
        groups: dict[tuple[int, bytes | Loose], list[Letter]] = {}
        for letter in letters:
            groups.setdefault((letter.kind, letter.contents), []).append(letter)
        stacks = []
        for group in groups.values():
            group.sort(key=lambda letter: (sizes[letter.client], letter.client))
            size = self._fits if self._stack else min(self._fits, most, math.ceil(len(group) / self._lanes))
            stacks += [group[i : i + size] for i in range(0, len(group), size)]
        return stacks

    def _answer(self, stack: list[Letter], again: bool = False) -> list[Reply]:
        """Answer as one stack; if that fails, as two halves, down to the guilty client, who alone fails."""
        assert self._clients
        try:
            return self._clients.answer(stack, again)
        except Exception as error:
            if self.debug:
                raise self._located(stack[0], error) from error
            if len(stack) > 1:
                if isinstance(error, torch.OutOfMemoryError):
                    self._clients.task.steppers.clear()
                    torch.cuda.empty_cache()
                    self._fits = max(1, min(self._fits, len(stack) // 2))
                half = len(stack) // 2
                return self._answer(stack[:half], True) + self._answer(stack[half:], True)
            return [Reply(stack[0].client, problem=Clients.problem(error))]

    def _located(self, letter: Letter, error: Exception) -> ClientFailure:
        assert self._clients
        task = self._clients.task
        shapes = {**task.sizes, "records": int(task.clients.sizes[letter.client])}
        told = ", ".join(f"{name} {size}" for name, size in shapes.items())
        return ClientFailure(
            f"client {letter.client} failed at {KINDS[letter.kind].__name__} in round {letter.envelope.round} "
            f"({told}): {type(error).__name__}: {error}"
        )
