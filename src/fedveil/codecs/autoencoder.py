"""Pairs (E, D) for averaging in an encoded domain: D(mean of E(l_i)) ≈ mean of l_i (FedAGE, section 3.2).

A pair works on blocks of b whole numbers from 0 to s, whatever they stand for. There are three kinds:

learned  networks, trained once on random numbers (`pretraining`) and kept as a file
linear   a projection onto h directions. For independent uniform inputs no linear code has a smaller error
packed   several numbers in one float32, as digits to a base that no sum of m numbers reaches. It has no error at all
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedveil.core import message, schema
from fedveil.core.message import Envelope, Record, Refused, Shape
from fedveil.core.seeds import Seed
from fedveil.data.files import data_directory

DEPTH = 3  # residual blocks on either side
WIDER = 4  # a residual block's hidden layer, in widths
WHOLE = 1 << 24  # float32 holds every whole number up to this one
KINDS = ("learned", "linear", "packed")
PRETRAININGS = ("own", "paper")
ROWS = {"cpu": 1 << 12, "cuda": 1 << 16}  # blocks that go through a network at once


@dataclass(frozen=True)
class Code:
    """Which pair: all that decides it."""

    block: int = 64  # b
    code: int = 32  # h
    levels: int = 64  # s
    cohort: int = 10  # m: codes that are averaged in training
    width: int = 512  # of the networks
    seed: int = 0
    kind: str = "learned"
    pretraining: str = "own"  # or the paper's, of a learned pair

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.pretraining not in PRETRAININGS:
            raise ValueError(
                f"a pair needs a code of {', '.join(KINDS)} and a pretraining of {' or '.join(PRETRAININGS)}, not "
                f"'{self.kind}' and '{self.pretraining}'"
            )
        if not 1 <= self.code <= self.block <= 4096 or not 1 <= self.levels <= 1 << 15:
            raise ValueError("a pair needs 1 <= code size <= block <= 4096 and from 1 to 32768 levels")
        if self.cohort < 1 or not 1 <= self.width <= 4096:
            raise ValueError(
                "a pair needs a cohort of at least 1 and a width from 1 to 4096; for the linear code set code=linear"
            )
        if self.kind == "packed" and self.base**self.packed > WHOLE:
            most = (math.floor(WHOLE ** (1 / self.packed) + 1e-9) - 1) // self.cohort
            raise ValueError(
                f"a float32 does not hold {self.packed} sums of {self.cohort} numbers up to {self.levels}, because "
                f"{self.base}^{self.packed} is above 2^24; set at most {most} levels, a smaller cohort or a larger "
                "code_size"
            )

    @property
    def floor(self) -> float:
        """The smallest σ_ν of a linear code for independent uniform inputs: √((1 - h/b) s(s + 2) / 12m)."""
        return math.sqrt((1 - self.code / self.block) * self.levels * (self.levels + 2) / (12 * self.cohort))

    @property
    def packed(self) -> int:
        """How many numbers the packed code puts into one: b/h, rounded up."""
        return -(-self.block // self.code)

    @property
    def base(self) -> int:
        """The packed code's base: one more than the largest sum of m numbers, m·s + 1."""
        return self.cohort * self.levels + 1

    @property
    def file(self) -> str:
        sizes = f"b{self.block}-h{self.code}-s{self.levels}-m{self.cohort}-w{self.width}-seed{self.seed}"
        return f"{sizes}{'-paper' if self.pretraining == 'paper' else ''}.fv"

    @property
    def command(self) -> str:
        """What trains it."""
        size = f"--block {self.block} --code-size {self.code} --levels {self.levels} --cohort {self.cohort}"
        how = " --pretraining paper" if self.pretraining == "paper" else ""
        return f"fedveil fedage pretrain {size} --width {self.width} --seed {self.seed}{how}"


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(width, WIDER * width), nn.Linear(WIDER * width, width)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.back(self.wide(x).relu())
        return x + inner


def _network(inputs: int, outputs: int, code: Code) -> nn.Module:
    """One side of a pair (figure 6)."""
    if code.kind == "linear":
        return nn.Linear(inputs, outputs)
    width = code.width
    first = nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width)
    return nn.Sequential(*first, *(_Residual(width) for _ in range(DEPTH)), nn.Linear(width, outputs))


class Pair(nn.Module):
    """E: [N, b] -> [N, h] and D: [N, h] -> [N, b].

    spread: σ_ν, the standard deviation of D(mean of E(l_i)) - mean of l_i as it was measured
    reach:  no entry of a code is beyond it, so that codes fit fixed-point numbers and a wild one can be refused
    dtype:  of the means of codes
    """

    dtype = torch.float32

    def __init__(self, code: Code, spread: float = math.inf, reach: float = math.inf) -> None:
        super().__init__()
        self.code, self.spread, self.reach = code, spread, reach
        self.e, self.d = _network(code.block, code.code, code), _network(code.code, code.block, code)

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
    def decode(self, codes: Tensor, count: int = 1) -> Tensor:
        """D without gradients, a slice after another, of means of any number of codes."""
        with _half(codes):
            return torch.cat([self.D(rows).float() for rows in codes.split(_rows(codes))])

    @property
    def vector(self) -> Tensor:
        """All parameters, on the CPU."""
        return nn.utils.parameters_to_vector(self.parameters()).detach().cpu()


