"""The papers' plain convolutional networks: images [B, C, H, W] to logits [B, classes].

Each is a sequence of named layers, so that it can be walked a layer at a time. None normalises over the
batch, drops units or writes in place: each runs under `torch.func.vmap` with every client's own weights.
"""

from __future__ import annotations

import sys
from collections import OrderedDict

from torch import nn

from .parts import HeConv2d, activation_named, image_shape

_MULTIPLES_OF_4 = range(4, sys.maxsize, 4)


class DigitsCNN(nn.Sequential):
    """A smooth network for 8×8 digits; (1, 8, 8) to 10 classes: 20,010 weights.

    Tanh by default and average pooling, because matching gradients (TOFU, FedSynth, FedLAP) differentiates
    twice, and the kinks of ReLU and max-pooling disturb it most where a network is this small.
    """

    def __init__(self, input: tuple[int, ...], classes: int, activation: str = "tanh") -> None:
        channels, _, _ = image_shape("digits-cnn", input, (8,), "of 8")
        act = activation_named(activation)
        super().__init__(
            OrderedDict(
                conv=nn.Conv2d(channels, 16, 3),
                act1=act(),
                pool=nn.AvgPool2d(2),
                flatten=nn.Flatten(),
                fc1=nn.Linear(16 * 3 * 3, 128),
                act2=act(),
                fc2=nn.Linear(128, classes),
            )
        )


class LeNet5(nn.Sequential):
    """LeNet-5 (LeCun et al. 1998) as it is written today: TOFU's network on MNIST (TOFU, table 2).

    TOFU gives no more than the name. ReLU and max-pooling by default; 28×28 images are padded to 32×32.
    Weights with 10 classes: 61,706 on (1, 28, 28), 62,006 on (3, 32, 32).
    """

    def __init__(self, input: tuple[int, ...], classes: int, activation: str = "relu") -> None:
        channels, height, width = image_shape("lenet5", input, (28, 32), "of 28 or 32")
        act = activation_named(activation)
        super().__init__(
            OrderedDict(
                conv1=nn.Conv2d(channels, 6, 5, padding=((32 - height) // 2, (32 - width) // 2)),
                act1=act(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(6, 16, 5),
                act2=act(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                fc1=nn.Linear(16 * 5 * 5, 120),
                act3=act(),
                fc2=nn.Linear(120, 84),
                act4=act(),
                fc3=nn.Linear(84, classes),
            )
        )


class McMahanCNN(nn.Sequential):
    """The MNIST network of FedAvg (McMahan et al. 2017, section 3), of FedSynth and of FedAGE (table 2).

    'Same' padding; 1,663,370 weights on (1, 28, 28) with 10 classes. Height and width are multiples of 4.
    """

    def __init__(self, input: tuple[int, ...], classes: int) -> None:
        channels, height, width = image_shape("mcmahan-cnn", input, _MULTIPLES_OF_4, "in multiples of 4")
        super().__init__(
            OrderedDict(
                conv1=nn.Conv2d(channels, 32, 5, padding=2),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(32, 64, 5, padding=2),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                fc1=nn.Linear(64 * (height // 4) * (width // 4), 512),
                relu3=nn.ReLU(),
                fc2=nn.Linear(512, classes),
            )
        )


class BaffleLeNet(nn.Sequential):
    """BAFFLE's LeNet (section 4): two 5×5 convolutions, 16 and 64 wide, and global average pooling.

    Weights with 10 classes: 26,730 on one channel, 27,530 on three. Height and width are 2 or more.
    Section 4.1 recommends `activation="hardswish"`.
    """

    def __init__(self, input: tuple[int, ...], classes: int, activation: str = "relu") -> None:
        channels, _, _ = image_shape("baffle-lenet", input, range(2, sys.maxsize), "of 2 or more")
        act = activation_named(activation)
        super().__init__(
            OrderedDict(
                conv1=nn.Conv2d(channels, 16, 5, padding=2),
                act1=act(),
                pool=nn.MaxPool2d(2),
                conv2=nn.Conv2d(16, 64, 5, padding=2),
                act2=act(),
                gap=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
                fc=nn.Linear(64, classes),
            )
        )


class ConvNet(nn.Sequential):
    """FedLAP's network: three blocks of `width` channels, each channel its own group (FedLAP-DP, figure 10).

    The figure has one linear layer on 2048 features, where section 6.1 speaks of two and of global average
    pooling; this is the figure. On 28×28 images the first convolution pads so that it still gives 32×32.
    Weights with 10 classes and the paper's width of 128: 317,706 on (1, 28, 28), 320,010 on (3, 32, 32).
    """

    def __init__(self, input: tuple[int, ...], classes: int, width: int = 128) -> None:
        channels, *sides = image_shape("convnet", input, (28, 32), "of 28 or 32")
        down, across = (1 + (32 - side) // 2 for side in sides)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for block in (1, 2, 3):
            first = block == 1
            layers[f"conv{block}"] = nn.Conv2d(
                channels if first else width, width, 3, padding=(down, across) if first else 1
            )
            layers[f"norm{block}"] = nn.GroupNorm(width, width)
            layers[f"relu{block}"] = nn.ReLU()
            layers[f"pool{block}"] = nn.AvgPool2d(2)
        super().__init__(layers | {"flatten": nn.Flatten(), "fc": nn.Linear(width * 4 * 4, classes)})


class FedAgeCNN(nn.Sequential):
    """FedAGE's CIFAR-10 network (FedAGE, table 2): pairs of 3×3 convolutions, 32, 64 and 128 wide.

    The table gives no padding: here it is 'same', as in the MNIST network beside it. 368,938 weights on
    (3, 32, 32) with 10 classes. Height and width are multiples of 4.
    """

    def __init__(self, input: tuple[int, ...], classes: int) -> None:
        channels, height, width = image_shape("fedage-cifar", input, _MULTIPLES_OF_4, "in multiples of 4")
        features = 128 * (height // 4) * (width // 4)
        super().__init__(
            _pairs(channels, (32, 64, 128), nn.Conv2d) | {"flatten": nn.Flatten(), "fc": nn.Linear(features, classes)}
        )


class VGG13(nn.Sequential):
    """VGG-13 (Simonyan & Zisserman 2014, configuration B) with one linear layer: TOFU's network on CIFAR-10.

    No batch normalisation, under which the gradients of single images would not add up; He's initial weights
    keep the signal alive instead. 9,410,122 weights on (3, 32, 32) with 10 classes.
    """

    def __init__(self, input: tuple[int, ...], classes: int) -> None:
        channels, _, _ = image_shape("vgg13", input, (32,), "of 32")
        super().__init__(
            _pairs(channels, (64, 128, 256, 512, 512), HeConv2d)
            | {"pool5": nn.MaxPool2d(2), "flatten": nn.Flatten(), "fc": nn.Linear(512, classes)}
        )


def _pairs(channels: int, widths: tuple[int, ...], conv: type[nn.Conv2d]) -> OrderedDict[str, nn.Module]:
    """Two 3×3 convolutions with ReLU for each width, and 2×2 max-pooling between one width and the next."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for stage, width in enumerate(widths, start=1):
        if stage > 1:
            layers[f"pool{stage - 1}"] = nn.MaxPool2d(2)
        for half in "ab":
            layers[f"conv{stage}{half}"] = conv(channels, width, 3, padding=1)
            layers[f"relu{stage}{half}"] = nn.ReLU()
            channels = width
    return layers
