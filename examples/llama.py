"""A Llama-style language model that answers a prompt with one of a few words, in plain PyTorch.

Prompts are rows of tokens [B, T] of different lengths, filled up on the right with token `PADDING`. Attention is
causal, so a prompt's last token does not see what follows it. The outputs are the logits of the label words after that
token [B, labels]; the logits of all other words are not computed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PADDING = 0


@dataclass(frozen=True)
class Config:
    """The shape of a model.

    vocabulary: tokens, `PADDING` included
    labels:     label words
    lora:       rank of the adapters of queries and values; 0: there are none
    prompt:     learned vectors in front of the tokens; 0: there are none
    biases:     whether each norm has a bias
    """

    vocabulary: int
    labels: int = 2
    width: int = 576
    hidden: int = 1536
    layers: int = 30
    heads: int = 9
    shared_heads: int = 3  # of keys and values
    eps: float = 1e-5
    theta: float = 100_000.0
    lora: int = 0
    prompt: int = 0
    biases: bool = False

    @property
    def head_width(self) -> int:
        return self.width // self.heads


class Norm(nn.Module):
    """x / RMS(x) · scale · gain + bias. `gain` is 1 before training; it trains each scale relative to its size."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.eps = config.eps
        self.scale = nn.Parameter(torch.ones(config.width))
        self.gain = nn.Parameter(torch.ones(config.width))
        self.bias = nn.Parameter(torch.zeros(config.width)) if config.biases else None

    def forward(self, x: Tensor) -> Tensor:
        x = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (self.scale * self.gain)
        return x if self.bias is None else x + self.bias


