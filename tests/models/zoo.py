"""Small models of every kind that fedveil claims to train, each with a task of three ragged clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import peft
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import fedveil as fv
from fedveil.data import from_tensors

SIZES = (2, 4, 3)  # records of each client


class Block(nn.Module):
    """Two convolutions with batch norm beside a shortcut (He et al. 2016)."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.second, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != width:
            self.shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(out + self.shortcut(x))


def resnet18(width: int = 8) -> nn.Module:
    """A ResNet-18 for small pictures: a 3 × 3 stem, and eight blocks of `width` to 8 · `width` channels."""
    widths = [width, width, *(w for times in (2, 4, 8) for w in (times * width,) * 2)]
    befores, strides = [width, *widths[:-1]], (1, 1, 2, 1, 2, 1, 2, 1)
    blocks = [Block(*each) for each in zip(befores, widths, strides, strict=True)]
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 3))


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.gru, self.head = nn.Embedding(9, 6), nn.GRU(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.gru(self.words(tokens))[0][:, -1])


class UNet(nn.Module):
    """Halves a picture twice and doubles it again, with a skip at each size."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.down1, self.down2 = (self._pair(*sizes) for sizes in ((1, 4), (4, 8)))
        self.bottom, self.up2, self.up1 = (self._pair(*sizes) for sizes in ((8, 8), (16, 4), (8, 4)))
        self.wide2, self.wide1 = nn.ConvTranspose2d(8, 8, 2, 2), nn.ConvTranspose2d(4, 4, 2, 2)
        self.head = nn.Conv2d(4, classes, 1)

    @staticmethod
    def _pair(before: int, width: int) -> nn.Module:
        parts = [nn.Conv2d(before, width, 3, padding=1), nn.GroupNorm(2, width), nn.ReLU()]
        return nn.Sequential(*parts, nn.Conv2d(width, width, 3, padding=1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        out = self.wide2(self.bottom(F.max_pool2d(second, 2)))
        out = self.wide1(self.up2(torch.cat([out, second], 1)))
        return self.head(self.up1(torch.cat([out, first], 1)))  # [B, classes, h, w]


def bert() -> nn.Module:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=20, max_position_embeddings=8, num_labels=2, **sizes)
    return transformers.BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2, **ends)
    return transformers.GPT2LMHeadModel(config)


def lora() -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS", lora_dropout=0.1)
    model = peft.get_peft_model(bert(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)  # peft starts at 0, where lora_A has no gradient
    return model.train()


# ---------------------------------------------------------------------------------------------------- data


def tensors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(sum(SIZES), *shape, generator=torch.Generator().manual_seed(seed))


def tokens(length: int, words: int) -> Tensor:
    return torch.randint(0, words, (sum(SIZES), length), generator=torch.Generator().manual_seed(0))


def labels(classes: int) -> Tensor:
    return torch.arange(sum(SIZES)) % classes


def sentences() -> dict[str, Tensor]:
    return {"input_ids": tokens(6, 20), "attention_mask": (torch.arange(6) < 3 + tokens(1, 4)).long()}


def pictures(size: int = 16) -> tuple[Tensor, Tensor]:
    return tensors(3, size, size), labels(3)


def marked() -> tuple[Tensor, Tensor]:
    """Pictures, and which of their pixels are bright, [n, 8, 8]."""
    x = tensors(1, 8, 8)
    return x, (x[:, 0] > 0).long()


def measured() -> tuple[Tensor, Tensor]:
    """Five numbers a record, and a real number to be predicted."""
    x = tensors(5)
    return x, x[:, :2].sum(1)


# ---------------------------------------------------------------------------------------------------- the models


@dataclass(frozen=True)
class Kind:
    """A model, its records, and the options of its task."""

    model: Callable[[], nn.Module]
    records: Callable[[], tuple[Any, Tensor]]
    classes: int | None
    options: Callable[[], dict[str, Any]] = dict


def _mlp(outputs: int, *noise: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), *noise, nn.Linear(8, outputs))


def _shifted() -> tuple[Tensor, Tensor]:
    x = tokens(6, 20)
    return x, x.roll(-1, 1)


KINDS: dict[str, Kind] = {
    "ResNet-18, batch norm federated": Kind(resnet18, pictures, 3),
    "ResNet-18, batch norm local": Kind(resnet18, pictures, 3, lambda: {"batch_norm": "local"}),
    "ResNet-18, batch norm frozen": Kind(resnet18, pictures, 3, lambda: {"batch_norm": "frozen"}),
    "ResNet-18, fv.group_norm": Kind(lambda: fv.group_norm(resnet18(), 4), pictures, 3),
    "MLP with dropout": Kind(lambda: _mlp(3, nn.Dropout(0.3)), lambda: (tensors(5), labels(3)), 3),
    "GRU": Kind(Gru, lambda: (tokens(6, 9), labels(3)), 3),
    "BERT": Kind(bert, lambda: (sentences(), labels(2)), 2),
    "GPT-2": Kind(gpt2, _shifted, 20, lambda: {"loss": "next-character"}),
    "LoRA of BERT (peft)": Kind(lora, lambda: (sentences(), labels(2)), 2),
    "U-Net, segmentation": Kind(UNet, marked, 2),
    "MLP, regression": Kind(lambda: _mlp(1), measured, None, lambda: {"loss": "mse"}),
}


def model_of(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return KINDS[name].model().train()


def task_of(name: str) -> fv.Task:
    kind = KINDS[name]
    x, y = kind.records()
    data = from_tensors(x, y, x, y, classes=kind.classes)
    split = fv.Split(np.arange(len(y)), np.cumsum([0, *SIZES]), "ragged", max_records=max(SIZES))
    return fv.Task(model_of(name), data, split, **kind.options())
