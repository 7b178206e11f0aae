"""A task: a model, a loss, the data and how it is split over clients.

Any `nn.Module` becomes a pure function `f(w, x)` of one flat float32 vector `w` of d numbers.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_map

from fedveil.core import batchnorm, checks
from fedveil.core.batchnorm import Batches
from fedveil.core.capability import WAYS_OUT, failure
from fedveil.core.checks import full_precision, gives_class_scores, trained_names, validate_pure, validate_unmixed
from fedveil.core.data import Data, Rows, Split
from fedveil.core.functional import Pure, call, count_work, first_line, on_cpu
from fedveil.core.layout import Layout
from fedveil.core.losses import Loss, loss_by_name, validate_targets
from fedveil.core.message import Size
from fedveil.core.metrics import (
    ACCURACY,
    LOSS,
    VALIDATION,
    Measure,
    Metric,
    Primary,
    chosen_metrics,
    classified,
    measured,
    validate_metrics,
)
from fedveil.core.modes import Modes
from fedveil.core.noise import Seeded
from fedveil.core.stackable import prepare
from fedveil.core.structure import inputs_of
from fedveil.gpu.graphs import Fused
from fedveil.gpu.products import Products
from fedveil.gpu.separate import LARGE, Separate


class Task:
    """What is learned, and from whose data.

    model: any module; its present weights are the initial ones, and a layer in eval mode stays in eval mode
    data:  a `fedveil.data.Data` (see `fedveil.data.load`, `from_tensors`, `from_dataset`, `from_folder`)
    split: a `fedveil.data.Split`: which records each client holds
    loss:  a name from `LOSSES`, or a function (outputs, y) -> loss of each record [B]
    loss_options: of a loss by name, such as `{"smoothing": 0.1}`
    metrics: names from `METRICS`, functions (outputs, y) -> a number a record [B], objects of torchmetrics, or
             `fv.Metric`; the first is the primary one. By default those that suit the loss
    trainable:  patterns of the names of parameters that are trained, such as "head.*"; by default those that require
                gradients. All others are constants: they are not sent, and a stack of clients shares one copy
    batch_norm: "federated", "local" or "frozen" (see `batchnorm`); by default layers in eval mode or whose weights are
                not trained are frozen, and all others federated
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        split: Split,
        *,
        loss: str | Loss = "cross-entropy",
        loss_options: Mapping[str, Any] | None = None,
        metrics: Sequence[str | Metric | Measure | Loss] = (),
        trainable: Sequence[str] | None = None,
        batch_norm: str | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        checks.validate_types(data, split)
        names = trained_names(model, trainable)
        batchnorm.require_statistics(model)
        self.norms = batchnorm.find(model, names, batch_norm)
        self.device = torch.device(device)
        self.origin: object | None = None  # how it was built, if a recipe built it
        self.data, self.clients = data, split
        self.loss = loss_by_name(loss, loss_options) if isinstance(loss, str) else loss
        validate_targets(self.loss, data)
        inputs = inputs_of(data.structure, model)
        model = checks.copied(model)
        prepare(model)
        probe = Modes.of(on_cpu(model, names), self.norms, notice=True)
        self.noisy = validate_pure(probe, self.norms, data.x[:2], inputs)
        with full_precision():
            validate_unmixed(self.loss, probe.evaluation, data, inputs)
        with torch.no_grad():
            outputs = call(probe.evaluation, data.test_x[:64], inputs)
        self.scores = gives_class_scores(self.loss, outputs[:1], data)
        self.metrics = chosen_metrics(metrics, self.loss, data, self.scores)
        validate_metrics(self.metrics, outputs, data.test_y[: len(outputs)])
        self.work, self.activations = count_work(probe.evaluation, data.x[:2], inputs)
        self.x, self.y = data.x.to(self.device), data.y.to(self.device)
        self.test_x, self.test_y = data.test_x.to(self.device), data.test_y.to(self.device)
        self.validation: tuple[Tensor, Tensor] | None = None
        if data.validation_x is not None and data.validation_y is not None:
            self.validation = data.validation_x.to(self.device), data.validation_y.to(self.device)
        self.model = model.to(self.device)
        parameters = {name: p.requires_grad_() for name, p in self.model.named_parameters() if name in names}
        beside = [layer.name for layer in self.norms.layout.layers]
        self.layout = Layout.of({name: p for name, p in parameters.items() if name not in beside})
        self.initial = self.layout.join(parameters).detach().to(self.device, torch.float32).clone()
        self.norms = self.norms.at(self.norms.values.to(self.device))
        modes, given = Modes.of(self.model, self.norms), [*parameters, *beside]
        self._pure = Pure(modes.evaluation, given, inputs)
        self._in_training = Pure(modes.training, given, inputs)
        self._fused: dict[Hashable, Fused] = {}
        self.steppers: dict[Hashable, Any] = {}  # what takes training steps on a GPU, with its graphs (`train.stepper`)
        self._tried: dict[str, str] = {}
        self.stackable = True
        with full_precision():
            self.stackable = self._try_vmap()

    def __repr__(self) -> str:
        name, clients = type(self.model).__name__, len(self.clients)
        return (
            f"Task({name}, {self.layout.size:,} weights, data {self.data.name!r}, {clients:,} clients, {self.device})"
        )

    @property
    def has_training_mode(self) -> bool:
        """Whether the model works differently in training: it draws random numbers or keeps running statistics."""
        return self.noisy or bool(len(self.norms))

    def at(self, norms: Tensor) -> Task:
        """The same task with other values [e] of its batch norm layers, as training left them."""
        other = copy.copy(self)
        other.norms, other._fused, other.steppers = self.norms.at(norms.to(self.device)), {}, {}
        return other

    def f(self, w: Tensor, x: Tensor) -> Tensor:
        """The model in evaluation, a pure function: weights [d], inputs [B, *input] -> logits [B, K] (or [B, T, K])."""
        return self._pure(self.layout.split(w) | self.norms.split(), x)

    def train_f(self, w: Tensor, statistics: Tensor, x: Tensor, mask: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """The model in training as a pure function.

        Weights, and those that batch norm layers keep to themselves [d + p], running statistics [s], inputs
        [B, *input], mask [B] (0 for padding) and the key of all random numbers [] -> logits as `f` gives them, and new
        running statistics [s].
        """
        w, own = w.tensor_split([self.layout.size])
        given = self.layout.split(w) | self.norms.split(torch.cat([own, statistics]))
        batches = Batches(mask, {id(given[name]): name for name in self.norms.statistics})
        with Seeded(key), batches:
            logits = self._in_training(given, x)
        if not batches.found:
            return logits, statistics
        return logits, self.norms.layout.join(given | batches.found)[self.norms.trained :]

    def by_layer(self, weights: Callable[[str], Tensor], x: Tensor) -> Tensor:
        """`f`, where `weights` gives a layer's weights [*shape] by its name; it is asked when that layer runs."""
        constants = self.norms.split()
        return self._pure.by_layer(lambda name: constants[name] if name in constants else weights(name), x)

    def losses(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The loss of each record, [B]."""
        return self.loss(self.f(w, x), y)

    def stacked_losses(self, w: Tensor, x: Tensor, y: Tensor, key: Tensor | None = None) -> Tensor:
        """The same for C clients with weights of their own: [C, d], [C, B, …], [C, B] -> [C, B].

        With keys [C] random numbers are drawn as in training, where there is no batch norm. Only the model needs to be
        stacked: a loss of each record does not care whose record it is.
        """
        if key is None or not self.noisy or len(self.norms):
            logits = self.stacked(self.f)(w, x)
        else:
            ones = torch.ones(x.shape[:2], device=x.device)
            logits = self.stacked(self.train_f)(w, w.new_empty(len(w), 0), x, ones, key)[0]
        return self.loss(logits.flatten(0, 1), y.flatten(0, 1)).view(y.shape[:2])

    def stacked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` of one client's tensors -> the same of C clients' tensors, stacked. A stack of one needs no vmap,
        and a model that vmap cannot take is called once a client."""

        def over(*tensors: Tensor) -> Any:
            if len(tensors[0]) == 1:
                return tree_map(lambda t: t[None], function(*(t[0] for t in tensors)))
            if not self.stackable:
                each = [function(*own) for own in zip(*tensors, strict=True)]
                return tree_map(lambda *own: torch.stack(own), *each)
            with Products() if tensors[0].is_cuda else nullcontext():
                return vmap(function)(*tensors)

        return over

    def gradient(
        self,
        w: Tensor,
        x: Tensor,
        y: Tensor,
        mask: Tensor,
        key: Tensor | None = None,
        *,
        precision: str = "float32",
    ) -> tuple[Tensor, Tensor]:
        """Each client's gradient of its mean loss, [C, d], and that loss, [C].

        `mask` [C, B] is 1 for a record and 0 for padding, so a client with fewer records has the right mean; a client
        with none has gradient 0. With keys [C] random numbers are drawn as in training. With `precision` "bfloat16"
        layers compute under autocast; gradients are float32.
        """
        w = w.detach().requires_grad_()
        with self.autocast(precision), self._separate(len(w)):
            losses = self.stacked_losses(w, x, y, key)
        mean = (losses * mask).sum(1) / mask.sum(1).clamp(min=1)
        (gradient,) = torch.autograd.grad(mean.sum(), w)
        return gradient, mean.detach()

    def train_gradient(
        self,
        w: Tensor,
        statistics: Tensor,
        x: Tensor,
        y: Tensor,
        mask: Tensor,
        key: Tensor,
        *,
        precision: str = "float32",
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same in training (see `train_f`): gradient [C, d + p], loss [C] and new running statistics [C, s]."""
        w = w.detach().requires_grad_()
        with self.autocast(precision), self._separate(len(w)):
            logits, statistics = self.stacked(self.train_f)(w, statistics, x, mask, key)
            losses = self.loss(logits.flatten(0, 1), y.flatten(0, 1)).view(y.shape[:2])
        mean = (losses * mask).sum(1) / mask.sum(1).clamp(min=1)
        (gradient,) = torch.autograd.grad(mean.sum(), w)
        return gradient, mean.detach(), statistics.detach()

    def _separate(self, clients: int) -> AbstractContextManager[object]:
        """Convolve one client after another, where that is faster and the gradient is not differentiated again."""
        return Separate() if clients > 1 and self.work >= LARGE and self.device.type == "cpu" else nullcontext()

    @property
    def fast_gradient(self) -> Fused:
        """`gradient`, compiled where that is asked for: for steps that are taken so often that it pays."""
        return self.fused("gradient", self.gradient)

    def autocast(self, precision: str) -> AbstractContextManager[object]:
        """Layers in fewer bits; a cache of the weights in these bits would outlive a CUDA graph."""
        if precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, precision), cache_enabled=False)

    def fused(self, name: str, function: Callable[..., tuple[Tensor, ...]], *settings: Hashable) -> Fused:
        """What is to be compiled of this task's work, by name and settings, so that it is compiled once."""
        return self._fused.setdefault((name, *settings), Fused(name, function))

    @property
    def primary(self) -> Primary:
        """The metric that `target` and early stopping look at: the first one, or the loss."""
        return self.metrics[0].primary if self.metrics else LOSS

    @torch.no_grad()
    def evaluate(self, w: Tensor) -> dict[str, float]:
        """The mean loss and the metrics on the test records and, under names that begin with `validation_`, on the
        validation records."""

        def outputs(x: Tensor) -> Tensor:
            return self.f(w, x)

        found = measured(outputs, self.loss, self.metrics, self.test_x, self.test_y, self.data.padding)
        if self.validation:
            held = measured(outputs, self.loss, self.metrics, *self.validation, self.data.padding)
            found |= {f"{VALIDATION}{name}": value for name, value in held.items()}
        return found

    def classified(self, w: Tensor) -> Tensor | None:
        """Which test records get the highest score for their label, as bool [n].

        None where accuracy is not the primary metric, a record has several labels, or batch norm layers stay with the
        clients.
        """
        if self.primary != ACCURACY or not self.scores or self.test_y.ndim != 1 or self.norms.policy == "local":
            return None
        return classified(lambda x: self.f(w, x), self.test_x, self.test_y, self.data.padding)

    def rows(self, clients: Sequence[int]) -> Rows:
        """The records of some clients, as indices into `x` and `y`."""
        return Rows([self.clients[k] for k in clients])

    @cached_property
    def largest(self) -> int:
        """The most records any client may have: the public maximum by which client weights are bounded."""
        return self.clients.largest

    @cached_property
    def sizes(self) -> dict[str, Size]:
        """What the dimension names of a message stand for in this task."""
        sizes: dict[str, Size] = {
            "weights": self.layout.size,
            "layers": len(self.layout.layers),
            "input": self.data.input,
            "classes": self.data.classes,
            "records": self.largest,
        }
        return sizes | {"statistics": len(self.norms)} if len(self.norms) else sizes

    def require(self, operation: str, who: str) -> None:
        """Try what a method needs of the model (see `WAYS_OUT`), once. A ValueError says what fails and the way out."""
        if reason := self._failure(operation):
            raise ValueError(f"{who} needs {operation}, and this model fails there ({reason}); {WAYS_OUT[operation]}")

    def _failure(self, operation: str) -> str:
        """Why an operation fails on two clients with two records each; nothing where it works."""
        if operation not in self._tried:
            self._tried[operation] = failure(operation, self, *self._two_clients())
        return self._tried[operation]

    def _two_clients(self) -> tuple[Tensor, Tensor, Tensor]:
        """The initial weights [2, d] and two records, x [2, 2, …] and y [2, 2, …], in either order."""
        rows = torch.tensor([[0, -1], [-1, 0]], device=self.device)
        return self.initial.expand(2, -1), self.x[rows], self.y[rows]

    def _try_vmap(self) -> bool:
        """Whether clients can be stacked: one of two records and one of a single record, which is padded."""
        w, x, y = self._two_clients()
        mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]], device=self.device)
        keys = torch.arange(2, device=self.device)
        own, statistics = self.norms.values.expand(2, -1).tensor_split([self.norms.trained], 1)

        def gradient(k: slice, held: slice = slice(None)) -> Tensor:
            batch = x[k, held], y[k, held], mask[k, held]
            if self.has_training_mode:
                v = torch.cat([w[k], own[k]], 1)
                return torch.cat(self.train_gradient(v, statistics[k], *batch, keys[k])[::2], 1)
            return self.gradient(w[k], *batch)[0]

        try:
            together = gradient(slice(2))
        except Exception as error:  # whatever a layer may say
            reason = first_line(error)
        else:
            alone = torch.cat([gradient(slice(0, 1), slice(2)), gradient(slice(1, 2), slice(1))])
            if checks.same_gradients(together, alone):
                return True
            checks.validate_padding(gradient(slice(1, 2)), alone[1:])
            reason = "its gradients differ in a stack"
        warnings.warn(f"this model cannot be stacked and trains one client at a time: {reason}", stacklevel=3)
        return False
