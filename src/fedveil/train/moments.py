"""The arithmetic of the server's optimizer, on PyTorch's tensors or NumPy's arrays.

Each operation is one that IEEE 754 defines, on one number at a time, so that both libraries round alike; but for the
root, for which `same_root` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from fedveil.core.directions import root


class Rates(Protocol):
    """The settings of `ServerOptimizer` that a step goes by."""

    @property
    def momentum(self) -> float: ...

    @property
    def beta2(self) -> float: ...

    @property
    def tau(self) -> float: ...


def stepped(
    how: Rates, sqrt: Callable[[Any], Any], lr: float, weights: Any, first: Any, second: Any, delta: Any
) -> tuple[Any, Any, Any]:
    """Weights and moments after a step along the merged update `delta`, [d] each; moments are None where `how` keeps
    none (Reddi et al. 2021, algorithm 2)."""
    if first is None:
        return weights + lr * delta, None, None
    if second is None:
        first = how.momentum * first + delta
        return weights + lr * first, first, None
    first = how.momentum * first + (1 - how.momentum) * delta
    second = how.beta2 * second + (1 - how.beta2) * (delta * delta)
    return weights + lr * first / (sqrt(second) + how.tau), first, second


def same_root(xp: Any) -> Callable[[Any], Any]:
    """√x of float32 numbers, the same bit for bit in both libraries."""
    return lambda x: xp.asarray(root(xp, xp.asarray(x, dtype=xp.float64)), dtype=xp.float32)


def clipped(xp: Any, gradient: Any, clip: float | None) -> Any:
    """The gradient [d] scaled so that no entry is larger than `clip`."""
    if clip is None:
        return gradient
    largest = xp.maximum(xp.max(xp.abs(gradient)), xp.asarray(clip, dtype=xp.float32, device=gradient.device))
    return gradient * (xp.asarray(clip, dtype=xp.float32, device=gradient.device) / largest)
