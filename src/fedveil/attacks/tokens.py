"""Tokens out of a transformer's gradient: the span check of DAGER (Petrov et al. 2024).

The gradient of a linear layer with inputs x_1 … x_b is Σ δ_i x_iᵀ, so its rows lie in the span of the inputs. If there
are fewer of them than the layer is wide, the span is not the whole space, and a vector that lies in it was almost
surely an input. In the first attention layer an input depends on one token and its position alone, so every pair can be
tried. In the second layer it depends on other tokens too, which tells the sequences apart: greedily for decoders,
exhaustively for encoders.

The attack stops working where a batch has about as many different pairs of token and position as the layer is wide,
where clients drop units of the embeddings, and where noise or a sparse code moves the gradient out of the span. Several
local steps and 8-bit quantisation blur the span but need not hide what lies in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedveil.core.task import Task

RANK = 1e-7  # of the largest singular value: smaller ones are the rounding of a float32 gradient
FLOOR = 10.0  # times the smallest singular value: where there is coarser rounding, as of an update, it is about even
FLAT = 1e-5  # of the largest singular value: if the smallest is above, the gradient has full rank
NEAR = 1e-3  # the share of an input's norm that may lie outside of the span, in a gradient without noise
GAP = 10.0  # between the shares of inputs that were there and of those that were not, if the gradient is noisy
TRIED = 1 << 14  # sequences that are tried at most
AT_ONCE = 256  # sequences in one pass of the model
TOKENS = 8  # by which it is checked that an input depends on one token

# A function that multiplies: the places of its input and its weights, and whether these are [out, in].
PRODUCTS: dict[Callable[..., Any], tuple[int, int, bool]] = {
    F.linear: (0, 1, True),
    F.multi_head_attention_forward: (0, 5, True),
    torch.addmm: (1, 2, False),
    torch.matmul: (0, 1, False),
    Tensor.matmul: (0, 1, False),
    Tensor.__matmul__: (0, 1, False),
}

Frame = Callable[[Tensor], Tensor]  # tokens [B, T] -> records [B, *input], such as tokens with a mask


@dataclass(frozen=True)
class Product:
    """A product in the model: the name of its weights, whether they are [out, in], and its input."""

    name: str
    rows: bool
    input: Tensor


class _Products(TorchFunctionMode):
    """Notes the products with weights that are parts of `w` [d], until there is one with those named `last`."""

    def __init__(self, task: Task, w: Tensor, last: str | None = None) -> None:
        super().__init__()
        self.names = {w[layer.start :].data_ptr(): layer.name for layer in task.layout.layers}
        self.last = last
        self.found: list[Product] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in PRODUCTS:
            given, weights, rows = PRODUCTS[func]
            parameter = args[weights] if len(args) > weights else None
            if isinstance(parameter, Tensor) and (name := self.names.get(parameter.data_ptr())):
                rows = rows == parameter.is_contiguous()  # or it is the transpose of the weights
                self.found.append(Product(name, rows, args[given].detach()))
                if name == self.last:
                    raise _Enough
        return func(*args, **(kwargs or {}))


class _Enough(Exception):
    """What was looked for has been noted."""


@torch.no_grad()
def products(task: Task, w: Tensor, x: Tensor, last: str | None = None) -> list[Product]:
    """Return the products with weights in `w` [d] when the model reads `x` [B, *input], up to that with `last`."""
    noted = _Products(task, w, last)
    with noted, suppress(_Enough):
        task.f(w, x)
    return noted.found


@dataclass(frozen=True)
class Projection:
    """Weights that are multiplied with one input: names, such as those of queries, keys and values."""

    names: tuple[str, ...]
    rows: bool  # whether they are [out, in]

    def inputs(self, task: Task, w: Tensor, tokens: Tensor, frame: Frame) -> Tensor:
        """Return what the projection is given when the model reads `tokens` [B, T], [B, T, width] in double."""
        b, length = tokens.shape
        if b == length:  # the sizes say which dimension is which
            return self.inputs(task, w, torch.cat([tokens, tokens[:1]]), frame)[:b]
        found = products(task, w, frame(tokens), self.names[0])[-1].input
        if found.shape[:-1].numel() != b * length:
            raise ValueError(
                f"{self.names[0]} is given {list(found.shape)} for {b} sequences of {length} tokens, not one input a "
                "token; name other projections with layers"
            )
        if found.dim() == 3 and found.shape[:2] == (length, b):
            found = found.transpose(0, 1)
        return found.reshape(b, length, -1).double()

    def span(self, task: Task, gradient: Tensor) -> tuple[Tensor, bool]:
        """Return an orthonormal basis of what the projection was given, from a gradient [d] in double, [r, width]; and
        whether the gradient has full rank, which leaves no room for anything outside."""
        parts = task.layout.split(gradient.double())
        rows = torch.cat([parts[name] if self.rows else parts[name].T for name in self.names])
        _, sizes, basis = torch.linalg.svd(rows, full_matrices=False)
        least = sizes[-1] if len(sizes) == rows.shape[1] else sizes.new_zeros(())
        kept = sizes > torch.maximum(RANK * sizes[0], FLOOR * least)
        return basis[kept], bool(least > FLAT * sizes[0])


def projections(task: Task, w: Tensor, x: Tensor) -> tuple[Projection, Projection | None]:
    """Find the projections of the first two layers of attention: the weights that embeddings `x` [B, *input] are first
    multiplied with, and the next ones of the same name but for numbers."""
    found = products(task, w, x)
    if not found:
        raise ValueError("the model multiplies no trained weights with its inputs; train those of the first layer")

    def alike(first: Product) -> Projection:
        same = [each for each in found if each.rows == first.rows and torch.equal(each.input, first.input)]
        return Projection(tuple(each.name for each in same), first.rows)

    def unnumbered(name: str) -> str:
        return re.sub(r"\d+", "#", name)

    same = [each for each in found[1:] if unnumbered(each.name) == unnumbered(found[0].name)]
    return alike(found[0]), alike(same[0]) if same else None


# ---------------------------------------------------------------------------------------------------- the attack


@dataclass(frozen=True)
class Found:
    """What a gradient says about tokens.

    rank, width: the dimension of the first projection's span, and the most that it could be
    outside:     the share of each pair's input that lies outside of the span, [V, T]
    tokens:      the tokens at each position whose pairs lie in the span: all that were there. Where tokens repeat
                 there may be others, as in e(a) + p(2) = (e(a) + p(1)) + (e(b) + p(2)) - (e(b) + p(1))
    sequences:   the sequences of the batch, each once; None where tokens could not be put together
    full:        whether the span tells nothing, as every pair lies in it, or none does and the gradient has full rank
    """

    rank: int
    width: int
    outside: Tensor
    tokens: list[list[int]]
    sequences: list[tuple[int, ...]] | None
    full: bool


def recover(
    task: Task,
    w: Tensor,
    gradient: Tensor,
    vocabulary: int,
    *,
    length: int | None = None,
    frame: Frame = lambda tokens: tokens,
    layers: tuple[Projection, Projection | None] | None = None,
    near: float | None = None,
) -> Found:
    """Find the tokens, and if possible the sequences, of the batch whose gradient [d] at `w` [d] this is.

    vocabulary: V, how many tokens there are
    length:     T, of a sequence; by default that of the task's records
    frame:      turns tokens [B, T] into records, where a record is more than tokens
    layers:     the projections that are looked at; by default those of `projections`
    near:       a pair was there if less than this share of its input's norm lies outside of the span; by default the
                attack looks for a gap in the shares
    """
    length = task.data.input[0] if length is None else length
    every = torch.arange(vocabulary, device=task.device)[:, None].expand(-1, length)
    first, second = layers or projections(task, w, frame(every[: length + 1]))
    _require_own(task, w, first, every, frame)
    basis, flat = first.span(task, gradient)
    outside = torch.cat([_outside(first.inputs(task, w, part, frame), basis) for part in every.split(AT_ONCE)])
    near = _threshold(outside) if near is None else near
    inside = outside < near
    tokens = [column.nonzero()[:, 0].tolist() for column in inside.T]
    full = bool(inside.all()) or (flat and not inside.any())
    sequences = None
    if not full and all(len(each) == 1 for each in tokens):
        sequences = [tuple(each[0] for each in tokens)]
    elif not full and all(tokens) and second:
        near = max(NEAR, 3 * float(outside[inside].max()))  # what belongs together lies about as near
        sequences = _assemble(task, w, second, second.span(task, gradient)[0], tokens, frame, near)
    return Found(len(basis), basis.shape[1], outside, tokens, sequences, full)


def touched(task: Task, gradient: Tensor, name: str) -> list[int]:
    """Return the tokens of a batch, from a gradient [d], if the embedding of that name is trained and not tied: only
    their rows have a gradient."""
    return task.layout.split(gradient)[name].flatten(1).any(1).nonzero()[:, 0].tolist()


def _threshold(outside: Tensor) -> float:
    """The middle of the highest gap of a factor of `GAP` among shares outside of the span; `NEAR` if there is none.

    Several steps and rough codes blur the span: what was there lies a percent or two outside. The rest lies much
    further away as long as the span is far from the whole space.
    """
    shares = outside.flatten().clamp(min=1e-12).log().sort().values
    gaps = ((shares[1:] - shares[:-1] > math.log(GAP)) & (shares[1:] > math.log(NEAR))).nonzero()[:, 0]
    return math.exp(float(shares[gaps[-1]] + shares[gaps[-1] + 1]) / 2) if len(gaps) else NEAR


def _require_own(task: Task, w: Tensor, layer: Projection, every: Tensor, frame: Frame) -> None:
    """Raise a ValueError unless a layer's input depends on its own token and position alone; `every` [V, T] holds each
    token at all positions."""
    few, length = every[:TOKENS], every.shape[1]
    own = torch.arange(length, device=task.device) % len(few)
    (mixed,) = layer.inputs(task, w, few[own, 0][None], frame)
    alone = layer.inputs(task, w, few, frame)[own, torch.arange(length, device=task.device)]
    if not torch.allclose(mixed, alone, rtol=1e-4, atol=1e-5):
        raise ValueError(
            f"the input of {layer.names[0]} depends on more than its own token and position; name the projections of "
            "the first layer of attention with layers"
        )


def _outside(x: Tensor, basis: Tensor) -> Tensor:
    """The share of the norm of inputs x […, width] outside of the span of `basis` [r, width]."""
    rest: Tensor = torch.linalg.vector_norm(x - x @ basis.T @ basis, dim=-1)
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return rest / norms.clamp(min=1e-12)


def _assemble(
    task: Task, w: Tensor, layer: Projection, basis: Tensor, tokens: list[list[int]], frame: Frame, near: float
) -> list[tuple[int, ...]] | None:
    """Sequences of these tokens whose inputs of a later layer lie in its span; None if there are none, or too many.

    A decoder's inputs depend on the tokens before alone, so its sequences grow token by token. An encoder's depend on
    all, so all sequences are tried.
    """
    length = len(tokens)
    if len(basis) == basis.shape[1]:
        return None

    def fits(prefixes: list[tuple[int, ...]], looked_at: slice) -> Iterator[tuple[int, ...]]:
        rows = torch.zeros(len(prefixes), length, dtype=torch.int64, device=task.device)
        rows[:, : len(prefixes[0])] = torch.tensor(prefixes, device=task.device)
        for part, own in zip(rows.split(AT_ONCE), range(0, len(rows), AT_ONCE), strict=True):
            away = _outside(layer.inputs(task, w, part, frame)[:, looked_at], basis).amax(1)
            yield from (prefixes[own + i] for i in (away < near).nonzero()[:, 0].tolist())

    if not _causal(task, w, layer, tokens, frame):
        if math.prod(map(len, tokens)) > TRIED:
            return None
        return list(fits(list(product(*tokens)), slice(None))) or None
    known: list[tuple[int, ...]] = [()]
    for t, here in enumerate(tokens):
        if len(known) * len(here) > TRIED or not known:
            return None
        known = list(fits([(*prefix, token) for prefix in known for token in here], slice(t, t + 1)))
    return known or None


def _causal(task: Task, w: Tensor, layer: Projection, tokens: list[list[int]], frame: Frame) -> bool:
    """Whether a layer's inputs depend on no later token: by two sequences that differ in the last one."""
    length = len(tokens)
    pair = torch.tensor([each[0] for each in tokens], device=task.device).repeat(2, 1)
    pair[1, -1] = 1 - pair[1, -1].clamp(max=1)
    one, other = layer.inputs(task, w, pair, frame)[:, : length - 1]
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------- the scorer


def scored(found: Found, truth: Tensor) -> dict[str, float]:
    """Compare what was found with the batch's tokens [B, T].

    recall:    the share of pairs of token and position that were found
    precision: the share of found pairs that were there
    sequences: the share of sequences that were found exactly; one that was not there makes it 0
    """
    there = {(int(token), t) for row in truth for t, token in enumerate(row)}
    seen = {(token, t) for t, each in enumerate(found.tokens) for token in each}
    whole, put = {tuple(row) for row in truth.tolist()}, set(found.sequences or [])
    return {
        "recall": len(there & seen) / len(there),
        "precision": len(there & seen) / max(1, len(seen)),
        "sequences": len(whole & put) / len(whole) if put <= whole else 0.0,
    }
