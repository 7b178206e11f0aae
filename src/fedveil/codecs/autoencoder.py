"""Pairs (E, D) for averaging in an encoded domain: D(mean of E(l_i)) ≈ mean of l_i (FedAGE, section 3.2).

A pair works on blocks of b whole numbers from 0 to s, whatever they stand for, so it is trained once, on random ones,
and kept as a file. The **linear** pair, a projection onto h directions, needs no training. For independent uniform
inputs it is the best linear code there is: what a learned pair is measured against.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor, nn

from fedveil import models
from fedveil.core import message, schema
from fedveil.core.message import Envelope, Record, Refused, Shape
from fedveil.core.seeds import Seed
from fedveil.data.files import data_directory

DEPTH = 3  # residual blocks on either side
WIDER = 4  # a residual block's hidden layer, in widths
TESTED = 10_000  # groups on which σ_ν is measured (appendix F.2)
WATCHED = 2000  # groups on which it is watched after each epoch
ROWS = {"cpu": 1 << 12, "cuda": 1 << 16}  # blocks that go through a network at once


@dataclass(frozen=True)
class Code:
    """Which pair: all that decides it."""

    block: int = 64  # b
    code: int = 32  # h
    levels: int = 64  # s
    cohort: int = 10  # m: codes that are averaged in training
    width: int = 512  # of the networks; 0 is the linear pair
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.code <= self.block <= 4096 or not 1 <= self.levels <= 1 << 15:
            raise ValueError("a pair needs 1 <= code <= block <= 4096 and from 1 to 32768 levels")
        if self.cohort < 1 or not 0 <= self.width <= 4096:
            raise ValueError("a pair needs a cohort of at least 1 and a width up to 4096, or 0 for the linear code")

    @property
    def floor(self) -> float:
        """σ_ν of the linear code for independent uniform inputs: √((1 - h/b) s(s + 2) / 12m)."""
        return math.sqrt((1 - self.code / self.block) * self.levels * (self.levels + 2) / (12 * self.cohort))

    @property
    def file(self) -> str:
        return f"b{self.block}-h{self.code}-s{self.levels}-m{self.cohort}-w{self.width}-seed{self.seed}.fv"

    @property
    def command(self) -> str:
        """What trains it."""
        size = f"--block {self.block} --code {self.code} --levels {self.levels} --cohort {self.cohort}"
        return f"fedveil fedage pretrain {size} --width {self.width} --seed {self.seed}"


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(width, WIDER * width), nn.Linear(WIDER * width, width)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.back(self.wide(x).relu())
        return x + inner


def _network(inputs: int, width: int, outputs: int) -> nn.Module:
    """One side of a pair (figure 6)."""
    if not width:
        return nn.Linear(inputs, outputs)
    first = nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width)
    return nn.Sequential(*first, *(_Residual(width) for _ in range(DEPTH)), nn.Linear(width, outputs))


class Pair(nn.Module):
    """E: [N, b] -> [N, h] and D: [N, h] -> [N, b].

    spread: σ_ν, the standard deviation of D(mean of E(l_i)) - mean of l_i as it was measured
    reach:  no entry of a code is beyond it, so that codes fit fixed-point numbers and a wild one can be refused
    """

    def __init__(self, code: Code, spread: float = math.inf, reach: float = math.inf) -> None:
        super().__init__()
        self.code, self.spread, self.reach = code, spread, reach
        self.e, self.d = _network(code.block, code.width, code.code), _network(code.code, code.width, code.block)

    def E(self, l: Tensor) -> Tensor:  # noqa: E741 - the paper's letter
        """Whole numbers from 0 to s, as floats -> codes."""
        codes: Tensor = self.e(l / self.code.levels)
        return codes

    def D(self, codes: Tensor) -> Tensor:
        """Codes or means of codes -> means of whole numbers."""
        out: Tensor = self.d(codes) * self.code.levels
        return out

    @torch.no_grad()
    def encode(self, l: Tensor) -> Tensor:  # noqa: E741
        """E without gradients and within `reach`, a slice after another."""
        with _half(l):
            codes = torch.cat([self.E(rows) for rows in l.split(_rows(l))])
        return codes.float().clamp_(-self.reach, self.reach)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """D without gradients, a slice after another."""
        with _half(codes):
            return torch.cat([self.D(rows).float() for rows in codes.split(_rows(codes))])

    @property
    def vector(self) -> Tensor:
        """All parameters, on the CPU."""
        return nn.utils.parameters_to_vector(self.parameters()).detach().cpu()

    def errors(self, groups: Tensor) -> Tensor:
        """ν of groups [N, m, b] (eq. 8), [N, b]."""
        codes = self.encode(groups.flatten(0, 1)).unflatten(0, groups.shape[:2])
        return self.decode(codes.mean(1)) - groups.mean(1)


def _half(x: Tensor) -> torch.autocast:
    """On a GPU layers work in half precision: it rounds a hundred times finer than a code is wrong anyway."""
    return torch.autocast("cuda", torch.float16, enabled=x.is_cuda)


def _rows(x: Tensor) -> int:
    return ROWS.get(x.device.type, ROWS["cpu"])


def groups(code: Code, count: int, seed: Seed, device: str | torch.device = "cpu", cohort: int | None = None) -> Tensor:
    """Uniform random blocks for `count` means of `cohort` (by default m) codes, [count, m, b]."""
    return _drawn((count, cohort or code.cohort, code.block), code.levels, _generator(seed, device))


def _generator(seed: Seed, device: str | torch.device) -> torch.Generator:
    """One that draws on the device: pairs trained on different ones differ by rounding anyway."""
    return torch.Generator(device).manual_seed(seed.torch().initial_seed())


def _drawn(shape: tuple[int, ...], highest: float | Tensor, draw: torch.Generator) -> Tensor:
    """Whole numbers from 0 to `highest`."""
    return (torch.rand(shape, generator=draw, device=draw.device) * (highest + 1)).floor_()


# ---------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Pretraining:
    """How a pair is trained (appendix F.2). An epoch is `groups` fresh groups of m blocks.

    small:    share of the groups whose numbers reach from 0 to r only, r from 1 to s on a logarithmic scale. In the
              paper none do; but most weights of an update change far less than the one that changes most, and a network
              that has seen only numbers up to s averages those badly
    patience: so many epochs without a lower error on test groups end the training; the best epoch is kept

    The paper has a constant lr of 1e-4; a higher one that falls along a cosine gets there in fewer epochs.
    """

    epochs: int = 50
    groups: int = 50_000
    batch: int = 500
    lr: float = 5e-4
    small: float = 0.5
    patience: int = 10

    def __post_init__(self) -> None:
        if self.epochs < 1 or not 1 <= self.batch <= self.groups or self.lr <= 0:
            raise ValueError("pretraining needs epochs >= 1, 1 <= batch <= groups and lr > 0")
        if not 0 <= self.small <= 1 or self.patience < 1:
            raise ValueError("pretraining needs a share of small groups from 0 to 1 and patience >= 1")


Batch = tuple[Tensor, Tensor]  # groups [N, m, b] and how far each reaches [N, 1]


def pretrain(
    code: Code,
    how: Pretraining | None = None,
    device: str | torch.device = "cpu",
    told: Callable[[int, int, float], object] | None = None,
) -> Pair:
    """Train E and D together on ‖D(mean of E(l_i)) - mean of l_i‖² (eqs. 8 and 9).

    `told` hears after each step how many are done, how many there are at most, and σ_ν after the last epoch.
    """
    if not code.width:
        raise ValueError("the linear code is drawn from its seed and needs no training; give a width above 0")
    how, seed = how or Pretraining(), Seed.root(code.seed).child("pair")
    pair = Pair(code)
    models.initialise(pair, seed)
    pair.to(device)
    if torch.device(device).type == "cuda":
        torch.set_float32_matmul_precision("high")  # as the engine does
    optimizer = torch.optim.Adam(pair.parameters(), how.lr)
    steps = how.groups // how.batch
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, how.epochs * steps)
    draw = _generator(seed.child("training"), device)
    watched = groups(code, WATCHED, seed.child("watched"), device)
    tested = _batch(code, WATCHED, how.small, _generator(seed.child("test"), device))
    least, best, since, spread = math.inf, pair.vector, 0, math.inf
    for epoch in range(how.epochs):
        for step in range(steps):
            optimizer.zero_grad()
            _loss(pair, _batch(code, how.batch, how.small, draw)).backward()
            optimizer.step()
            schedule.step()
            if told:
                told(epoch * steps + step + 1, how.epochs * steps, spread)
        with torch.no_grad():
            error = float(_loss(pair, tested))
        since += 1
        if error < least:
            least, best, since = error, pair.vector, 0
        spread = float(pair.errors(watched).std())
        if since == how.patience:
            break
    if least == math.inf:
        raise ValueError(f"the pair's training diverged; try an lr below {how.lr:g}")
    kept = _filled(Pair(code), best).to(device)
    parts = [groups(code, WATCHED, seed.child("measured", i), device) for i in range(TESTED // WATCHED)]
    kept.spread = float(torch.cat([kept.errors(part) for part in parts]).std())
    corners = torch.tensor([[0.0], [code.levels]], device=device).expand(2, code.block)
    furthest = float(kept.encode(torch.cat([watched.flatten(0, 1), corners])).abs().max())
    kept.reach = 2 * furthest  # other inputs may lead a little further
    return kept.cpu()


def _batch(code: Code, count: int, small: float, draw: torch.Generator) -> Batch:
    exponent, chosen = torch.rand(2, count, 1, generator=draw, device=draw.device)
    highest = torch.pow(code.levels, torch.where(chosen < small, exponent, 1.0)).round_()
    return _drawn((count, code.cohort, code.block), highest[..., None], draw), highest


def _loss(pair: Pair, batch: Batch) -> Tensor:
    """The squared error of the means, between that in units of s and that in units of what a group reaches."""
    blocks, highest = batch
    codes = pair.E(blocks.flatten(0, 1)).unflatten(0, blocks.shape[:2])
    error = pair.D(codes.mean(1)) - blocks.mean(1)
    return (error.square() / (highest * pair.code.levels)).mean()


def _filled(pair: Pair, vector: Tensor) -> Pair:
    nn.utils.vector_to_parameters(vector.clone(), pair.parameters())
    return pair.requires_grad_(False)


def linear(code: Code) -> Pair:
    """E(l) = P(l/s - 1/2) and D(c) = s(1/2 + Pᵀc), P [h, b] with orthonormal rows drawn from the seed."""
    draw = Seed.root(code.seed).child("pair").torch()
    basis = torch.linalg.qr(torch.randn(code.block, code.code, generator=draw, dtype=torch.float64)).Q.float()
    half = torch.full((code.block,), 0.5)
    pair = Pair(code, code.floor, math.sqrt(code.block) / 2)
    return _filled(pair, torch.cat([basis.T.flatten(), -(half @ basis), basis.flatten(), half]))


# ---------------------------------------------------------------------------------------------------- files


@message.kind
class TrainedPair(Record, frozen=True):
    """A pair on disk."""

    block: int
    code: int
    levels: int
    cohort: int
    width: int
    seed: int
    spread: float
    reach: float
    parameters: Annotated[Tensor, Shape(("parameters",))]


def home() -> Path:
    """The folder of trained pairs, beside the data sets."""
    return data_directory(None) / "fedage"


def save(pair: Pair, path: Path) -> None:
    """Write a pair to a file, whole or not at all."""
    record = TrainedPair(**vars(pair.code), spread=pair.spread, reach=pair.reach, parameters=pair.vector)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    part.write_bytes(message.frame(record, Envelope()))
    os.replace(part, path)


def read(path: Path, code: Code) -> Pair:
    """The pair in a file, which may be of any origin; a ValueError if it is not this one, whole and sound."""
    pair = Pair(code)
    sizes: dict[str, message.Size] = {"parameters": sum(p.numel() for p in pair.parameters())}
    try:
        frame = path.read_bytes()
        record, _ = message.unframe(frame, {TrainedPair.kind: TrainedPair}, schema.size_limit(TrainedPair, sizes))
        assert isinstance(record, TrainedPair)
        if any(getattr(record, name) != value for name, value in vars(code).items()):
            raise Refused("wrong field", "the pair is of other settings")
        schema.check(record, sizes)
        if not 0 < record.reach < 1e6:
            raise Refused("out of range", f"reach is {record.reach:g}")
    except Refused as error:
        raise ValueError(f"{path} holds no such pair ({error}); delete it and run '{code.command}'") from None
    pair.spread, pair.reach = record.spread, record.reach
    return _filled(pair, record.parameters)


@cache
def load(code: Code, device: torch.device) -> Pair:
    """The pair that was trained here, or else the one that comes with fedveil."""
    if not code.width:
        return linear(code).to(device)
    shipped = Path(str(resources.files("fedveil"))) / "codecs" / "pairs"
    for folder in (home(), shipped):
        if (folder / code.file).is_file():
            return read(folder / code.file, code).to(device)
    missing = f"fedage has no trained pair {code.file.removesuffix('.fv')}"
    raise ValueError(f"{missing}; run '{code.command}', or set method.up.width=0 for the linear code")


@cache
def digest(code: Code) -> bytes:
    """8 bytes that tell a pair from any other."""
    known = code.file.encode()
    if code.width:
        known += load(code, torch.device("cpu")).vector.numpy().tobytes()
    return hashlib.blake2b(known, digest_size=8).digest()
