"""BAFFLE's wide residual network: images [B, C, H, W] to logits [B, classes]."""

from __future__ import annotations

import sys
from collections import OrderedDict

from torch import Tensor, nn

from .parts import HeConv2d, activation_named, image_shape


class WRN10_2(nn.Sequential):
    """WRN-10-2 (Zagoruyko & Komodakis 2016) as BAFFLE trains it (BAFFLE, sections 4 and 4.1).

    Three pre-activated blocks, 32, 64 and 128 wide, the last two at stride 2. GroupNorm without weights of
    its own stands for BatchNorm; of the convolutions, which start from He's weights, only the first has a
    bias. Weights with 10 classes: 302,506 on one channel (MNIST), 302,794 on three (CIFAR-10). Height and
    width are 4 or more. Section 4.1 recommends `activation="hardswish"`.
    """

    def __init__(self, input: tuple[int, ...], classes: int, activation: str = "relu") -> None:
        channels, _, _ = image_shape("wrn-10-2", input, range(4, sys.maxsize), "of 4 or more")
        act = activation_named(activation)
        super().__init__(
            OrderedDict(
                conv=HeConv2d(channels, 16, 3, padding=1),
                block1=WideBlock(16, 32, stride=1, act=act),
                block2=WideBlock(32, 64, stride=2, act=act),
                block3=WideBlock(64, 128, stride=2, act=act),
                norm=_norm(128),
                act=act(),
                gap=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
                fc=nn.Linear(128, classes),
            )
        )


class WideBlock(nn.Module):
    """h = act(norm(x)); conv2(act(norm(conv1(h)))) + shortcut(h).

    [B, before, H, W] to [B, after, ⌈H/stride⌉, ⌈W/stride⌉].
    """

    def __init__(self, before: int, after: int, stride: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.act1 = _norm(before), act()
        self.conv1 = HeConv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm2, self.act2 = _norm(after), act()
        self.conv2 = HeConv2d(after, after, 3, padding=1, bias=False)
        self.shortcut = HeConv2d(before, after, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.norm1(x))
        y: Tensor = self.conv2(self.act2(self.norm2(self.conv1(x)))) + self.shortcut(x)
        return y


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(max(2, channels // 16), channels, affine=False)
