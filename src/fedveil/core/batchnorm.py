"""Batch norm in a federation: what happens to running statistics, and batches that padding does not reach.

federated: clients normalise by their batches, running statistics travel beside the update and are averaged by records
local:     the layers stay with each client, weights and statistics (FedBN, Li et al. 2021)
frozen:    running statistics are constants, in training too
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedveil.core import message
from fedveil.core.layout import Layout
from fedveil.core.message import Record, Refused, Shape

POLICIES = ("federated", "local", "frozen")
SLOT = "batch norm"  # of the server's state or of a client's memory
Statistics = Annotated[Tensor, Shape(("statistics",), low=-1e12, high=1e12)]


@message.kind
class Norms(Record, frozen=True):
    """What batch norm layers hold beside the weights that are averaged."""

    common = ()

    statistics: Statistics


@dataclass(frozen=True, eq=False)
class BatchNorms:
    """What the batch norm layers of a model hold beside the weights that are averaged, as one vector of e numbers.

    policy:  "" where no layer holds anything
    layout:  where each of them lies: the layers' own weights under "local", then running statistics
    trained: how many of the first are weights, which have gradients
    values:  [e], with which the model is evaluated
    """

    policy: str
    layout: Layout
    trained: int
    values: Tensor

    def __len__(self) -> int:
        return self.layout.size

    @property
    def statistics(self) -> list[str]:
        """The names of the running statistics."""
        return [layer.name for layer in self.layout.layers if layer.start >= self.trained]

    def check(self, values: Tensor) -> None:
        """Refuse numbers [e] from outside with a negative variance, of which there is no square root."""
        named = self.layout.split(values)
        if any(float(named[name].min()) < 0 for name in self.statistics if name.endswith("running_var")):
            raise Refused("out of range", "a running variance is negative")

    def places(self, model: nn.Module) -> dict[int, str]:
        """The names of the running statistics by the ids of a model's own tensors."""
        buffers = dict(model.named_buffers())
        return {id(buffers[name]): name for name in self.statistics}

    def split(self, values: Tensor | None = None) -> dict[str, Tensor]:
        """These numbers, or others [e], by name."""
        return self.layout.split(self.values if values is None else values) if len(self) else {}

    def at(self, values: Tensor) -> BatchNorms:
        """The same with other numbers [e]."""
        return replace(self, values=values)


def find(model: nn.Module, trained: Sequence[str], policy: str | None) -> BatchNorms:
    """Decide what happens to a model's batch norm layers. `trained` names the parameters that are trained.

    Without a policy a layer in eval mode, or whose weights are not trained, is frozen, and any other is federated.
    """
    if policy is not None and policy not in POLICIES:
        raise ValueError(f"batch_norm is '{policy}'; use {', '.join(POLICIES[:-1])} or {POLICIES[-1]}")
    layers = {name: each for name, each in model.named_modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)}
    if policy in POLICIES[:2] and not layers:
        raise ValueError(f"batch_norm is '{policy}', but the model has no batch norm layer; leave it out")
    if policy == "frozen":
        layers = {}
    elif policy is None:
        layers = {name: layer for name, layer in layers.items() if layer.training and not _fixed(name, layer, trained)}
    for name, layer in layers.items():
        told = f"layer '{name}' ({type(layer).__name__})"
        if layer.momentum is None:
            raise ValueError(f"{told} has momentum=None, a mean over all batches ever seen; give it a number")
        if isinstance(layer, nn.SyncBatchNorm):
            raise ValueError(f"{told} takes statistics over processes; use nn.BatchNorm1d, 2d or 3d")
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    own = [f"{name}.{part}" for name in layers for part in ("weight", "bias")] if policy == "local" else []
    own = [name for name in own if name in trained]
    names = own + [f"{name}.{part}" for name in layers for part in ("running_mean", "running_var")]
    layout = Layout.of({name: tensors[name] for name in names})
    values = layout.join(tensors).detach().float().clone() if names else torch.empty(0)
    return BatchNorms((policy or "federated") if layers else "", layout, sum(tensors[n].numel() for n in own), values)


def _fixed(name: str, layer: nn.Module, trained: Sequence[str]) -> bool:
    """Whether a layer has weights and none of them is trained."""
    own = [f"{name}.{part}" for part, _ in layer.named_parameters(recurse=False)]
    return bool(own) and not any(each in trained for each in own)


def require_statistics(model: nn.Module) -> None:
    """Refuse batch norm without running statistics: what a record gives would depend on the batch in evaluation too."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is None:
            raise ValueError(
                f"layer '{name}' ({type(layer).__name__}) keeps no running statistics, so that evaluation depends on "
                "the batch; set track_running_stats=True, or replace it with fv.group_norm(model)"
            )


class Batches(TorchFunctionMode):
    """While active, batch norm in training takes the statistics of the records with mask 1, and notes new running ones.

    A batch with one value a channel has no variance: it is normalised by the running statistics, which stay.

    mask:  [B], 1 for a record and 0 for padding
    names: the name of each running mean and variance, by the id of its tensor
    found: the new ones, by name
    """

    def __init__(self, mask: Tensor, names: Mapping[int, str]) -> None:
        super().__init__()
        self._mask, self._names = mask, names
        self.found: dict[str, Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training or id(mean) not in self._names:
            return F.batch_norm(x, mean, var, weight, bias, False, momentum, eps)
        mask = self._mask.to(x.dtype)[:, None].expand(-1, len(x) // len(self._mask)).reshape(-1)
        per = math.prod(x.shape[2:])  # values of a channel in a record
        count = mask.sum() * per
        several, share = count > 1, (mask / mask.sum().clamp(min=1) / per).view(-1, *[1] * (x.dim() - 1))
        shape = (1, -1, *[1] * (x.dim() - 2))

        def average(values: Tensor) -> Tensor:
            return (values * share).sum([0, *range(2, x.dim())])

        own = average(x)
        centred = x - own.view(shape)
        spread = average(centred.square())
        with torch.no_grad():
            unbiased = spread * (count / (count - 1).clamp(min=1))
            for before, new in ((mean, own), (var, unbiased)):
                self.found[self._names[id(before)]] = torch.where(
                    several, before.lerp(new.to(before), momentum), before
                )
        centre, width = torch.where(several, own, mean), torch.where(several, spread, var)
        scale = (width + eps).rsqrt() * (1 if weight is None else weight)
        result = (x - centre.view(shape)) * scale.view(shape)
        return result if bias is None else result + bias.view(shape)


def group_norm(model: nn.Module, groups: int = 32) -> nn.Module:
    """Return a copy of a model with `nn.GroupNorm` in place of each batch norm layer.

    The copy keeps each layer's weight and bias. A layer whose channels `groups` does not divide gets the largest
    number of groups below that does.
    """
    if groups < 1:
        raise ValueError(f"groups is {groups}; it must be at least 1")
    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
            continue
        count = max(g for g in range(1, min(groups, layer.num_features) + 1) if layer.num_features % g == 0)
        norm = nn.GroupNorm(count, layer.num_features, layer.eps, layer.affine)
        if layer.affine:
            norm.weight, norm.bias = layer.weight, layer.bias
        norm.train(layer.training)
        if not name:
            return norm
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, norm)
    return model
