"""How near reconstructed records are to the true ones, and how near a guess without any message comes.

This is the only part of inversion that looks at the truth. Pictures are compared in pixels, from 0 to 1; other records
in the units in which the model gets them.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedveil.attacks.roc import CONFIDENCE, clopper_pearson
from fedveil.core.data import Data
from fedveil.core.seeds import Seed

CANDIDATES = 1_000  # among which a record is identified: itself and others
EXACT = 1e-4  # mean squared error in variances of the data below which a record is recovered exactly
SMALLEST = 1e-10  # mean squared error that counts as 100 dB, the highest PSNR
WINDOW = 7  # pixels of SSIM's uniform window, as in scikit-image
K1, K2 = 0.01, 0.03  # SSIM's constants
RESAMPLES = 2_000  # of the bootstrap
CHUNK = 256  # records whose distances to a pool are computed at once


class Range(msgspec.Struct, frozen=True):
    """A mean or a share over victims, with its 95% interval."""

    value: float
    low: float
    high: float


class Nearness(msgspec.Struct, frozen=True):
    """What reconstructions reach, over victims.

    victims, records: how many there are, and how many records each has
    mse:        mean squared error, in pixels where records are pictures
    psnr, ssim: of pictures; PSNR in dB is 100 at most
    labels:     share of a victim's labels that were found, as a multiset
    identified: share of records that are nearer to their reconstruction than all other candidates
    chance:     at most this share is identified by reconstructions that say nothing
    candidates: how many there were
    exact:      share of records with an error below `EXACT` of the data's variance
    """

    victims: int
    records: int
    mse: Range
    psnr: Range | None
    ssim: Range | None
    labels: Range | None
    identified: Range
    chance: float
    candidates: int
    exact: Range


@dataclass(frozen=True, eq=False)
class Pool:
    """Records that no victim holds, as the model gets them: to find a victim's record among, and to guess from.

    data:   how pixels were standardised
    others: what a record is identified among, [m, *input]
    held:   what baselines guess from, [k, *input]; none of them is among `others`
    """

    data: Data
    others: Tensor
    held: Tensor

    @staticmethod
    def of(data: Data, seed: Seed, records: Tensor | None = None) -> Pool:
        """Draw 999 candidates, or half of the pool where it is small. By default the pool is the test records."""
        records = data.test_x if records is None else records
        if len(records) < 2:
            raise ValueError(f"The pool has {len(records)} record; scores need at least 2.")
        order = torch.from_numpy(seed.child("candidates").numpy().permutation(len(records)))
        count = min(CANDIDATES - 1, len(records) // 2)
        return Pool(data, records[order[:count]], records[order[count:]])

    def pixels(self, x: Tensor) -> Tensor:
        """Records […, *input] on the CPU, of pictures the pixels; what a diverged attack left becomes a number."""
        x = x.detach().cpu().float()
        if not self.data.mean:
            return x.nan_to_num(0, 0, 0)
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.data.mean, self.data.std))
        return (x * std + mean).nan_to_num(0.5, 1, 0).clamp(0, 1)

    @property
    def variance(self) -> float:
        """Of a pixel over records, the mean over pixels."""
        return float(self.pixels(torch.cat([self.others, self.held])).var(0, correction=0).mean())

    def baselines(self, true: Tensor, seed: Seed) -> dict[str, Tensor]:
        """What is guessed without a message for victims' records [V, n, *input], each [V, n, *input].

        mean:    the mean record
        random:  a random record
        nearest: the record nearest to the true one, the best that guessing from the pool can do
        """
        held, (victims, n) = self.held.to(true.device), true.shape[:2]
        drawn = torch.from_numpy(seed.child("random").numpy().integers(len(held), size=(victims, n)))
        _, nearest = _nearest(self.pixels(true).flatten(0, 1), self.pixels(held))
        return {
            "mean": held.mean(0).expand_as(true),
            "random": held[drawn],
            "nearest": held[nearest.view(victims, n)],
        }


@dataclass(frozen=True, eq=False)
class Scores:
    """Of each victim: errors of its records matched to reconstructions, [V, n], and of its labels [V]."""

    mse: Tensor
    psnr: Tensor | None
    ssim: Tensor | None
    labels: Tensor | None
    identified: Tensor  # bool
    exact: Tensor  # bool
    candidates: int

    def figures(self, seed: Seed) -> Nearness:
        """Means with bootstrap intervals over victims, and shares with Clopper and Pearson's."""
        victims, n = self.mse.shape

        def mean(values: Tensor | None) -> Range | None:
            return None if values is None else bootstrap(values.view(victims, -1).mean(1), seed)

        mse = mean(self.mse)
        assert mse
        return Nearness(
            victims,
            n,
            mse,
            mean(self.psnr),
            mean(self.ssim),
            mean(self.labels),
            share(self.identified),
            min(1.0, n / self.candidates),
            self.candidates,
            share(self.exact),
        )


