"""How kernels are launched: a step captured once as a CUDA graph and replayed, or small kernels on one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

ENABLED = True  # set to False to run every step eagerly: what a benchmark compares with
WARM_UP = 3  # real steps run before the capture, so that libraries have chosen their kernels and buffers

Observer = Callable[[int, int], None]  # called with the steps done and the steps there are
observer: Observer | None = None  # of every `repeat` in this process; called from the threads that train
OFTEN = 0.5  # seconds between two calls, or less
QUEUED = 16  # replays before the first: it waits for the GPU, and a short schedule should not


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch's kernels on one thread: faster for small ones, and they round the same whatever the machine has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def repeat(step: Callable[[], None], times: int, device: torch.device, part: tuple[int, int] | None = None) -> None:
    """Run `step` `times` times. It must work in place on tensors that outlive it and read nothing else that changes.

    A step that walks through a schedule keeps its position in a tensor (`cursor.add_(1)`), so that a replay moves on.
    `part` says what of a longer schedule this is: the steps before, and all there are.
    """
    told = _teller(observer, *(part or (0, times)), device) if observer else None
    if device.type != "cuda" or times <= 2 * WARM_UP or not ENABLED:
        for done in range(1, times + 1):
            step()
            if told:
                told(done)
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for done in range(WARM_UP + 1, times + 1):
        graph.replay()
        if told:
            told(done)


def _teller(observer: Observer, before: int, total: int, device: torch.device) -> Callable[[int], None]:
    """Pass the steps done on to an observer, of fast steps ever fewer: what is told lies about `OFTEN` apart."""
    queued = device.type == "cuda"
    gap, last = QUEUED if queued else 1, time.monotonic()
    due = gap

    def told(done: int) -> None:
        nonlocal gap, last, due
        if done < due:
            return
        if queued:
            torch.cuda.current_stream(device).synchronize()
        observer(before + done, total)
        now = time.monotonic()
        gap = 2 * gap if now - last < OFTEN else gap
        due, last = done + gap, now

    return told