class Adapter(nn.Module):
    """LoRA (Hu et al. 2021): twice a product of two thin matrices, which is 0 before training."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.linear(F.linear(x, self.down), self.up)


class Layer(nn.Module):
    """Attention and a gated network. The products of queries, keys and values are one, as are gate and up."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        shared = config.shared_heads * config.head_width
        self.parts = [config.width, shared, shared]
        self.attention_norm, self.network_norm = Norm(config), Norm(config)
        self.qkv = Linear(config.width, sum(self.parts), bias=False)
        self.out = Linear(config.width, config.width, bias=False)
        self.gate_up = Linear(config.width, 2 * config.hidden, bias=False)
        self.down = Linear(config.hidden, config.width, bias=False)
        self.query_adapter = Adapter(config.width, config.width, config.lora) if config.lora else None
        self.value_adapter = Adapter(config.width, shared, config.lora) if config.lora else None

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        q, k, v = self.projected(x, cosines, sines)
        groups = self.config.heads // self.config.shared_heads
        k, v = (t.to(q.dtype).repeat_interleave(groups, 1) for t in (k, v))
        return self.after(x, attention(q, k, v))

    def projected(self, x: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, width] -> queries [B, heads, T, head_width], keys and values [B, shared_heads, T, head_width]."""
        seen = self.attention_norm(x)
        q, k, v = self.qkv(seen).split(self.parts, -1)
        if self.query_adapter is not None and self.value_adapter is not None:
            q, v = q + self.query_adapter(seen), v + self.value_adapter(seen)
        q, k, v = (t.unflatten(-1, (-1, self.config.head_width)).transpose(1, 2) for t in (q, k, v))
        return rotated(q, cosines, sines), rotated(k, cosines, sines), v

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        """x [B, T, width] and what attention made of it [B, heads, T, head_width] -> [B, T, width]."""
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        gate, up = self.gate_up(self.network_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """The model. Token embeddings and label words are constants or trained, as every parameter is."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.randn(config.vocabulary, config.width))
        self.prompt = nn.Parameter(torch.zeros(config.prompt, config.width)) if config.prompt else None
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = Norm(config)
        self.words = nn.Parameter(torch.randn(config.labels, config.width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T] -> logits [B, labels]."""
        return answer(self.norm(self.state(tokens, len(self.layers))), self.words)

    def state(self, tokens: Tensor, layers: int) -> Tensor:
        """What the first `layers` layers make of each prompt's last token: tokens [B, T] -> [B, width]."""
        x, last, *turns = self.begun(tokens)
        for layer in self.layers[:layers]:
            x = layer(x, *turns)
        return at(last, x)

    def kept(self, tokens: Tensor, layers: int) -> tuple[Tensor, Tensor]:
        """What `LastToken` needs of prompts [B, T]: `state(tokens, layers)` [B, width], and the keys and values of all
        tokens in the other layers [B, T, others, 2, shared_heads · head_width]."""
        x, last, *turns = self.begun(tokens)
        for layer in self.layers[:layers]:
            x = layer(x, *turns)
        state, held = at(last, x), []
        for layer in self.layers[layers:]:
            assert isinstance(layer, Layer)
            _, k, v = layer.projected(x, *turns)
            held.append(torch.stack([t.to(x.dtype).transpose(1, 2).flatten(-2) for t in (k, v)], 2))
            x = layer(x, *turns)
        return state, torch.stack(held, 2)

    def begun(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Embeddings of tokens [B, T], the place of each prompt's last token [B], and rotations by place."""
        tokens = tokens.long()
        last = (tokens != PADDING).sum(1) - 1
        x = F.embedding(tokens, self.embedding).to(widest(self))
        if self.prompt is not None:
            x = torch.cat([self.prompt.expand(len(x), -1, -1), x], 1)
            last = last + self.config.prompt
        return x, last, *rotations(x.shape[1], self.config, x)


class LastToken(nn.Module):
    """The last layers of a model, run on the last token of each prompt only.

    To the tokens before it, the model is as it was before training: their keys and values, and the state in which the
    last token comes to these layers, are computed once. With untrained weights the outputs are the model's.

    memory: keys and values of tokens [N + 1, layers, 2, shared_heads · head_width]; row `PADDING` is no token
    states: of each prompt's last token [n, width]

    A record [1 + T] is the prompt's row of `states`, then the rows of `memory` of the tokens before the last one.
    """

    def __init__(self, model: Llama, memory: Tensor, states: Tensor) -> None:
        super().__init__()
        self.config = model.config
        self.layers, self.norm, self.words = model.layers[-memory.shape[1] :], model.norm, model.words
        self.memory = nn.Parameter(memory, requires_grad=False)
        self.states = nn.Parameter(states, requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Records [B, 1 + T] -> logits [B, labels]."""
        rows = rows.long()
        prompts, before = rows[:, 0], rows[:, 1:]
        x = F.embedding(prompts, self.states)[:, None].to(widest(self))
        held = F.embedding(before, self.memory.flatten(1)).unflatten(-1, (*self.memory.shape[1:3], -1))
        absent = before == PADDING
        place = (~absent).sum(1)
        turns = [t[place][:, None, None] for t in rotations(rows.shape[1], self.config, x)]
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            q, k, v = layer.projected(x, *turns)
            keys, values = held[:, :, i].unflatten(-1, (-1, self.config.head_width)).transpose(1, 3).unbind(2)
            x = layer.after(x, recalled(q, k, v, keys, values, absent))
        return answer(self.norm(x[:, 0]), self.words)


def at(place: Tensor, x: Tensor) -> Tensor:
    """Entries of x [B, T, width] at one place a prompt [B] -> [B, width]."""
    return x.gather(1, place[:, None, None].expand(-1, 1, x.shape[-1]))[:, 0]


def answer(x: Tensor, words: Tensor) -> Tensor:
    """States [B, width] and words [labels, width] -> logits [B, labels]."""
    return (x[:, None] * words).sum(-1)  # not a product of matrices, which autocast computes in few bits


def widest(model: nn.Module) -> torch.dtype:
    """The widest type of a model's weights: float64 where those that are trained are given so."""
    return functools.reduce(torch.promote_types, {p.dtype for p in model.parameters()})


class Linear(nn.Linear):
    """A linear layer whose weights may have fewer bits than its inputs. Autocast chooses the type of both."""

    def forward(self, x: Tensor) -> Tensor:
        same = x.dtype == self.weight.dtype or torch.is_autocast_enabled(x.device.type)
        return F.linear(x, self.weight if same else self.weight.to(x.dtype))


def narrow(model: LastToken) -> LastToken:
    """Hold linear layers, which are then constants, in bfloat16. CPUs need not convert them in each pass."""
    for layer in model.modules():
        if isinstance(layer, Linear):
            layer.weight.data = layer.weight.data.bfloat16()
    return model


def rotations(length: int, config: Config, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary position embedding, [T, head_width] each, of the type of `like`."""
    exponents = torch.arange(0, config.head_width, 2, device=like.device, dtype=torch.float32) / config.head_width
    places = torch.arange(length, device=like.device, dtype=torch.float32)
    angles = torch.outer(places, config.theta**-exponents).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Apply the rotary position embedding to x [B, heads, T, head_width]."""
    low, high = x.chunk(2, -1)
    return x * cosines.to(x.dtype) + torch.cat([-high, low], -1) * sines.to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention: queries, keys and values [B, heads, T, head_width] -> [B, heads, T, head_width]."""
    if q.is_cuda and not torch.is_grad_enabled():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)  # `vmap` stacks products
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v


def recalled(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, absent: Tensor) -> Tensor:
    """Attention of one token to itself and to those before it.

    Queries [B, heads, 1, w], own key and value [B, shared, 1, w], those before [B, shared, T, w], and which of them are
    absent [B, T] -> [B, heads, 1, w].
    """
    q = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [B, shared, groups, w]: heads that share a key
    keys, values, k, v = (t.to(q.dtype) for t in (keys, values, k, v))
    scores = (q @ keys.mT).masked_fill(absent[:, None, None], -torch.inf)
    shares = (torch.cat([scores, (q * k).sum(-1, keepdim=True)], -1) / q.shape[-1] ** 0.5).softmax(-1).to(q.dtype)
    return (shares[..., :-1] @ values + shares[..., -1:] * v).flatten(1, 2)[:, :, None]


def load(model: Llama, tensors: Mapping[str, Tensor]) -> Llama:
    """Fill a model with tensors named as in a GGUF file, and with `embedding` and `words`."""
    config = model.config
    with torch.no_grad():
        model.embedding.copy_(tensors["embedding"])
        model.words.copy_(tensors["words"])
        model.norm.scale.copy_(tensors["output_norm.weight"])
        for i, layer in enumerate(model.layers):
            assert isinstance(layer, Layer)
            own = {name: tensors[f"blk.{i}.{name}.weight"] for name in NAMES}
            layer.attention_norm.scale.copy_(own["attn_norm"])
            layer.network_norm.scale.copy_(own["ffn_norm"])
            q, k = (halves(own[name], config.head_width) for name in ("attn_q", "attn_k"))
            layer.qkv.weight.copy_(torch.cat([q, k, own["attn_v"]]))
            layer.out.weight.copy_(own["attn_output"])
            layer.gate_up.weight.copy_(torch.cat([own["ffn_gate"], own["ffn_up"]]))
            layer.down.weight.copy_(own["ffn_down"])
    return model


NAMES = (
    *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"),
    *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
)


def halves(weight: Tensor, head_width: int) -> Tensor:
    """Rows [heads · head_width, width] in the order that `rotated` takes: GGUF files interleave a head's halves."""
    return weight.unflatten(0, (-1, head_width // 2, 2)).transpose(1, 2).reshape(weight.shape)
