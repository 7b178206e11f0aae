"""Differentiable Siamese augmentation (Zhao & Bilen 2021): real and synthetic images of a step change in the same way.

A step has one of the chosen strategies, drawn for each client; all its images, real and synthetic, get the same draw:

flip      mirrored, every second time
crop      shifted by up to an eighth of the height and width
scale     height and width each between 1/1.2 and 1.2 times as large
rotate    by up to 15 degrees either way
cutout    a square of half the height and width is 0
color     brightness, saturation and contrast

What moves pixels is one product with a matrix of bilinear weights, so it is linear in the images and rounds the same
way every time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedveil.core.seeds import Seed
from fedveil.core.task import Task

MOVING = ("flip", "crop", "scale", "rotate")
STRATEGIES = (*MOVING, "cutout", "color")
SHIFT, STRETCH, DEGREES, SQUARE = 1 / 8, 1.2, 15.0, 1 / 2
MIRRORED = ("digits", "mnist")  # whose images mean something else, or nothing, in a mirror
Change = Callable[[Tensor], Tensor]  # images [C, B, channels, height, width] -> the same shape


def strategies(names: str) -> list[str]:
    """The strategies of a setting, which are names with spaces between them."""
    chosen = names.split()
    for name in chosen:
        if name not in STRATEGIES:
            raise ValueError(f"method.augment names '{name}'; use some of {', '.join(STRATEGIES)}, with spaces between")
    return chosen


def validate(names: str, task: Task) -> None:
    """Say which strategies do not suit the data."""
    if names.split() and len(task.data.input) != 3:
        raise ValueError(
            f"method.augment changes images, and a record of shape {task.data.input} is none; leave it out"
        )
    if "flip" in names.split() and task.data.name in MIRRORED:
        raise ValueError("method.augment has 'flip', and a digit in the mirror is no digit; leave it out")


def same(x: Tensor) -> Tensor:
    """No change."""
    return x


class Siamese:
    """Changes images [C, B, channels, height, width] by the draw at the cursor; `advance` goes on to the next one."""

    def __init__(self, names: str, task: Task, seeds: Sequence[Seed], steps: int) -> None:
        self.chosen = strategies(names)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=task.device)
        if self.chosen:
            size = task.data.input[1:]
            drawn = [[_draw(rng, self.chosen, size) for _ in range(steps)] for rng in (s.numpy() for s in seeds)]
            self.draws = torch.tensor(drawn, dtype=torch.float32).transpose(0, 1).to(task.device)  # [S, C, 11]

    def advance(self) -> None:
        self.cursor.add_(1)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.chosen:
            return x
        draw = self.draws.index_select(0, self.cursor)[0]  # [C, 11]
        if "color" in self.chosen:
            x = _coloured(x, draw[:, 8:])
        if any(name in self.chosen for name in MOVING):
            x = _moved(x, draw[:, :6])
        return _cut(x, draw[:, 6:8]) if "cutout" in self.chosen else x


def _draw(rng: np.random.Generator, chosen: Sequence[str], size: tuple[int, ...]) -> list[float]:
    """One step's numbers: a matrix (4) and a shift (2) from a pixel to where it comes from, the square's first row and
    column (beyond the image: none), what is added to brightness, factors on saturation and contrast."""
    matrix, shift, corner, colour = [1.0, 0.0, 0.0, 1.0], [0.0, 0.0], [float(side) for side in size], [0.0, 1.0, 1.0]
    match str(rng.choice(list(chosen))):
        case "flip":
            matrix[3] = float(rng.choice([1, -1]))
        case "crop":
            shift = [float(rng.integers(-n, n + 1)) for n in (round(side * SHIFT) for side in size)]
        case "scale":
            matrix[0], matrix[3] = rng.uniform(1 / STRETCH, STRETCH, 2).tolist()
        case "rotate":
            angle = math.radians(rng.uniform(-DEGREES, DEGREES))
            matrix = [math.cos(angle), -math.sin(angle), math.sin(angle), math.cos(angle)]
        case "cutout":
            corner = [float(rng.integers(0, side)) - side * SQUARE / 2 for side in size]
        case "color":
            colour = (rng.uniform(0, 1, 3) * [1, 2, 1] + [-0.5, 0, 0.5]).tolist()
    return [*matrix, *shift, *corner, *colour]


def _coloured(x: Tensor, numbers: Tensor) -> Tensor:
    brightness, saturation, contrast = numbers[..., None, None, None, None].unbind(1)
    x = x + brightness
    grey = x.mean(2, keepdim=True)
    x = grey + saturation * (x - grey)
    mean = x.mean((2, 3, 4), keepdim=True)
    return mean + contrast * (x - mean)


def _moved(x: Tensor, numbers: Tensor) -> Tensor:
    """Every pixel from elsewhere, between the four pixels there; from outside the image comes 0."""
    rows, columns = (torch.arange(side, device=x.device, dtype=x.dtype) for side in x.shape[-2:])
    y, z = rows - (len(rows) - 1) / 2, columns - (len(columns) - 1) / 2
    a, b, c, d, down, right = numbers[..., None, None].unbind(1)
    from_y, from_z = a * y[:, None] + b * z + down, c * y[:, None] + d * z + right  # [C, height, width]
    near_y = (1 - (from_y.flatten(1)[:, None] - y[:, None]).abs()).clamp(min=0)  # [C, height, pixels]
    near_z = (1 - (from_z.flatten(1)[:, None] - z[:, None]).abs()).clamp(min=0)  # [C, width, pixels]
    matrix = (near_y[:, :, None] * near_z[:, None]).flatten(1, 2)  # [C, pixels, pixels]
    return (x.flatten(3).flatten(1, 2) @ matrix).view(x.shape)


def _cut(x: Tensor, corner: Tensor) -> Tensor:
    outside = []
    for first, side in zip(corner.unbind(1), x.shape[-2:], strict=True):
        place = torch.arange(side, device=x.device, dtype=x.dtype)
        outside.append((place < first[:, None]) | (place >= first[:, None] + side * SQUARE))
    return x * (outside[0][:, :, None] | outside[1][:, None]).to(x.dtype)[:, None, None]
