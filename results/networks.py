"""Networks of the ablations that fedveil does not have by name."""

from __future__ import annotations

from torch import nn


def normed(input: tuple[int, int, int], classes: int, norm: str = "batch") -> nn.Module:
    """Two convolutions for pictures of 8 × 8, with batch norm, group norm or nothing behind each."""

    def layer(channels: int) -> nn.Module:
        kinds = {"batch": nn.BatchNorm2d, "group": lambda n: nn.GroupNorm(4, n), "nothing": lambda n: nn.Identity()}
        return kinds[norm](channels)

    return nn.Sequential(
        *(nn.Conv2d(input[0], 16, 3, padding=1), layer(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), layer(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, classes)),
    )
