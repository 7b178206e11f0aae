"""Membership inference: who was trained on, told from the finished weights.

Members are records of clients that took part. Others are validation records where a recipe holds some out of the
training records, so that both come from one distribution; elsewhere they are test records. Each side has as many of
each class, so that an attack cannot tell them by their classes. An attack is a function that scores records, entered in
`ATTACKS`; LiRA, which trains models of its own, is in `attacks.shadow`. `audit.json` of a run folder is an `Audit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from fedveil.attacks.roc import Figures, Roc
from fedveil.attacks.shadow import Records, Score, lira
from fedveil.core.ledger import Row
from fedveil.core.metrics import EVALUATION_BATCH
from fedveil.core.seeds import Seed
from fedveil.core.task import Task
from fedveil.privacy.dpsgd import HELD
from fedveil.train.local import LocalTraining

Tell = Callable[[str], object]

LEARNT = 64  # records that the control learns by heart
CONTROL_STEPS = 500
BY_HEART = 0.05  # the mean loss at which they are
SUCCESS = 0.8  # the AUC that the control must reach


# ---------------------------------------------------------------------------------------------------- the attacks


def loss(task: Task, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Black box: what was trained on is predicted well (Yeom et al. 2018)."""
    return -task.losses(w, x, y)


def calibrated(task: Task, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The same against how hard a record is: what was trained on got better since the initial weights."""
    return task.losses(task.initial, x, y) - task.losses(w, x, y)


def gradient(task: Task, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """White box: what was trained on has a small gradient (Nasr et al. 2019)."""

    def norm(x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = torch.linalg.vector_norm(grad(lambda w: task.losses(w, x[None], y[None])[0])(w))
        return found

    if not task.stackable:
        return -torch.stack([norm(*record) for record in zip(x, y, strict=True)])
    return -vmap(norm)(x, y)


ATTACKS: dict[str, Score] = {"loss": loss, "calibrated": calibrated, "gradient": gradient}


@torch.no_grad()
def scores(task: Task, attack: Score, w: Tensor, x: Tensor, y: Tensor, tell: Tell = lambda _: None) -> np.ndarray:
    """An attack's scores of any number of records, [n]."""
    at_once = max(1, min(EVALUATION_BATCH, HELD[task.device.type] // task.layout.size))
    found: list[Tensor] = []
    for part in zip(x.split(at_once), y.split(at_once), strict=True):
        tell(f"attack on record {len(found) * at_once}/{len(x)}")
        found.append(attack(task, w, *part))
    # A loss that is no number says as little as the worst one.
    return torch.cat(found).double().nan_to_num(nan=-1e300, neginf=-1e300, posinf=1e300).cpu().numpy()


# ---------------------------------------------------------------------------------------------------- the records


def took_part(rows: Sequence[Row]) -> list[int]:
    """Clients of which at least one round used an answer."""
    return sorted({k for row in rows for k in row.cohort if str(k) not in row.missing})


def outsiders(task: Task, kind: str) -> Records:
    """The "validation" or the "test" records, on which nothing was trained: x [n, *input] and y [n, ...]."""
    if kind == "test":
        return task.test_x, task.test_y
    if task.validation is None:
        raise ValueError(
            f"{task.data.name!r} has no validation records to compare members with; set task.validation, or use test"
        )
    return task.validation


def matched(
    task: Task, clients: Sequence[int], seed: Seed, max_records: int, kind: str = "test"
) -> tuple[Tensor, Tensor]:
    """Members' indices into the training records and others' into those of that kind (see `outsiders`), each [n] in an
    order of its own.

    Of each class there are as many as both sides have, scaled down alike to at most `max_records` in all. Records
    without a label of their own (several labels, real targets, bits) count as one class.
    """
    rng = seed.numpy()
    held = np.concatenate(task.rows(clients).indices)
    _, theirs = outsiders(task, kind)
    sides = [rng.permutation(held), rng.permutation(len(theirs))]
    labels = [task.data.y.numpy(), theirs.cpu().numpy()]
    classes = [y[own] if task.data.labelled else np.zeros(len(own), int) for own, y in zip(sides, labels, strict=True)]
    counts = np.minimum(*(np.bincount(c, minlength=task.data.classes) for c in classes))
    counts = (counts * min(1.0, max_records / max(1, counts.sum()))).astype(int)
    if counts.sum() < 4:
        raise ValueError(
            f"only {counts.sum()} {kind} records are of classes that clients hold, too few to compare with; give more"
        )
    chosen = []
    for own, of in zip(sides, classes, strict=True):
        rows = np.concatenate([own[of == c][:count] for c, count in enumerate(counts)])
        chosen.append(torch.from_numpy(rng.permutation(rows)).to(task.device))
    return chosen[0], chosen[1]


def by_heart(task: Task, x: Tensor, y: Tensor, tell: Tell = lambda _: None) -> Tensor:
    """Weights [d] that learnt some records by heart: Adam on all of them at once, from the initial weights."""
    w = task.initial.clone().requires_grad_()
    adam = torch.optim.Adam([w], lr=0.01)
    for step in range(CONTROL_STEPS):
        tell(f"control: learning records by heart  step {step}/{CONTROL_STEPS}")
        mean = task.losses(w, x, y).mean()
        if float(mean.detach()) < BY_HEART:
            break
        (w.grad,) = torch.autograd.grad(mean, w)
        adam.step()
    return w.detach()


# ---------------------------------------------------------------------------------------------------- all of it


@dataclass(frozen=True)
class Reached:
    """What `attack` finds, as `Audit` names it: how many records a side, the attacks, the control and the baseline."""

    records: int
    attacks: dict[str, Figures]
    control: Figures
    baseline: Figures


def attack(
    task: Task,
    w: Tensor,
    clients: Sequence[int],
    seed: Seed,
    delta: float,
    max_records: int,
    tell: Tell,
    *,
    kind: str = "test",
    local: LocalTraining | None = None,
    shadows: int = 0,
) -> Reached:
    """Run all the attacks on weights `w` [d].

    kind:    the records that are no members (see `outsiders`)
    local:   how each shadow model is trained (see `shadow.training`)
    shadows: how many shadow models there are; 0: no LiRA
    """
    members, others = matched(task, clients, seed.child("records"), max_records, kind)
    x, y = outsiders(task, kind)
    sides = (task.x[members], task.y[members]), (x[others], y[others])

    def told(attack: Score, w: Tensor, *sides: Records) -> Figures:
        return Roc(*(scores(task, attack, w, *side, tell) for side in sides)).figures(delta)

    found = {name: told(each, w, *sides) for name, each in ATTACKS.items()}
    if shadows and local:
        tell(f"training {shadows} shadow models")
        found["lira"] = Roc(*lira(task, w, *sides, local, seed.child("shadows"), scores, shadows)).figures(delta)
    # With labels that belong to other records, nothing but memory helps.
    few = [(x[:LEARNT], y[:LEARNT].roll(len(y[:LEARNT]) // 2, 0)) for x, y in sides]
    control = told(loss, by_heart(task, *few[0], tell), *few)
    return Reached(len(members), found, control, told(loss, task.initial, *sides))
