"""FedAGE's character model, with an LSTM that can be stacked over clients."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


class CharLSTM(nn.Module):
    """The next character at every position: [B, T] integers to logits [B, T, vocabulary] (FedAGE, section 4).

    An 8-dimensional embedding, two LSTM layers of 256 units and a linear layer: 798,720 weights and 265 for
    each character, 819,920 with a vocabulary of 80. `input` is (T,), but text of any length can be read.
    """

    def __init__(
        self, input: tuple[int, ...], vocabulary: int, embedding: int = 8, hidden: int = 256, layers: int = 2
    ) -> None:
        super().__init__()
        if len(input) != 1 or input[0] < 1:
            raise ValueError(f"char-lstm takes text of shape (length,) with a length of 1 or more, not {input}")
        if min(embedding, hidden, layers) < 1:
            raise ValueError("char-lstm takes an embedding, hidden and layers of 1 or more")
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = LSTM(embedding, hidden, layers)
        self.fc = nn.Linear(hidden, vocabulary)

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.lstm(self.embedding(text)))
        return logits


class LSTM(nn.Module):
    """`nn.LSTM(batch_first=True)` from a zero state: [B, T, inputs] to the last layer's [B, T, hidden].

    The weights have nn.LSTM's names, shapes and initial values. The recurrence is written out because nn.LSTM
    fails under `torch.func.vmap` where no gradient is taken, which is how forward-only methods call it.
    """

    def __init__(self, inputs: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.hidden, self.layers = hidden, layers
        for layer in range(layers):
            width = inputs if layer == 0 else hidden
            for name, shape in zip(_WEIGHTS, ((width,), (hidden,), (), ()), strict=True):
                self.register_parameter(f"{name}_l{layer}", nn.Parameter(torch.empty(4 * hidden, *shape)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.hidden)
        for weight in self.parameters():
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(self.layers):
            x = self._layer(x, *(getattr(self, f"{name}_l{layer}") for name in _WEIGHTS))
        return x

    def _layer(self, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> Tensor:
        """One layer over time; the stacked gates are nn.LSTM's: input, forget, cell, output."""
        from_input = F.linear(x, w_ih, b_ih + b_hh)
        h = c = x.new_zeros(x.shape[0], self.hidden)
        outputs = []
        for gates in from_input.unbind(1):
            i, f, g, o = (gates + F.linear(h, w_hh)).chunk(4, dim=-1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs, dim=1)