def score(
    found: Tensor,
    true: Tensor,
    pool: Pool,
    found_labels: Tensor | None = None,
    true_labels: Tensor | None = None,
) -> Scores:
    """Compare reconstructions with true records, both [V, n, *input], and their labels [V, n].

    Each reconstruction is matched to one true record of its victim, so that the summed squared error is least.
    """
    if found.shape != true.shape:
        raise ValueError(f"Reconstructions are {list(found.shape)} but true records {list(true.shape)}.")
    found, true = pool.pixels(found), pool.pixels(true)
    found = torch.stack([f[matching(f, t)] for f, t in zip(found, true, strict=True)])
    mse = (found - true).square().flatten(2).mean(2)
    distance, _ = _nearest(found.flatten(0, 1), pool.pixels(pool.others))
    labels = None
    if found_labels is not None and true_labels is not None:
        labels = overlap(found_labels.cpu(), true_labels.cpu(), pool.data.classes)
    pictures = bool(pool.data.mean)
    return Scores(
        mse,
        -10 * mse.clamp(min=SMALLEST).log10() if pictures else None,
        ssim(found.flatten(0, 1), true.flatten(0, 1)).view_as(mse) if pictures else None,
        labels,
        mse < distance.view_as(mse),
        mse < EXACT * pool.variance,
        len(pool.others) + 1,
    )


def matching(found: Tensor, true: Tensor) -> Tensor:
    """Which of n reconstructions stands for each true record, both [n, …]: indices [n] of least total error."""
    cost = torch.cdist(true.flatten(1), found.flatten(1)).square()
    return torch.from_numpy(linear_sum_assignment(cost.numpy())[1])


def overlap(found: Tensor, true: Tensor, classes: int) -> Tensor:
    """The share of labels in both multisets [V, n], [V]."""
    counts = [F.one_hot(y, classes).sum(1) for y in (found, true)]
    return torch.minimum(*counts).sum(1) / true.shape[1]


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Structural similarity of pictures [B, channels, h, w] with pixels in [0, 1], [B] (Wang et al. 2004, eq. 13).

    The window is uniform and has 7 × 7 pixels, or fewer where a picture is smaller.
    """
    size = min(WINDOW, *a.shape[2:])

    def mean(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, size, stride=1)

    a, b = a.double(), b.double()
    mean_a, mean_b, sample = mean(a), mean(b), size**2 / max(size**2 - 1, 1)
    var_a, var_b = ((mean(x * x) - m * m) * sample for x, m in ((a, mean_a), (b, mean_b)))
    both = (mean(a * b) - mean_a * mean_b) * sample
    similar: Tensor = (2 * mean_a * mean_b + K1**2) * (2 * both + K2**2)
    similar = similar / ((mean_a**2 + mean_b**2 + K1**2) * (var_a + var_b + K2**2))
    return similar.flatten(1).mean(1).float()


def bootstrap(values: Tensor, seed: Seed) -> Range:
    """The mean of values [V] with its percentile interval over resampled victims."""
    each: NDArray[np.float64] = values.double().numpy()
    drawn = seed.child("bootstrap").numpy().integers(len(each), size=(RESAMPLES, len(each)))
    low, high = np.quantile(each[drawn].mean(1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Range(float(each.mean()), float(low), float(high))


def share(hits: Tensor) -> Range:
    """The share of hits [V, n] with Clopper and Pearson's interval.

    Records of one victim are not independent, so each victim counts as one trial; part of a hit is rounded away from
    the interval's middle.
    """
    whole = float(hits.float().mean(1).sum())
    low, _ = clopper_pearson(np.array(int(np.floor(whole + 1e-6))), len(hits))
    _, high = clopper_pearson(np.array(int(np.ceil(whole - 1e-6))), len(hits))
    return Range(whole / len(hits), float(low), float(high))


def _nearest(x: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
    """Of records [B, …] the mean squared error to the nearest of a pool [m, …], [B], and which it is, [B]."""
    rows, others, size = x.flatten(1), pool.flatten(1), x[0].numel()
    which = torch.cat([torch.cdist(part, others).argmin(1) for part in rows.split(CHUNK)])
    return (rows - others[which]).square().sum(1) / size, which
