"""Exact recovery from a linear layer with a bias: a row of its weights' gradient over the entry of its bias' gradient.

For one record with input h and the layer's outputs z, ∂L/∂W = (∂L/∂z) hᵀ and ∂L/∂b = ∂L/∂z, so that each row of the
first over the same entry of the second is h (Phong et al. 2018; Geiping et al. 2020, proposition 3.1). In a
batch this holds for the rows of neurons that one record alone activates; two such rows of one record agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil.core.functional import call, clone
from fedveil.core.seeds import Seed
from fedveil.core.structure import inputs_of
from fedveil.core.task import Task

QUIET = 1e-6  # of the largest entry of a bias' gradient: neurons below it are not looked at
AGREE = 1e-3  # relative distance of two rows that tell of one record


@dataclass(frozen=True)
class Recovered:
    """What a linear layer gives away.

    layer:   its name
    records: whether it is fed by the records themselves; if not, x holds its inputs, the features of the records
    x:       [V, n, *input] or [V, n, features]; where nothing more was found, a weighted mean of the batch
    sure:    whether at least two neurons agree, or the batch has one record, [V, n]
    """

    layer: str
    records: bool
    x: Tensor
    sure: Tensor


def find(task: Task) -> tuple[str, bool] | None:
    """The first linear layer with a bias that takes a record as it is, or flattened, and True; otherwise the first one
    behind other layers, and False; None where a model has none that is trained.

    The model runs on random records, never on those of the task.
    """
    x = torch.randn(2, *task.data.input, generator=Seed.root(0).torch()).to(task.device)
    if not task.data.x.is_floating_point():
        x = torch.zeros_like(x, dtype=task.data.x.dtype)
    trained, model = {layer.name for layer in task.layout.layers}, clone(task.model)
    fed: list[tuple[str, bool]] = []

    def note(name: str, given: Tensor) -> None:
        whole = given.shape[:1] == x.shape[:1] and torch.equal(given.flatten(1), x.flatten(1))
        fed.append((name, whole and x.is_floating_point()))

    for name, layer in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(layer, nn.Linear) and {f"{prefix}weight", f"{prefix}bias"} <= trained:
            layer.register_forward_pre_hook(lambda _, args, name=name: note(name, args[0]))
    with torch.no_grad():
        call(model.eval(), x, inputs_of(task.data.structure, task.model))
    return next((each for each in fed if each[1]), fed[0] if fed else None)


def lacking(task: Task) -> str | None:
    """One sentence on why records cannot be read off this model; None where they can."""
    found = find(task)
    if found is None:
        return "The model has no trained linear layer with a bias, so nothing can be read off one."
    if not found[1]:
        return f"The model's first linear layer, {found[0]!r}, is fed by features, so only these can be read off it."
    return None


def recover(task: Task, vector: Tensor, records: int) -> Recovered:
    """Read the inputs of the first linear layer off gradients, or updates of one step, [V, d], of `records` each.

    Any factor on the vector cancels out. A model without such a layer is a ValueError.
    """
    found = find(task)
    if found is None:
        raise ValueError(lacking(task))
    name, whole = found
    parts, prefix = task.layout.split(vector.detach()), f"{name}." if name else ""
    weights, biases = parts[f"{prefix}weight"], parts[f"{prefix}bias"]  # [V, m, features], [V, m]
    each = [_rows(w.double(), b.double(), records) for w, b in zip(weights, biases, strict=True)]
    x, sure = torch.stack([x for x, _ in each]).to(vector.dtype), torch.stack([sure for _, sure in each])
    return Recovered(name, whole, x.unflatten(2, task.data.input) if whole else x, sure)


def _rows(weight: Tensor, bias: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Inputs [n, features] and whether they are sure [n], of one victim's ∂W [m, features] and ∂b [m]."""
    mean = _fitted(weight, bias)
    x, sure = mean.repeat(n, 1), torch.zeros(n, dtype=torch.bool, device=bias.device)
    if n == 1:
        return x, ~sure if bool(bias.any()) else sure
    loud = bias.abs() > QUIET * bias.abs().max()
    weight, bias = weight[loud], bias[loud]
    rows = weight / bias[:, None]
    sizes = torch.linalg.vector_norm(rows, dim=1)
    left = torch.ones(len(rows), dtype=torch.bool, device=bias.device)
    apart = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    alike = apart <= AGREE * torch.maximum(sizes[:, None], sizes).clamp(min=1e-12)  # [m, m]
    for i in range(n):
        agreeing = (alike & left).sum(1) * left
        if not len(agreeing) or int(agreeing.max()) < 2:
            break
        group = alike[agreeing.argmax()] & left
        x[i], sure[i] = _fitted(weight[group], bias[group]), True
        left &= ~group
    return x, sure


def _fitted(weight: Tensor, bias: Tensor) -> Tensor:
    """The h for which ∂b hᵀ is nearest to ∂W, [features]: the mean of the rows' ratios, weighted by ∂b²."""
    return (bias @ weight) / bias.square().sum().clamp(min=torch.finfo(bias.dtype).tiny)
