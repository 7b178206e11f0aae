"""A malicious server that plants weights: Robbing the Fed (Fowl et al. 2022).

This is an attack. It measures how much your own clients expose to a server that lies about the weights, and has no
other use. No method or recipe plants weights; only a caller of this module does.

The first linear layer becomes an imprint module. All its rows are one measurement h, and its biases are minus the
quantiles c_1 < … < c_M of h·x, so that ReLU lets a record through to the rows whose quantile it exceeds. The layer
after it gives a record the same slope δ in all of these rows. The gradients of two adjacent rows therefore differ by
the records between their quantiles, and a record that is alone there is
(∂L/∂W_i - ∂L/∂W_{i+1}) / (∂L/∂b_i - ∂L/∂b_{i+1}).

An update of one plain step is a multiple of the gradient and serves as well. So does the sum of many clients' updates:
a secure sum does not stop this attack, it only fills the bins. Each further local step moves the quantiles and spoils
more records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist

import torch
from msgspec.structs import replace as changed
from torch import Tensor, nn

from fedveil.attacks.images import closest
from fedveil.core.cohort import Engine
from fedveil.core.ledger import Row
from fedveil.core.loop import Federation
from fedveil.core.sampling import CohortSampler
from fedveil.core.seeds import Seed
from fedveil.core.task import Task
from fedveil.engines.local import LocalEngine
from fedveil.methods.averaging import Averaging
from fedveil.train.optimizers import ServerOptimizer

LOWEST = 8.0  # deviations below the mean at which the first bin begins, so that every record is in one
SWAY = 0.1  # the most that the imprint adds to an output, so that softmax stays where it is
SILENT = 1e-4  # a bin with a smaller share of the largest slope is empty
EXACT = 1e-4  # of the data's variance: the mean squared error below which a record counts as recovered


@dataclass(frozen=True)
class Imprint:
    """Where the imprint module lies: names of parameters in the task's layout.

    rows, biases: of the linear layer that is first; behind: weights of the linear layer after its ReLU
    """

    rows: str
    biases: str
    behind: str


def imprint(task: Task) -> Imprint:
    """Find the layers of a model that begins with (Flatten,) Linear, ReLU, Linear."""
    steps = [(name, step) for name, step in _steps(task.model) if not isinstance(step, (nn.Flatten, nn.Identity))][:3]
    kinds, known = [type(step) for _, step in steps], {layer.name for layer in task.layout.layers}
    if kinds == [nn.Linear, nn.ReLU, nn.Linear]:
        (first, _), _, (behind, _) = steps
        found = Imprint(f"{first}.weight", f"{first}.bias", f"{behind}.weight")
        if {found.rows, found.biases, found.behind} <= known:
            return found
    told = ", ".join(kind.__name__ for kind in kinds)
    raise ValueError(
        "planting needs an nn.Sequential that begins with Flatten, Linear with a bias, ReLU and Linear, all trained, "
        f"and this model begins with {told}; give such a model or use `imprinted`"
    )


def _steps(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that run one after the other, by name: those of an nn.Sequential, however nested."""
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        for key, child in module.named_children():
            yield from _steps(child, f"{name}.{key}" if name else key)
    else:
        yield name, module


def imprinted(model: nn.Module, shape: tuple[int, ...], bins: int) -> nn.Sequential:
    """Return the model behind an imprint module, as a server that also chooses the model would send it.

    shape: of a record; it leaves the module in the same shape
    """
    inputs = torch.Size(shape).numel()
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, bins), nn.ReLU(), nn.Linear(bins, inputs), nn.Unflatten(1, shape), model
    )


