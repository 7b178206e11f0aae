"""What a method may need of a model, and what to do about a model that cannot do it."""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import torch
from torch import Tensor

from fedveil.core.data import Data
from fedveil.core.functional import first_line

GRADIENTS = "gradients"
RECORD_GRADIENTS = "a gradient of each record"
SECOND_DERIVATIVES = "second derivatives"
SOFT_LABELS = "a score of each class"
FORWARD_PASSES = "forward passes without gradients"
WAYS_OUT = {  # what a method may need of a model, and what to do about a model that cannot do it
    GRADIENTS: "use layers that can be differentiated, without checkpointing and sparse gradients, or the method "
    "baffle",
    RECORD_GRADIENTS: "replace the layer that fails, or leave method.privacy out",
    SECOND_DERIVATIVES: "replace the layer that fails (attention has them under torch.nn.attention.sdpa_kernel with "
    "SDPBackend.MATH), or use fedavg with a codec such as qsgd or top-k",
    SOFT_LABELS: "give the model one output a class, or use fedavg with a codec such as qsgd or top-k",
    FORWARD_PASSES: "replace the layer that fails, or use fedavg",
}


class Trained(Protocol):
    """What is tried of a task."""

    data: Data

    def f(self, w: Tensor, x: Tensor) -> Tensor: ...

    def stacked_losses(self, w: Tensor, x: Tensor, y: Tensor, key: Tensor | None = None) -> Tensor: ...

    def gradient(
        self, w: Tensor, x: Tensor, y: Tensor, mask: Tensor, key: Tensor | None = None, *, precision: str = ...
    ) -> Any: ...


def failure(operation: str, task: Trained, w: Tensor, x: Tensor, y: Tensor) -> str:
    """Why an operation fails on two clients with two records each; empty where it works.

    Weights [2, d], records [2, 2, …] and labels [2, 2, …].
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _try(operation, task, w, x, y)
    except Exception as error:  # whatever a layer may say
        return first_line(error)
    return ""


def _try(operation: str, task: Trained, w: Tensor, x: Tensor, y: Tensor) -> None:
    ones = torch.ones(2, 2, device=w.device)
    if operation == GRADIENTS:
        task.gradient(w[:1], x[:1], y[:1], ones[:1])
    elif operation == RECORD_GRADIENTS:
        task.gradient(w, x[:, :1], y[:, :1], ones[:, :1])
    elif operation == SECOND_DERIVATIVES:
        w, x = w.clone().requires_grad_(), x.clone().requires_grad_(x.is_floating_point())
        (slope,) = torch.autograd.grad(task.stacked_losses(w, x, y).sum(), w, create_graph=True)
        by = [t for t in (w, x) if t.requires_grad]
        torch.autograd.grad(slope.square().sum(), by, allow_unused=True)
    elif operation == SOFT_LABELS:
        found = list(task.f(w[0], x[0]).shape[1:])
        if found != [task.data.classes]:
            raise ValueError(f"its outputs have shape {found} a record, and there are {task.data.classes} classes")
    else:
        with torch.no_grad():
            task.stacked_losses(w, x, y)
