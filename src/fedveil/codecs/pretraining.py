"""Training a pair on random whole numbers (FedAGE, appendix F.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil import models
from fedveil.codecs.autoencoder import Code, Pair, errors, filled
from fedveil.core.seeds import Seed

TESTED = 10_000  # groups on which σ_ν is measured (appendix F.2)
WATCHED = 2000  # groups on which it is watched after each epoch


def groups(code: Code, count: int, seed: Seed, device: str | torch.device = "cpu", cohort: int | None = None) -> Tensor:
    """Uniform random blocks for `count` means of `cohort` (by default m) codes, [count, m, b]."""
    return _drawn((count, cohort or code.cohort, code.block), code.levels, _generator(seed, device))


def _generator(seed: Seed, device: str | torch.device) -> torch.Generator:
    """One that draws on the device: pairs trained on different ones differ by rounding anyway."""
    return torch.Generator(device).manual_seed(seed.torch().initial_seed())


def _drawn(shape: tuple[int, ...], highest: float | Tensor, draw: torch.Generator) -> Tensor:
    """Whole numbers from 0 to `highest`."""
    return (torch.rand(shape, generator=draw, device=draw.device) * (highest + 1)).floor_()


@dataclass(frozen=True)
class Pretraining:
    """How a pair is trained. An epoch is `groups` groups of m blocks.

    schedule: of Adam's rate: "cosine" lets it fall to 0, "constant" leaves it
    small:    share of the groups whose numbers reach from 0 to r only, r from 1 to s on a logarithmic scale. Most
              weights of an update change far less than the one that changes most, and a network that has seen only
              numbers up to s averages those badly
    fresh:    draw new blocks in every epoch; if not, the same blocks are shuffled into new groups
    tested:   groups on which the error is measured after each epoch; the pair with the lowest is kept
    patience: so many epochs without a lower error end the training
    """

    epochs: int = 50
    groups: int = 50_000
    batch: int = 500
    lr: float = 5e-4
    schedule: str = "cosine"
    small: float = 0.5
    fresh: bool = True
    tested: int = WATCHED
    patience: int = 10

    def __post_init__(self) -> None:
        if self.epochs < 1 or not 1 <= self.batch <= self.groups or self.lr <= 0:
            raise ValueError("pretraining needs epochs >= 1, 1 <= batch <= groups and lr > 0")
        if not 0 <= self.small <= 1 or self.patience < 1:
            raise ValueError("pretraining needs a share of small groups from 0 to 1 and patience >= 1")
        if self.schedule not in ("cosine", "constant") or (self.small and not self.fresh):
            raise ValueError("pretraining needs a cosine or constant schedule, and fresh blocks where some are small")


PRETRAININGS = {
    "own": Pretraining(),
    "paper": Pretraining(lr=1e-4, schedule="constant", small=0.0, fresh=False, tested=TESTED, patience=50),
}


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
    if code.kind != "learned":
        raise ValueError(f"the {code.kind} code needs no training; only a learned pair does")
    how, seed = how or PRETRAININGS[code.pretraining], Seed.root(code.seed).child("pair")
    pair = Pair(code)
    models.initialise(pair, seed)
    pair.to(device)
    if torch.device(device).type == "cuda":
        torch.set_float32_matmul_precision("high")  # as the engine does
    optimizer = torch.optim.Adam(pair.parameters(), how.lr)
    steps = how.groups // how.batch
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, how.epochs * steps)
    draw = _generator(seed.child("training"), device)
    pool = None if how.fresh else _drawn((how.groups * code.cohort, code.block), code.levels, draw)
    watched = groups(code, WATCHED, seed.child("watched"), device)
    tested = _batch(code, how.tested, how.small, _generator(seed.child("test"), device))
    least, best, since, spread = math.inf, pair.vector, 0, math.inf
    for epoch in range(how.epochs):
        for step, batch in enumerate(_epoch(code, how, pool, draw)):
            optimizer.zero_grad()
            _loss(pair, batch).backward()
            optimizer.step()
            if how.schedule == "cosine":
                falling.step()
            if told:
                told(epoch * steps + step + 1, how.epochs * steps, spread)
        with torch.no_grad():
            parts = zip(*(each.split(WATCHED) for each in tested), strict=True)
            error = sum(float(_loss(pair, part)) * len(part[0]) for part in parts) / how.tested
        since += 1
        if error < least:
            least, best, since = error, pair.vector, 0
        spread = float(errors(pair, watched).std())
        if since == how.patience:
            break
    if least == math.inf:
        raise ValueError(f"the pair's training diverged; try an lr below {how.lr:g}")
    kept = filled(Pair(code), best).to(device)
    measured = [groups(code, WATCHED, seed.child("measured", i), device) for i in range(TESTED // WATCHED)]
    kept.spread = float(torch.cat([errors(kept, part) for part in measured]).std())
    corners = torch.tensor([[0.0], [code.levels]], device=device).expand(2, code.block)
    furthest = float(kept.encode(torch.cat([watched.flatten(0, 1), corners])).abs().max())
    kept.reach = 2 * furthest  # other inputs may lead a little further
    return kept.cpu()


def _epoch(code: Code, how: Pretraining, pool: Tensor | None, draw: torch.Generator) -> Iterator[Batch]:
    """The batches of an epoch: of new blocks, or of those of the pool [N, b] in a new order."""
    if pool is None:
        for _ in range(how.groups // how.batch):
            yield _batch(code, how.batch, how.small, draw)
        return
    order = torch.randperm(len(pool), generator=draw, device=pool.device).view(-1, code.cohort)
    for rows in order[: how.groups // how.batch * how.batch].split(how.batch):
        yield pool[rows], torch.full((len(rows), 1), float(code.levels), device=pool.device)


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
