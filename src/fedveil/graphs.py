"""One step, many times: on a GPU the step is captured as a CUDA graph once and replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch

ENABLED = True  # set to False to run every step eagerly: what a benchmark compares with
WARM_UP = 3  # real steps run before the capture, so that libraries have chosen their kernels and buffers


def repeat(step: Callable[[], None], times: int, device: torch.device) -> None:
    """Run `step` `times` times. It must work in place on tensors that outlive it and read nothing else that changes.

    A step that walks through a schedule keeps its position in a tensor (`cursor.add_(1)`), so that a replay moves on.
    """
    if device.type != "cuda" or times <= 2 * WARM_UP or not ENABLED:
        for _ in range(times):
            step()
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
    for _ in range(times - WARM_UP):
        graph.replay()
