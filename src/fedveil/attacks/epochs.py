"""Records from a FedAvg update of several local steps (Dimitrov et al. 2022, "Data Leakage in Federated Averaging").

The attack simulates the client's training on dummy records, differentiably, from the weights that it was sent, and fits
them until the simulated update is the one that was seen. Which batch held a record is unknown, so
every epoch has dummy records of its own, tied by a prior that does not depend on their order. Where the order is known
up to the names of records, one set of dummy records serves in all epochs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedveil.attacks.inversion import Found, Inversion, Target, Tell, gradient, search
from fedveil.attacks.scores import matching
from fedveil.codecs.fit import cosine
from fedveil.core.seeds import Seed
from fedveil.core.task import Task
from fedveil.train.local import LocalTraining

EPOCHS = Inversion("cosine", steps=1_000, lr=0.1, tv=1e-3)


@dataclass(frozen=True)
class Simulation:
    """What the attack on updates adds to an `Inversion`.

    own_epochs: each epoch has dummy records of its own; otherwise one set serves in all of them
    tie:        the weight of the prior that ties the epochs
    squared:    the weight of the squared distance, in squared norms of the update, beside 1 - cosine
    """

    own_epochs: bool = False
    tie: float = 0.1
    squared: float = 0.0

    def __post_init__(self) -> None:
        if self.tie < 0 or self.squared < 0:
            raise ValueError(f"simulation.tie is {self.tie:g} and squared {self.squared:g}; use 0 or more")


def invert_epochs(
    task: Task,
    target: Target,
    how: Inversion,
    simulation: Simulation,
    seed: Seed,
    *,
    shuffles: Sequence[Seed] | None = None,
    tell: Tell = lambda _: None,
    deadline: float = math.inf,
) -> Found:
    """Fit n records a victim to its update.

    shuffles: the seed from which each victim drew the order of its records, which the public seed gives to the server;
              without it, records are used in their order in every epoch

    The target's labels are in the order of the records' numbers (see `order`), as far as it is known.
    """
    local, n = _steps(target), target.records
    plan = order(local, n, shuffles, len(target.vector)).to(task.device)
    seen, weights = target.vector.to(task.device), target.weights.to(task.device)
    per_epoch = -(-n // local.step_size)
    epochs = -(-plan.shape[1] // per_epoch)

    def distance(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        here = simulate(task, weights[rows], x, y, local, plan[rows])
        away = 1 - cosine(here, seen[rows])
        if simulation.squared:
            away = away + simulation.squared * (here - seen[rows]).square().sum(1) / seen[rows].square().sum(1)
        return away + simulation.tie * apart(x) if simulation.own_epochs and simulation.tie else away

    if not simulation.own_epochs:
        return search(task, target, how, seed, (), distance, tell, deadline)
    found = search(task, target, how, seed, (epochs,), distance, tell, deadline)
    return replace(found, x=torch.stack([joined(own) for own in found.x]))


def order(local: LocalTraining, n: int, shuffles: Sequence[Seed] | None, victims: int) -> Tensor:
    """Which record each step uses: numbers from 0 to n - 1, [V, S, B], where -1 stands for none.

    They are those of `LocalTraining.plan`, with the records of a client numbered in the order in which it holds them.
    """
    size, per_epoch = min(local.step_size, n), -(-n // local.step_size)
    steps = local.steps or local.epochs * per_epoch
    plans = torch.full((victims, -(-steps // per_epoch), per_epoch * size), -1)
    for v, own in enumerate(plans):
        draw = shuffles[v].numpy() if shuffles else None
        for epoch in own:
            epoch[:n] = torch.from_numpy(draw.permutation(n)) if draw else torch.arange(n)
    return plans.view(victims, -1, size)[:, :steps]


def simulate(task: Task, w: Tensor, x: Tensor, y: Tensor, local: LocalTraining, plan: Tensor) -> Tensor:
    """The update w_end - w_start after SGD from `w` [B, d], which can be differentiated by records and labels, [B, d].

    x: [B, n, *input], or [B, epochs, n, *input] with records of each epoch
    y: [B, n], or probabilities [B, n, classes]
    plan: which records a step uses, [B, S, b] (see `order`)
    """
    start = w.detach()
    here = start.clone().requires_grad_()
    several, n = x.ndim > len(task.data.input) + 2, y.shape[1]
    per_epoch = -(-n // local.step_size)
    clients = torch.arange(len(x), device=x.device)[:, None]
    for step in range(plan.shape[1]):
        left = n - (step % per_epoch) * plan.shape[2]
        which = plan[:, step, : min(left, plan.shape[2])]  # the last batch of an epoch is short for all
        records = (x[:, step // per_epoch] if several else x)[clients, which]
        slope = gradient(task, here, records, y[clients, which])
        if local.weight_decay:
            slope = slope + local.weight_decay * here
        here = here - local.lr * slope
    return here - start


def apart(x: Tensor) -> Tensor:
    """How far the epochs of x [B, epochs, n, …] are from holding the same records, [B]: the mean squared distance
    between their mean and their largest records over all pairs of epochs (their order-invariant prior)."""
    records = x.flatten(3)
    told = torch.cat([records.mean(2), records.amax(2)], 2)  # [B, epochs, 2 features]
    return 2 * told.var(1, correction=0).mean(1)  # of all pairs


def joined(x: Tensor) -> Tensor:
    """One set of records from that of each epoch [epochs, n, …]: matched to the first epoch's, and averaged."""
    first = x[0].cpu()
    return torch.stack([own[matching(own.cpu(), first).to(x.device)] for own in x]).mean(0)


def _steps(target: Target) -> LocalTraining:
    """The training that made an update of plain SGD."""
    local = target.local
    if target.means != "update" or local is None:
        raise ValueError("Epochs are simulated for an update; a target that is a gradient goes to invert.")
    if local.optimizer != "sgd" or local.accumulate > 1:
        raise ValueError(
            f"Only plain SGD is simulated, but the clients train by {local.optimizer} "
            f"with local.accumulate = {local.accumulate}."
        )
    return local
