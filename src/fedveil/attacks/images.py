"""Attacks on synthetic sets as data: how much of a client's records shows in the points that it sends.

FedLAP and FedDM send synthetic images with labels, FedSynth and TOFU points with soft labels. An attack sees such a set
and candidate records, and does not know which candidates the client holds. The scorer knows, and measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from fedveil.attacks.roc import Figures, Roc, clopper_pearson
from fedveil.codecs.fedsynth import Synthetic
from fedveil.codecs.fit import Rounding, simplex
from fedveil.codecs.tofu import Proxies
from fedveil.core.message import Answer
from fedveil.core.seeds import Seed
from fedveil.core.task import Task
from fedveil.methods.surrogates.sets import Surrogate

PAIRS = 1 << 22  # distances that are held at once
CANDIDATES = 1000  # records among which those of the client are looked for

Records = tuple[Tensor, Tensor]  # x [n, *input] and labels y [n]


@dataclass(frozen=True)
class Points:
    """A synthetic set: images [N, *input], and labels [N], or soft labels [N, K] whose rows sum to 1."""

    images: Tensor
    labels: Tensor

    @property
    def soft(self) -> bool:
        """Whether a point belongs to several classes."""
        return self.labels.ndim == 2

    @property
    def classes(self) -> Tensor:
        """The likeliest class of each point, int64 [N]."""
        return self.labels.argmax(1) if self.soft else self.labels.long()


def points(task: Task, answer: Answer) -> Points:
    """Return the points that an answer holds, on the task's device, as the model is trained on them."""
    device = task.device
    if isinstance(answer, Surrogate):
        return Points(answer.images.to(device).float(), answer.labels.to(device))
    if not isinstance(answer, (Synthetic, Proxies)):
        raise ValueError(f"{type(answer).__name__} holds no synthetic points; give a Surrogate, Synthetic or Proxies")
    images, labels = answer.images.to(device), answer.labels.to(device)
    if images.dtype == torch.uint8:
        low, high = (torch.tensor([end], device=device) for end in (answer.low, answer.high))
        images = Rounding("uint8", low, high).expand(images[None])[0]
    if isinstance(answer, Synthetic):
        images, labels = images.flatten(0, 1), labels.flatten(0, 1)
    elif len(task.data.input) == 3:  # TOFU's priors: fewer channels are replicated, smaller images upsampled
        times = task.data.input[-1] // images.shape[-1]
        images = images.repeat_interleave(times, -1).repeat_interleave(times, -2)
    return Points(images.float().expand(len(images), *task.data.input), simplex(labels.float()))


# ---------------------------------------------------------------------------------------------------- the attacks