def plant(task: Task, w: Tensor, pool: Tensor, seed: Seed) -> Tensor:
    """Return weights [d] that are `w` with an imprint module; it has as many bins as the first layer has rows.

    pool: records of the attacker's own, [n, *input], from which it takes the mean and deviation of the measurement,
          taken for Gaussian
    seed: of h, a random direction. The paper takes the mean brightness, in which pictures of few grey levels coincide.
    """
    names, parts = imprint(task), {name: part.clone() for name, part in task.layout.split(w).items()}
    bins, inputs = parts[names.rows].shape
    h = torch.randn(inputs, generator=seed.torch()).to(pool) / inputs
    measured = pool.flatten(1) @ h
    if len(pool) < 2 or float(measured.std()) <= 1e-6 * float(measured.abs().max()):  # equal but for rounding
        raise ValueError(f"the pool's {len(pool)} records measure alike, which tells no quantiles; give more records")
    normal = NormalDist(float(measured.mean()), float(measured.std()))
    edges = [normal.mean - LOWEST * normal.stdev, *(normal.inv_cdf(i / bins) for i in range(1, bins))]
    # The slopes do not depend on the length of h: a small one keeps the outputs, and with them the slopes, alike.
    length = SWAY / (2 * LOWEST * normal.stdev * bins)
    parts[names.rows].copy_(h.to(w) * length)
    parts[names.biases].copy_(-torch.tensor(edges) * length)
    signs = 1 - 2 * (torch.arange(len(parts[names.behind])) % 2)  # no class has the mean of all as its sign
    parts[names.behind].copy_(signs[:, None])
    return task.layout.join(parts)


def read(task: Task, w: Tensor, vector: Tensor) -> Tensor:
    """Return the records that a gradient [d] at planted weights `w` [d], or a multiple of it, gives away, [R, *input].

    A bin whose quotient would not itself fall into the bin holds several records and is left out. Others that hold
    several give a mixture of them.
    """
    names, planted, parts = imprint(task), task.layout.split(w.double()), task.layout.split(vector.double())

    def adjacent(rows: Tensor) -> Tensor:
        return rows - torch.cat([rows[1:], torch.zeros_like(rows[:1])])

    slopes, sums = adjacent(parts[names.biases]), adjacent(parts[names.rows])
    filled = slopes.abs() > SILENT * slopes.abs().max()
    records = sums[filled] / slopes[filled, None]
    edges = -planted[names.biases]
    slack = SILENT * (edges[-1] - edges[0])
    above = torch.cat([edges[1:], edges.new_full((1,), torch.inf)])
    measured = records @ planted[names.rows][0]
    within = (measured > edges[filled] - slack) & (measured < above[filled] + slack)
    return records[within].view(-1, *task.data.input).float()


def rob(
    task: Task,
    method: Averaging,
    w: Tensor,
    sampler: CohortSampler,
    seed: Seed,
    engine: Engine | None = None,
    number: int = 1,
) -> tuple[Tensor, Row]:
    """Play round `number` of a run as a malicious server: ask with weights `w` [d], and return what clients gave away.

    That is the mean update [d] as the method learns it, from one client, several, or a secure sum; zeros if the round
    failed. The ledger's row says what became of it.
    """
    greedy = replace(method, server=ServerOptimizer())  # its step is the mean update
    state = changed(greedy.init_state(task), weights=w)
    after, row = Federation(task, greedy, engine or LocalEngine(), sampler, seed).step(state, number, number)
    return after.weights - state.weights, row


# ---------------------------------------------------------------------------------------------------- the scorer


def recovered(found: Tensor, records: Tensor) -> Tensor:
    """Tell which of `records` [n, *input] are among those `found` [R, *input], bool [n].

    A record is, if the mean squared error of the nearest is below `EXACT` of the variance of all records' entries.
    """
    if not len(found):
        return torch.zeros(len(records), dtype=torch.bool, device=records.device)
    error = closest(records, found)[1].square() / records[0].numel()
    return error < EXACT * records.var()


def expected(records: int, bins: int) -> float:
    """The share of records that are alone in a bin, if so many fall into equally likely bins independently.

    Under a secure sum `records` is the number of all clients together: the sum fills the bins, and no more.
    """
    return (1 - 1 / bins) ** (records - 1)
