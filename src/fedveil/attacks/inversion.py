"""Gradient matching: dummy records are fitted until their gradient is the one that was seen.

`dlg` is Deep Leakage from Gradients (Zhu et al. 2019, eq. 4), and iDLG (Zhao et al. 2020) where labels are given:
squared distance, L-BFGS. `cosine` is Inverting Gradients (Geiping et al. 2020, eq. 4): 1 - cosine plus total
variation, Adam on the signs of the slopes, pixels kept in their range. All victims and restarts are one stack.

Nothing here looks at the records of the task. Of several restarts the one with the lowest loss is kept. The model works
as in evaluation: where clients train with dropout or with statistics of their batches, the match is approximate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fedveil.attacks.lbfgs import Lbfgs
from fedveil.codecs.fit import BETA1, BETA2, EPSILON, cosine
from fedveil.core.functional import first_line
from fedveil.core.seeds import Seed
from fedveil.core.task import Task
from fedveil.gpu.graphs import Loop
from fedveil.train.local import LocalTraining

CHUNK = 20  # steps between two looks at the clock
FALLS = (3 / 8, 5 / 8, 7 / 8)  # of the steps, after which the learning rate of `cosine` is a tenth of what it was

Tell = Callable[[str], object]
# Dummy records [B, …], their labels [B, n] or [B, n, classes], and the number of the victim whose they are [B] -> [B].
Distance = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Target:
    """What was seen of V victims, or estimated from what they sent. In float64 L-BFGS comes nearer than in float32.

    weights: [V, d] at which the vector was made
    vector:  [V, d] the mean gradient, or the update w_end - w_start
    means:   "gradient" or "update"
    records: n of each victim
    labels:  [V, n], known or guessed
    local:   the training that made an update; its lr is that of the round
    """

    weights: Tensor
    vector: Tensor
    means: str
    records: int
    labels: Tensor | None = None
    local: LocalTraining | None = None

    def __post_init__(self) -> None:
        if self.means not in ("gradient", "update"):
            raise ValueError(f"A target's vector means '{self.means}'; use gradient or update.")
        if self.means == "update" and self.local is None:
            raise ValueError("A target that is an update needs the local training that made it.")
        if self.weights.shape != self.vector.shape or self.vector.ndim != 2:
            raise ValueError(
                f"A target's weights are {list(self.weights.shape)} and its vector {list(self.vector.shape)}; both are "
                "[V, d]."
            )
        if self.labels is not None and self.labels.shape != (len(self.vector), self.records):
            raise ValueError(
                f"A target's labels are {list(self.labels.shape)}, not [{len(self.vector)}, {self.records}]."
            )


@dataclass(frozen=True)
class Found:
    """What was reconstructed.

    x:        [V, n, *input] in the units in which the model gets records
    y:        [V, n]
    loss:     [V], the attack's own
    finished: whether all steps were taken before the deadline
    """

    x: Tensor
    y: Tensor
    loss: Tensor
    finished: bool


@dataclass(frozen=True)
class Inversion:
    """How dummy records are fitted.

    kind:     "dlg" or "cosine"
    steps:    of the optimizer
    lr:       its learning rate; 1 for L-BFGS
    tv:       the weight of total variation, for pictures; estimates with noise need more than exact gradients
    restarts: random beginnings of each victim, of which the best is kept
    screen:   steps after which only the best of these goes on, for all `steps`; with 0 all go on to the end
    boxed:    whether pixels are kept between black and white
    """

    kind: str = "cosine"
    steps: int = 4_800
    lr: float = 0.1
    tv: float = 1e-3
    restarts: int = 1
    screen: int = 0
    boxed: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("dlg", "cosine"):
            raise ValueError(f"inversion.kind is '{self.kind}'; use dlg or cosine")
        if self.steps < 1 or self.restarts < 1 or self.lr <= 0 or min(self.tv, self.screen) < 0:
            raise ValueError(
                "inversion needs steps and restarts of at least 1, lr above 0, and tv and screen of at least 0"
            )


DLG = Inversion("dlg", steps=8_000, lr=1.0, tv=0.0, restarts=4, screen=300, boxed=False)


def invert(
    task: Task,
    target: Target,
    how: Inversion,
    seed: Seed,
    *,
    tell: Tell = lambda _: None,
    deadline: float = math.inf,
) -> Found:
    """Fit n records a victim to its gradient; an update is read as a multiple of one.

    tell:     is given a sentence on the progress now and then
    deadline: in seconds of `time.monotonic`; what there is by then is returned
    """
    seen, weights = as_gradient(target).to(task.device), target.weights.to(task.device)

    def distance(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        here = gradient(task, weights[rows], x, y)
        return 1 - cosine(here, seen[rows]) if how.kind == "cosine" else (here - seen[rows]).square().sum(1)

    return search(task, target, how, seed, (), distance, tell, deadline)


def as_gradient(target: Target) -> Tensor:
    """The mean gradient [V, d]; of an update the mean over its steps, Δ / (-lr × steps)."""
    if target.means == "gradient" or target.local is None:
        return target.vector
    return target.vector / (-target.local.lr * steps_of(target.local, target.records))


def steps_of(local: LocalTraining, records: int) -> int:
    """The optimizer steps of a client with so many records."""
    return local.steps or local.epochs * -(-records // local.step_size)


def gradient(task: Task, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of the mean loss on x [B, n, *input] and labels y at `w` [B, d], which can be differentiated by x
    and y, and by w where w can, [B, d]."""
    w = w if w.requires_grad else w.detach().requires_grad_()
    losses = task.stacked_losses(w, x, y).mean(1)
    return torch.autograd.grad(losses.sum(), w, create_graph=True)[0]


