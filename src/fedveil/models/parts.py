"""What several models share: the activations by name, the check of an image's shape, He's convolution."""

from __future__ import annotations

from collections.abc import Container

from torch import nn

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "hardswish": nn.Hardswish,
    "selu": nn.SELU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}


def activation_named(name: str) -> type[nn.Module]:
    """The activation called `name`."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}: choose one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def image_shape(model: str, input: tuple[int, ...], sides: Container[int], words: str) -> tuple[int, int, int]:
    """`input` as (channels, height, width), where height and width are among `sides`: in words, `words`."""
    if len(input) != 3 or input[0] < 1 or input[1] not in sides or input[2] not in sides:
        raise ValueError(f"{model} takes an input (channels, height, width) with height and width {words}, not {input}")
    return input[0], input[1], input[2]


class HeConv2d(nn.Conv2d):
    """A convolution that starts from He's uniform weights and zero biases.

    PyTorch's default has a sixth of that variance, with which a deep stack of ReLUs without normalisation
    maps every image to nearly the same logits.
    """

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, nonlinearity="relu")
        if self.bias is not None:
            nn.init.zeros_(self.bias)
