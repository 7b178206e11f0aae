"""Payloads whose tensors stay where they are."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

LENGTH = struct.Struct("<I")  # of the head, in front of it


@dataclass(frozen=True, eq=False)
class Loose:
    """A payload in memory: the head as it would travel, and the tensors where they are, on any device.

    Its length is that of its bytes, which are made once, when somebody asks for them.
    """

    head: bytes
    tensors: tuple[Tensor, ...]

    def __len__(self) -> int:
        return self._length

    @cached_property
    def _length(self) -> int:
        lengths = (LENGTH.size + len(self.head), *(tensor.numel() * tensor.itemsize for tensor in self.tensors))
        return sum(length + -length % 8 for length in lengths)

    @cached_property
    def payload(self) -> bytes:
        """The bytes that travel, copied once."""
        return b"".join(self.parts())

    def parts(self) -> Iterator[Any]:
        """The same in pieces."""
        yield from (LENGTH.pack(len(self.head)), self.head, bytes(-(LENGTH.size + len(self.head)) % 8))
        for tensor in self.tensors:
            raw = tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
            yield from (raw.data, bytes(-len(raw) % 8))
