"""Models by name: the networks of the papers, each a plain `nn.Module` that can be stacked over clients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fedveil.core.seeds import Seed
from fedveil.core.spelling import unknown

from .convnets import VGG13, BaffleLeNet, ConvNet, DigitsCNN, FedAgeCNN, LeNet5, McMahanCNN
from .resnet import WRN10_2
from .text import CharLSTM

__all__ = [
    "MODELS",
    "VGG13",
    "WRN10_2",
    "BaffleLeNet",
    "CharLSTM",
    "ConvNet",
    "DigitsCNN",
    "FedAgeCNN",
    "LeNet5",
    "McMahanCNN",
    "build",
    "drawing_from",
    "initialise",
    "names",
]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "digits-cnn": DigitsCNN,
    "lenet5": LeNet5,
    "mcmahan-cnn": McMahanCNN,
    "convnet": ConvNet,
    "vgg13": VGG13,
    "baffle-lenet": BaffleLeNet,
    "wrn-10-2": WRN10_2,
    "fedage-mnist": McMahanCNN,
    "fedage-cifar": FedAgeCNN,
    "char-lstm": CharLSTM,
}


def names() -> list[str]:
    """The names `build` knows."""
    return list(MODELS)


def build(name: str, input: tuple[int, ...], classes: int, **options: object) -> nn.Module:
    """The model called `name` for examples of shape `input`: (C, H, W) for images, (T,) for text.

    For text `classes` is the size of the vocabulary. `options` are those of the model's class, by name. The
    weights are those of a fixed seed and no global generator advances: `initialise` draws a run's own.
    """
    if name not in MODELS:
        raise unknown("model", name, names())
    if classes < 2:
        raise ValueError(f"model {name!r} needs 2 classes or more, not {classes}")
    _, _, *known = inspect.signature(MODELS[name]).parameters.values()
    defaults = {option.name: option.default for option in known}
    for option, value in options.items():
        if option not in defaults:
            raise unknown(f"option of model {name!r}", option, defaults)
        if type(value) is not type(defaults[option]):
            kind = type(defaults[option]).__name__
            raise ValueError(f"option {option!r} of model {name!r} must be of type {kind}, not {value!r}")
    with drawing_from(Seed.root(0)):
        return MODELS[name](input, classes, **options)


def initialise(model: nn.Module, seed: Seed) -> None:
    """Redraw the weights of `model`, in place, from `seed` alone.

    Every submodule's own `reset_parameters` is called, in the order of `modules()`, while the global
    generator stands at `seed`; afterwards it stands where it stood. Weights of modules without that function
    stay as they are.
    """
    if any(weight.device.type != "cpu" for weight in model.parameters()):
        raise ValueError("initialise a model on the CPU and move it afterwards: other devices draw other numbers")
    with drawing_from(seed):
        for module in model.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()


@contextmanager
def drawing_from(seed: Seed) -> Iterator[None]:
    """Let PyTorch's global generator on the CPU stand at `seed`; afterwards it stands where it stood."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would seed the accelerators' generators too and leave them so.
        torch.set_rng_state(seed.torch().get_state())
        yield
