"""Membership inference by shadow models: LiRA, the online likelihood ratio attack (Carlini et al. 2022, algorithm 1).

The adversary knows the recipe and every record of a pool of members and others, but not which of them are members. This
is the worst case. It trains shadow models, each on a random half of the pool. They show for each record how confident a
model is that was trained on it, and how confident one is that was not. The score of a record is how much likelier the
confidence of the attacked model is among the first than among the second.

Shadow models are trained in one place, by the minibatches of the clients, for as many epochs as members were trained on
in the run. They have neither its averaging nor its noise. The attack is therefore weaker where these matter much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedveil.core.data import Split
from fedveil.core.ledger import Row
from fedveil.core.message import Slots
from fedveil.core.method import Method
from fedveil.core.seeds import Seed
from fedveil.core.stack import ClientStack, at_once
from fedveil.core.task import Task
from fedveil.train.local import LocalTraining

MODELS = 16
FAR = 1e4  # a confidence beyond which there is none; that of a model that diverged is infinite
SURE = 1e-12  # the least loss of a record, so that its confidence is finite

Records = tuple[Tensor, Tensor]  # x [n, *input] and y [n, ...]
Floats = npt.NDArray[np.float64]
Score = Callable[[Task, Tensor, Tensor, Tensor], Tensor]  # weights [d], x, y of B records -> [B]: high is a member
Scores = Callable[[Task, Score, Tensor, Tensor, Tensor], Floats]  # the same of any number of records -> [n]


def validate(models: int) -> None:
    """Raise a ValueError if there cannot be so many shadow models."""
    if models and (models < 4 or models % 2):
        raise ValueError(f"there are {models} shadow models; use an even number from 4 on, or 0 to leave LiRA out")


def training(method: Method, rows: Sequence[Row], task: Task, clients: Sequence[int]) -> LocalTraining:
    """How to train a shadow model of a run: as its clients train, for as many epochs as they saw their records.

    clients: those that took part in `rows`
    """
    own = getattr(method, "local", None)
    local = own if isinstance(own, LocalTraining) else LocalTraining()
    answers = sum(str(k) not in row.missing for row in rows for k in row.cohort)
    records = float(np.mean(task.rows(clients).counts))
    epochs = local.steps * local.step_size / records if local.steps else local.epochs
    total = max(1, round(epochs * answers / len(clients)))
    return LocalTraining(
        optimizer=local.optimizer,
        lr=local.lr,
        epochs=total,
        batch=local.batch,
        momentum=local.momentum,
        beta2=local.beta2,
        weight_decay=local.weight_decay,
        accumulate=local.accumulate,
        precision=local.precision,
    )


def confidence(task: Task, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The logit of the probability p that a model gives the right answer, log(p / (1 - p)), [B]: nearly Gaussian over
    models, where p itself is not (Carlini et al. 2022, section VI-A). Where there are no classes p is e^-loss."""
    if task.scores and task.data.labelled:
        logits = task.f(w, x)
        right = y[:, None]
        others = logits.scatter(1, right, -torch.inf).logsumexp(1)
        return logits.gather(1, right)[:, 0] - others
    losses = task.losses(w, x, y).double().clamp(min=SURE)
    return -losses - (-torch.expm1(-losses)).log()


def halves(records: int, models: int, seed: Seed) -> npt.NDArray[np.bool_]:
    """Which records each model is trained on, [models, records]: a random half, and the other half for the next model.
    Each record is in half of the models."""
    rng, included = seed.numpy(), np.zeros((models, records), np.bool_)
    for first in range(0, models, 2):
        included[first, rng.permutation(records)[: records // 2]] = True
        included[first + 1] = ~included[first]
    return included


def train(
    task: Task, pool: Records, included: npt.NDArray[np.bool_], local: LocalTraining, seed: Seed
) -> list[tuple[Task, Tensor]]:
    """Train a model on each half of a pool, all of them as one stack. Returns, for each, the task with its batch norm
    statistics, and its weights [d]."""
    held = [np.flatnonzero(own) for own in included]
    split = Split(np.concatenate(held), np.cumsum([0, *map(len, held)]), "shadows")
    shadows = task.at(task.norms.values)  # a copy without compiled steps, which read the records of the task
    shadows.x, shadows.y, shadows.clients = *pool, split
    found = []
    for first in range(0, len(held), size := at_once(task)):
        clients = tuple(range(first, min(first + size, len(held))))
        memory, notes = [Slots() for _ in clients], [dict[str, object]() for _ in clients]
        stack = ClientStack(shadows, clients, 1, seed, seed.child("secret"), memory, notes)
        weights, _ = local.train(stack, task.initial)
        assert stack.norms is not None
        found += [(task.at(norms), w) for norms, w in zip(stack.norms.clone(), weights.clone(), strict=True)]
    return found


def likelihood_ratio(target: Floats, shadows: Floats, included: npt.NDArray[np.bool_]) -> Floats:
    """log N(φ; μ_in, σ_in²) - log N(φ; μ_out, σ_out²) of each record, [n].

    target:   φ, the model's confidence in each record [n]
    shadows:  that of each shadow model [S, n], which was trained on the records that are `included` [S, n]

    Records share their variances, as Carlini et al. have it for few models (section VI-C). A variance for each record
    was worse on FedAvg runs even with 64 models, because the attacked model is no draw from the shadow models.

    The target's confidences are first moved so that their mean over the pool is that of the shadow models: an average
    over clients is less confident than a model that was trained in one place.
    """
    moved = target - target.mean() + shadows.mean()

    def density(among: npt.NDArray[np.bool_]) -> Floats:
        count = among.sum(0)
        mean = (shadows * among).sum(0) / count
        variance = max(float((np.square(shadows - mean) * among).sum() / (count - 1).sum()), 1e-12)
        result: Floats = -np.square(moved - mean) / (2 * variance) - np.log(variance) / 2
        return result

    return density(included) - density(~included)


def lira(
    task: Task,
    w: Tensor,
    members: Records,
    others: Records,
    local: LocalTraining,
    seed: Seed,
    scores: Scores,
    models: int = MODELS,
) -> tuple[Floats, Floats]:
    """The scores of members [m] and of others [n] by `models` shadow models, which see them as one pool.

    scores: evaluates `confidence` on any number of records
    """
    validate(models)
    pool = torch.cat([members[0], others[0]]), torch.cat([members[1], others[1]])
    included = halves(len(pool[0]), models, seed.child("halves"))
    trained = train(task, pool, included, local, seed.child("training"))
    everyone = [*trained, (task, w)]
    *shadows, target = (scores(own, confidence, weights, *pool).clip(-FAR, FAR) for own, weights in everyone)
    ratio = likelihood_ratio(target, np.stack(shadows), included)
    return ratio[: len(members[0])], ratio[len(members[0]) :]
