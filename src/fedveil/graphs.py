"""How kernels are launched: a step captured once as a CUDA graph and replayed, or small kernels on one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

ENABLED = True  # set to False to run every step eagerly: what a benchmark compares with
TOLD_EVERY = 50
WARM_UP = 3  # real steps run before the capture, so that libraries have chosen their kernels and buffers


Observer = Callable[[int, int], None]  # called with the steps done and the steps there are


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch's kernels on one thread: faster for small ones, and they round the same whatever the machine has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def repeat(step: Callable[[], None], times: int, device: torch.device, observer: Observer | None = None) -> None:
    """Run `step` `times` times. It must work in place on tensors that outlive it and read nothing else that changes.

    A step that walks through a schedule keeps its position in a tensor (`cursor.add_(1)`), so that a replay moves on.
    The observer is told every `TOLD_EVERY` steps.
    """

    def told(done: int) -> None:
        if observer and done % TOLD_EVERY == 0:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # replays are only queued
            observer(done, times)

    if device.type != "cuda" or times <= 2 * WARM_UP or not ENABLED:
        for done in range(1, times + 1):
            step()
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
        told(done)