def variation(x: Tensor) -> Tensor:
    """Anisotropic total variation of pictures [B, …, h, w]: the mean differences between neighbours, [B]."""
    return sum((x.diff(dim=side).abs().flatten(1).mean(1) for side in (-1, -2)), x.new_zeros(len(x)))


# ---------------------------------------------------------------------------------------------------- the search


def search(
    task: Task,
    target: Target,
    how: Inversion,
    seed: Seed,
    copies: tuple[int, ...],
    distance: Distance,
    tell: Tell,
    deadline: float,
) -> Found:
    """Fit dummy records [V × restarts, *copies, n, *input], and labels where none are given, to a distance.

    The records of `Found` have the shape [V, *copies, n, *input].
    """
    data, n, victims = task.data, target.records, len(target.vector)
    if not data.x.is_floating_point():
        raise ValueError("Gradient matching needs records of real numbers, and these are tokens.")
    if target.labels is None and not data.labelled:
        raise ValueError("Gradient matching finds class labels only; give the labels of this task.")
    seeds = [seed.child("restart", v, r) for v in range(victims) for r in range(how.restarts)]
    shape, classes = (*copies, n, *data.input), data.classes if target.labels is None else 0
    start = torch.stack([torch.randn(math.prod(shape) + n * classes, generator=s.torch()) for s in seeds])
    point = start.to(task.device, target.vector.dtype)  # [B, D]: records, and behind them the labels' logits
    pixels, picture = math.prod(shape), bool(data.mean)
    given = None if target.labels is None else target.labels.to(task.device)
    box = _box(task, shape) if how.boxed and picture else None

    def records(z: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        x = z[:, :pixels].unflatten(1, shape)
        return x, z[:, pixels:].unflatten(1, (n, classes)).softmax(2) if given is None else given[rows]

    def losses(z: Tensor, rows: Tensor) -> Tensor:
        x, y = records(z, rows)
        return distance(x, y, rows) + how.tv * variation(x) if how.tv and picture else distance(x, y, rows)

    rows = torch.arange(victims, device=task.device).repeat_interleave(how.restarts)
    finished, loss = True, point.new_zeros(victims)
    for steps in (how.screen, how.steps) if how.screen and how.restarts > 1 else (how.steps,):
        point, loss, finished = _descend(
            point, partial(losses, rows=rows), replace(how, steps=steps), box, tell, deadline
        )
        lowest = loss.view(victims, -1)
        chosen = torch.arange(victims, device=task.device) * lowest.shape[1] + lowest.argmin(1)
        point, loss, rows = point[chosen], loss[chosen], rows[chosen]
    x, y = records(point, rows)
    return Found(x, y if given is not None else y.argmax(2), loss, finished)


def _descend(
    point: Tensor,
    losses: Callable[[Tensor], Tensor],
    how: Inversion,
    box: tuple[Tensor, Tensor] | None,
    tell: Tell,
    deadline: float,
) -> tuple[Tensor, Tensor, bool]:
    """From points [B, D] to the best that are found [B, D], their losses [B], and whether all steps were taken."""
    best, lowest = point.clone(), point.new_full((len(point),), math.inf)

    def slopes() -> tuple[Tensor, Tensor]:
        """Losses [B] and their slopes [B, D] at the point, of which the best is noted."""
        z = point.detach().requires_grad_()
        loss = losses(z)
        (slope,) = torch.autograd.grad(loss.sum(), z)
        loss = loss.detach()
        better = loss < lowest
        lowest.copy_(torch.where(better, loss, lowest))
        best.copy_(torch.where(better[:, None], point, best))
        return loss, slope

    def project() -> None:
        if box:
            size = len(box[0])
            point[:, :size] = torch.minimum(torch.maximum(point[:, :size], box[0]), box[1])

    project()
    _probe(slopes)
    step = Lbfgs(point, best, slopes, how.lr) if how.kind == "dlg" else signed_adam(point, slopes, how, project)
    done, loop = 0, Loop(step, how.steps, point.device, (0, how.steps))
    while done < how.steps and time.monotonic() < deadline:
        loop.run(min(CHUNK, how.steps - done))
        done = min(how.steps, done + CHUNK)
        tell(f"{how.kind} inversion  step {done}/{how.steps}  median loss {float(lowest.median()):.4g}")
    return best, lowest, done >= how.steps


def _probe(slopes: Callable[[], object]) -> None:
    """Raise a ValueError where the model cannot be differentiated twice."""
    try:
        slopes()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        reason = first_line(error)
        raise ValueError(
            f"Gradient matching differentiates the model twice, and that fails here ({reason})."
        ) from error


def _box(task: Task, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The values of black and white of each entry, both [D]."""
    mean, std = (torch.tensor(v, device=task.device)[:, None, None] for v in (task.data.mean, task.data.std))
    return (-mean / std).expand(shape).flatten(), ((1 - mean) / std).expand(shape).flatten()


def signed_adam(
    point: Tensor, slopes: Callable[[], tuple[Tensor, Tensor]], how: Inversion, project: Callable[[], None]
) -> Callable[[], None]:
    """A step of Adam on the signs of the slopes, in place of `point` [B, D]."""
    first, second, taken = torch.zeros_like(point), torch.zeros_like(point), torch.zeros(1, dtype=torch.int64)
    taken = taken.to(point.device)
    rates = torch.tensor([how.lr * 0.1 ** sum(i >= fall * how.steps for fall in FALLS) for i in range(how.steps)])
    times = torch.arange(1, how.steps + 1, dtype=torch.float64)
    rates = (rates / (1 - BETA1**times)).to(point)  # Adam's corrections of its bias
    widths = (1 - BETA2**times).sqrt().to(point)

    def step() -> None:
        sign = slopes()[1].sign()
        first.lerp_(sign, 1 - BETA1)
        second.lerp_(sign.square(), 1 - BETA2)
        rate, width = rates.index_select(0, taken), widths.index_select(0, taken)
        taken.add_(1)
        point.sub_(rate * first / (second.sqrt() / width + EPSILON))
        project()

    return step