class Packed:
    """k = b/h whole numbers in one float32: E(l) = Σ_j l_j B^j with the base B = m·s + 1.

    No digit of a sum of m codes reaches B, so the sum unpacks into the sums of the numbers. It is exact as long as
    B^k ≤ 2^24. A mean of c codes is not, so it comes in float64, and D(mean) = digits of round(c · mean), over c.
    """

    dtype, spread = torch.float64, 0.0

    def __init__(self, code: Code) -> None:
        self.code = code
        self.powers = [code.base**j for j in range(code.packed)]
        self.reach = float(code.levels * sum(self.powers))

    def encode(self, l: Tensor) -> Tensor:  # noqa: E741 - the paper's letter
        """[N, b] -> [N, h]: number i is digit i // h of code i % h."""
        rows = F.pad(l, (0, self.code.packed * self.code.code - self.code.block)).unflatten(1, (-1, self.code.code))
        codes: Tensor = (rows * l.new_tensor(self.powers)[:, None]).sum(1)
        return codes

    def decode(self, codes: Tensor, count: int = 1) -> Tensor:
        """Means of `count` codes [N, h] -> means of whole numbers [N, b]."""
        if count > self.code.cohort:
            raise ValueError(f"the packed code adds up {self.code.cohort} clients, not {count}; set method.up.cohort")
        whole = (codes.double() * count).round_()
        return (self._digits(whole) / count).float()

    def genuine(self, codes: Tensor) -> bool:
        """Whether a client's codes [..., h] hold whole numbers from 0 to s only."""
        whole = codes.double().flatten(0, -2)
        digits = self._digits(whole)
        return bool(((whole == whole.round()) & (whole >= 0)).all()) and bool((digits <= self.code.levels).all())

    def _digits(self, whole: Tensor) -> Tensor:
        """[N, h] -> [N, b]; the last digit takes what is left, whatever it is."""
        digits = [(whole / power).floor().remainder_(self.code.base) for power in self.powers[:-1]]
        return torch.cat([*digits, (whole / self.powers[-1]).floor()], 1)[:, : self.code.block]

    def to(self, device: torch.device) -> Packed:
        return self


def errors(pair: Pair | Packed, groups: Tensor) -> Tensor:
    """ν of groups [N, m, b] (eq. 8), [N, b]."""
    codes = pair.encode(groups.flatten(0, 1)).unflatten(0, groups.shape[:2])
    return pair.decode(codes.to(pair.dtype).mean(1), groups.shape[1]) - groups.mean(1)


def _half(x: Tensor) -> torch.autocast:
    """On a GPU layers work in half precision: it rounds a hundred times finer than a code is wrong anyway."""
    return torch.autocast("cuda", torch.float16, enabled=x.is_cuda)


def _rows(x: Tensor) -> int:
    return ROWS.get(x.device.type, ROWS["cpu"])


def filled(pair: Pair, vector: Tensor) -> Pair:
    """The pair with all its parameters from one vector."""
    nn.utils.vector_to_parameters(vector.clone(), pair.parameters())
    return pair.requires_grad_(False)


def linear(code: Code) -> Pair:
    """E(l) = P(l/s - 1/2) and D(c) = s(1/2 + Pᵀc), P [h, b] with orthonormal rows drawn from the seed."""
    draw = Seed.root(code.seed).child("pair").torch()
    basis = torch.linalg.qr(torch.randn(code.block, code.code, generator=draw, dtype=torch.float64)).Q.float()
    half = torch.full((code.block,), 0.5)
    pair = Pair(code, code.floor, math.sqrt(code.block) / 2)
    return filled(pair, torch.cat([basis.T.flatten(), -(half @ basis), basis.flatten(), half]))


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


SETTINGS = ("block", "code", "levels", "cohort", "width", "seed")  # those of a pair that its file states


def home() -> Path:
    """The folder of trained pairs, beside the data sets."""
    return data_directory(None) / "fedage"


def save(pair: Pair, path: Path) -> None:
    """Write a pair to a file, whole or not at all."""
    settings = {name: getattr(pair.code, name) for name in SETTINGS}
    record = TrainedPair(**settings, spread=pair.spread, reach=pair.reach, parameters=pair.vector)
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
        if any(getattr(record, name) != getattr(code, name) for name in SETTINGS):
            raise Refused("wrong field", "the pair is of other settings")
        schema.check(record, sizes)
        if not 0 < record.reach < 1e6:
            raise Refused("out of range", f"reach is {record.reach:g}")
    except Refused as error:
        raise ValueError(f"{path} holds no such pair ({error}); delete it and run '{code.command}'") from None
    pair.spread, pair.reach = record.spread, record.reach
    return filled(pair, record.parameters)


@cache
def load(code: Code, device: torch.device) -> Pair | Packed:
    """The linear or packed code, or the learned pair that was trained here, or else the one that comes with fedveil."""
    if code.kind != "learned":
        return linear(code).to(device) if code.kind == "linear" else Packed(code)
    shipped = Path(str(resources.files("fedveil"))) / "codecs" / "pairs"
    for folder in (home(), shipped):
        if (folder / code.file).is_file():
            return read(folder / code.file, code).to(device)
    missing = f"fedage has no trained pair {code.file.removesuffix('.fv')}"
    raise ValueError(f"{missing}; run '{code.command}', or set method.up.code=linear, which needs no training")


@cache
def digest(code: Code) -> bytes:
    """8 bytes that tell a pair from any other."""
    known = f"{code.kind} {code.file}".encode()
    pair = load(code, torch.device("cpu"))
    if isinstance(pair, Pair):
        known += pair.vector.numpy().tobytes()
    return hashlib.blake2b(known, digest_size=8).digest()