def closest(images: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each of `images` [N, *input] the index [N] of the nearest of `candidates` [M, *input], and its
    Euclidean distance [N]."""
    found = [apart.min(1) for apart in _distances(images, candidates)]
    return torch.cat([each.indices for each in found]), torch.cat([each.values for each in found])


def nearness(sent: Points, x: Tensor, y: Tensor) -> Tensor:
    """Score candidates x [n, *input], y [n] by minus the distance to the nearest synthetic image, [n].

    Only images of the candidate's class count, if labels are hard. A class without images has the score -inf.
    """
    pieces = _distances(x, sent.images)
    return torch.cat([-apart.amin(1) for apart in _within(pieces, y, None if sent.soft else sent.classes)])


def likelihood(sent: Points, x: Tensor, y: Tensor, pool: Records) -> Tensor:
    """Score candidates x [n, *input], y [n] by the log of p(x | set) / p(x | pool), [n].

    Both densities are means of Gaussian kernels of one width, class by class where the set's labels are hard. `pool` is
    the attacker's own records, none of which is a candidate. The width is chosen on the pool: h² is the median squared
    distance of its records to their nearest neighbours, divided by the number of entries of a record. This is the
    maximum-likelihood variance of a record around its nearest neighbour.
    """
    own, of = pool
    if not sent.soft and (lacking := sorted({*y.tolist()} - {*of.tolist()})):
        raise ValueError(f"the pool has no record of class {lacking[0]}; give records of each class of the candidates")
    groups = (None, None) if sent.soft else (sent.classes, of)
    near = torch.cat([piece.kthvalue(2, 1).values for piece in _within(_distances(own, own), of, groups[1])])
    near = near[near.isfinite()]
    if len(own) < 2 or not len(near) or not float(near.median()):
        raise ValueError(f"the pool's {len(own)} records have no neighbours to choose a width by; give a larger pool")
    precision = x[0].numel() / float(near.median()) ** 2  # 1 / h²

    def log_density(centres: Tensor, classes: Tensor | None) -> Tensor:
        parts = _within(_distances(x, centres), y, classes)
        logs = torch.cat([(-0.5 * precision * apart.square()).logsumexp(1) for apart in parts])
        count = (y[:, None] == classes).sum(1) if classes is not None else torch.full_like(y, len(centres))
        return logs - count.clamp(min=1).log()

    return log_density(sent.images, groups[0]) - log_density(own, groups[1])


def presence(sent: Points, classes: int) -> Tensor:
    """Return the share of the labels' mass on each class, [K]."""
    if sent.soft:
        return sent.labels.mean(0)
    return torch.bincount(sent.classes, minlength=classes) / len(sent.labels)


def held(sent: Points, classes: int) -> Tensor:
    """Guess which classes the client holds, bool [K]: those with a label, or with half an even share of soft labels."""
    return presence(sent, classes) > (0.5 / classes if sent.soft else 0)


def _distances(a: Tensor, b: Tensor) -> Iterator[Tensor]:
    """Euclidean distances of some rows of `a` at a time to all of `b`: pieces [·, M]."""
    flat = b.flatten(1)
    for part in a.flatten(1).split(max(1, PAIRS // len(b))):
        # The other mode takes differences of squares, by which a copy is not at distance 0.
        yield torch.cdist(part, flat, compute_mode="donot_use_mm_for_euclid_dist")


def _within(pieces: Iterator[Tensor], y: Tensor, classes: Tensor | None) -> Iterator[Tensor]:
    """Distances [·, M] with infinity where the row's class, of `y` [n], is not the column's, of `classes` [M]."""
    done = 0
    for apart in pieces:
        own = y[done : done + len(apart), None]
        done += len(apart)
        yield apart if classes is None else apart.where(own == classes, torch.inf)


# ---------------------------------------------------------------------------------------------------- the scorer


class SetFigures(msgspec.Struct, frozen=True):
    """What the attacks find out from one synthetic set.

    points, members, others: how many synthetic points there are, and how many candidates of either kind
    nearest:      the membership test by `nearness`
    likelihood:   the membership test by `likelihood`; None without a pool
    matched:      the share of synthetic images whose nearest candidate is a member, with Clopper and Pearson's
                  interval, which takes the images for independent
    chance:       the share of members among the candidates
    classes:      the share of classes of which it is told right whether the client holds them
    """

    points: int
    members: int
    others: int
    nearest: Figures
    likelihood: Figures | None
    matched: float
    matched_low: float
    matched_high: float
    chance: float
    classes: float

    @property
    def found(self) -> bool:
        """Whether an attack is better than chance beyond its interval. Three attacks find something where there is
        nothing in up to 7.5% of all sets."""
        tests = [self.nearest, self.likelihood] if self.likelihood else [self.nearest]
        return any(each.low > 0.5 for each in tests) or self.matched_low > self.chance


def audit(
    sent: Points,
    members: Records,
    others: Records,
    pool: Records | None,
    classes: int,
    seed: Seed,
    delta: float = 0.0,
    most: int = CANDIDATES,
) -> SetFigures:
    """Attack a set, and score the attacks with the client's records and with held-out ones of the same classes.

    members, others: the candidates are all of these, or fewer: either side has the same share of each class, and there
                     are at most `most` in all
    pool:            the attacker's own records, apart from both
    classes:         K, how many classes there are
    delta:           the δ of the ε among the figures
    """
    inside, outside = _matched(members, others, most, seed)
    x = torch.cat([members[0][inside], others[0][outside]])
    y = torch.cat([members[1][inside], others[1][outside]])
    n = len(inside)

    def told(scores: Tensor) -> Figures:
        found = scores.double().cpu().numpy()
        return Roc(found[:n], found[n:]).figures(delta)

    hits = int((closest(sent.images, x)[0] < n).sum())
    low, high = clopper_pearson(np.array(hits), len(sent.images))
    truth = torch.bincount(members[1], minlength=classes) > 0
    return SetFigures(
        points=len(sent.images),
        members=n,
        others=len(outside),
        nearest=told(nearness(sent, x, y)),
        likelihood=told(likelihood(sent, x, y, pool)) if pool else None,
        matched=hits / len(sent.images),
        matched_low=float(low),
        matched_high=float(high),
        chance=n / len(x),
        classes=float((held(sent, classes) == truth).double().mean()),
    )


def copies(sent: Points, x: Tensor, y: Tensor, seed: Seed) -> Points:
    """Return the set with records x [n, *input] of its classes y [n] in place of its images.

    With the client's records this is a positive control, which every attack must detect. With a stranger's records it
    is a baseline: real pictures that tell nothing about the client. A class takes records twice when it runs out.
    """
    rng, own, rows = seed.numpy(), y.cpu().numpy(), np.empty(len(sent.images), int)
    wanted = sent.classes.cpu().numpy()
    for label in np.unique(wanted):
        of = np.flatnonzero(own == label)
        rows[wanted == label] = np.resize(rng.permutation(of if len(of) else len(own)), (wanted == label).sum())
    return Points(x[torch.from_numpy(rows).to(x.device)], sent.labels)


def noise(sent: Points, seed: Seed) -> Points:
    """Return the set with standard normal noise in place of its images: a baseline that tells classes only."""
    drawn = torch.randn(sent.images.shape, generator=seed.torch())
    return Points(drawn.to(sent.images.device), sent.labels)


def _matched(members: Records, others: Records, most: int, seed: Seed) -> tuple[Tensor, Tensor]:
    """Rows of members [m] and of others [n] with the same share of each class, in orders that say nothing."""
    rng, sides = seed.numpy(), [side[1].cpu().numpy() for side in (members, others)]
    classes = 1 + max(int(y.max()) for y in sides)
    inside, outside = (np.bincount(y, minlength=classes) for y in sides)
    outside = np.minimum(inside, outside)
    times = min((int(m // n) for m, n in zip(inside, outside, strict=True) if n), default=1)
    outside = (outside * min(1.0, most / max(1, (1 + times) * outside.sum()))).astype(int)
    if outside.sum() < 4:
        raise ValueError(f"only {outside.sum()} held-out records are of the client's classes; give at least 4")
    chosen = []
    for side, y, counts in zip((members, others), sides, (times * outside, outside), strict=True):
        rows = [rng.permutation(np.flatnonzero(y == c))[:count] for c, count in enumerate(counts)]
        chosen.append(torch.from_numpy(rng.permutation(np.concatenate(rows))).to(side[0].device))
    return chosen[0], chosen[1]
