"""A task: a model, a loss, the data and how it is split over clients.

Any `nn.Module` becomes a pure function `f(w, x)` of one flat float32 vector `w` of d numbers.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from fedveil.core.message import Size
from fedveil.data import Data, Split
from fedveil.gpu.graphs import Fused
from fedveil.gpu.products import Products

EVALUATION_BATCH = 1000
ALIKE = 1e-3  # of the largest output is what rounding may change
STACKED = 0.01  # of a gradient is what stacking may change


@dataclass(frozen=True)
class Layer:
    """One parameter tensor's place in the flat vector: `w[start:stop].view(shape)`."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """Names each layer's slice of the flat vector."""

    layers: tuple[Layer, ...]

    @staticmethod
    def of(model: nn.Module) -> Layout:
        layers, start = [], 0
        for name, parameter in model.named_parameters():
            layers.append(Layer(name, tuple(parameter.shape), start, start + parameter.numel()))
            start += parameter.numel()
        return Layout(tuple(layers))

    @property
    def size(self) -> int:
        """d, the length of the flat vector."""
        return self.layers[-1].stop if self.layers else 0

    def split(self, w: Tensor) -> dict[str, Tensor]:
        """[…, d] -> a view […, *shape] of each layer, by name."""
        pieces = w.split([layer.stop - layer.start for layer in self.layers], dim=-1)
        return {layer.name: p.unflatten(-1, layer.shape) for layer, p in zip(self.layers, pieces, strict=True)}

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `split` for one set of weights: named tensors -> [d]."""
        return torch.cat([parts[layer.name].reshape(-1) for layer in self.layers])


# ---------------------------------------------------------------------------------------------------- losses

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Loss of each record, [B]: logits [B, K] against labels [B] or probabilities [B, K]."""
    if y.is_floating_point():
        return -(y * F.log_softmax(logits, -1)).sum(-1)
    return F.cross_entropy(logits, y, reduction="none")


def next_character(logits: Tensor, y: Tensor) -> Tensor:
    """Loss of each record, [B]: the mean over its positions. Logits [B, T, K] against characters [B, T]."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(-1)


LOSSES: dict[str, Loss] = {"cross-entropy": cross_entropy, "next-character": next_character}


# ---------------------------------------------------------------------------------------------------- operations

GRADIENTS = "gradients"
RECORD_GRADIENTS = "a gradient of each record"
SECOND_DERIVATIVES = "second derivatives"
SOFT_LABELS = "a score of each class"
FORWARD_PASSES = "forward passes without gradients"

WAYS_OUT = {  # what a method may need of a model, and what to do about a model that cannot do it
    GRADIENTS: "use layers that can be differentiated, or the method baffle",
    RECORD_GRADIENTS: "replace the layer that fails, or leave method.privacy out",
    SECOND_DERIVATIVES: "replace the layer that fails (attention has them under torch.nn.attention.sdpa_kernel with "
    "SDPBackend.MATH), or use fedavg with a codec such as qsgd or top-k",
    SOFT_LABELS: "give the model one output a class, or use fedavg with a codec such as qsgd or top-k",
    FORWARD_PASSES: "replace the layer that fails, or use fedavg",
}


# ---------------------------------------------------------------------------------------------------- the task


class Task:
    """What is learned, and from whose data.

    model: any module that is a pure function of its parameters and its input; its present weights are the initial ones
    data:  a `fedveil.data.Data` (see `fedveil.data.load`, `from_tensors`, `from_dataset`, `from_folder`)
    split: a `fedveil.data.Split`: which records each client holds
    loss:  a name from `LOSSES`, or a function (logits, y) -> loss of each record [B]
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        split: Split,
        *,
        loss: str | Loss = "cross-entropy",
        device: str | torch.device = "cpu",
    ) -> None:
        _validate_pure(model, data.x[:2])
        self.device = torch.device(device)
        self.data, self.clients = data, split
        self.loss = LOSSES[loss] if isinstance(loss, str) else loss
        with _exactly():
            _validate_unmixed(self.loss, model, data)
        self.scores = _class_scores(self.loss, model, data)
        self.x, self.y = data.x.to(self.device), data.y.to(self.device)
        self.test_x, self.test_y = data.test_x.to(self.device), data.test_y.to(self.device)
        self.model = copy.deepcopy(model).to(self.device).train()
        self._pure = _Pure(self.model)
        self.layout = Layout.of(model)
        self.initial = self.layout.join(dict(model.named_parameters())).detach().to(self.device, torch.float32).clone()
        self.work, self.activations = _count(model, data.x[:2])
        self._fused: dict[Hashable, Fused] = {}
        self._tried: dict[str, str] = {}
        self.stackable = True
        with _exactly():
            self.stackable = self._try_vmap()

    def f(self, w: Tensor, x: Tensor) -> Tensor:
        """The model as a pure function: weights [d], inputs [B, *input] -> logits [B, K] (or [B, T, K])."""
        return self._pure(self.layout.split(w), x)

    def losses(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The loss of each record, [B]."""
        return self.loss(self.f(w, x), y)

    def stacked_losses(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The same for C clients with weights of their own: [C, d], [C, B, …], [C, B] -> [C, B].

        Only the model needs to be stacked: a loss of each record does not care whose record it is.
        """
        logits = self.stacked(self.f)(w, x)
        return self.loss(logits.flatten(0, 1), y.flatten(0, 1)).view(y.shape[:2])

    def stacked(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`function` of one client's tensors -> the same of C clients' tensors, stacked. A stack of one needs no vmap,
        and a model that vmap cannot take is called once a client."""

        def over(*tensors: Tensor) -> Tensor:
            if len(tensors[0]) == 1:
                return function(*(t[0] for t in tensors))[None]
            if not self.stackable:
                return torch.stack([function(*own) for own in zip(*tensors, strict=True)])
            with Products() if tensors[0].is_cuda else nullcontext():
                return vmap(function)(*tensors)

        return over

    def gradient(self, w: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Each client's gradient of its mean loss, [C, d], and that loss, [C].

        `mask` [C, B] is 1 for a record and 0 for padding, so a client with fewer records has the right mean; a client
        with none has gradient 0.
        """
        w = w.detach().requires_grad_()
        mean = (self.stacked_losses(w, x, y) * mask).sum(1) / mask.sum(1).clamp(min=1)
        (gradient,) = torch.autograd.grad(mean.sum(), w)
        return gradient, mean.detach()

    @property
    def fast_gradient(self) -> Fused:
        """`gradient`, compiled where that is asked for: for steps that are taken so often that it pays."""
        return self.fused("gradient", self.gradient)

    def fused(self, name: str, function: Callable[..., tuple[Tensor, ...]], *settings: Hashable) -> Fused:
        """What is to be compiled of this task's work, by name and settings, so that it is compiled once."""
        return self._fused.setdefault((name, *settings), Fused(name, function))

    @torch.no_grad()
    def evaluate(self, w: Tensor) -> dict[str, float]:
        """Mean loss on the test set and, where outputs are class scores, accuracy and top-5 accuracy (of more than five
        classes)."""
        hits = top5 = 0
        loss = 0.0
        for x, y in zip(self.test_x.split(EVALUATION_BATCH), self.test_y.split(EVALUATION_BATCH), strict=True):
            logits = self.f(w, x)
            loss += float(self.loss(logits, y).sum(dtype=torch.float64))
            if self.scores:
                flat, labels = logits.flatten(0, -2), y.flatten()
                hits += int((flat.argmax(-1) == labels).sum())
                if self.data.classes > 5:
                    top5 += int((flat.topk(5, -1).indices == labels[:, None]).any(-1).sum())
        metrics, guesses = {"loss": loss / len(self.test_x)}, self.test_y.numel()
        if self.scores:
            metrics = {"accuracy": hits / guesses, **metrics}
        if self.scores and self.data.classes > 5:
            metrics["top5"] = top5 / guesses
        return metrics

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
        return {
            "weights": self.layout.size,
            "layers": len(self.layout.layers),
            "input": self.data.input,
            "classes": self.data.classes,
            "records": self.largest,
        }

    def require(self, operation: str, who: str) -> None:
        """Try what a method needs of the model (see `WAYS_OUT`), once. A ValueError says what fails and the way out."""
        if reason := self._failure(operation):
            raise ValueError(f"{who} needs {operation}, and this model fails there ({reason}); {WAYS_OUT[operation]}")

    def _failure(self, operation: str) -> str:
        """Why an operation fails on two clients with two records each; nothing where it works."""
        if operation not in self._tried:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self._try(operation)
                self._tried[operation] = ""
            except Exception as error:  # whatever a layer may say
                self._tried[operation] = _reason(error)
        return self._tried[operation]

    def _try(self, operation: str) -> None:
        w, x, y = self._two_clients()
        ones = torch.ones(2, 2, device=self.device)
        if operation == GRADIENTS:
            self.gradient(w[:1], x[:1], y[:1], ones[:1])
        elif operation == RECORD_GRADIENTS:
            self.gradient(w, x[:, :1], y[:, :1], ones[:, :1])
        elif operation == SECOND_DERIVATIVES:
            w, x = w.clone().requires_grad_(), x.clone().requires_grad_(x.is_floating_point())
            (slope,) = torch.autograd.grad(self.stacked_losses(w, x, y).sum(), w, create_graph=True)
            by = [t for t in (w, x) if t.requires_grad]
            torch.autograd.grad(slope.square().sum(), by, allow_unused=True)
        elif operation == SOFT_LABELS:
            found = list(self.f(w[0], x[0]).shape[1:])
            if found != [self.data.classes]:
                raise ValueError(f"its outputs have shape {found} a record, and there are {self.data.classes} classes")
        else:
            with torch.no_grad():
                self.stacked_losses(w, x, y)

    def _two_clients(self) -> tuple[Tensor, Tensor, Tensor]:
        """The initial weights [2, d] and two records, x [2, 2, …] and y [2, 2, …], in either order."""
        rows = torch.tensor([[0, -1], [-1, 0]], device=self.device)
        return self.initial.expand(2, -1), self.x[rows], self.y[rows]

    def _try_vmap(self) -> bool:
        """Whether clients can be stacked: one of two records and one of a single record, which is padded."""
        w, x, y = self._two_clients()
        mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]], device=self.device)
        try:
            together, _ = self.gradient(w, x, y, mask)
        except RuntimeError as error:
            reason = _reason(error)
        else:
            clients = ((slice(0, 1), slice(2)), (slice(1, 2), slice(1)))  # of two records and of one
            alone = torch.cat([self.gradient(w[k], x[k, own], y[k, own], mask[k, own])[0] for k, own in clients])
            if not (together - alone).norm() > STACKED * alone.norm():
                return True
            reason = "its gradients differ in a stack"
        warnings.warn(f"this model cannot be stacked and trains one client at a time: {reason}", stacklevel=3)
        return False


@dataclass(frozen=True)
class Rows:
    """Which records C clients hold: index arrays of different lengths."""

    indices: list[np.ndarray]

    @cached_property
    def counts(self) -> np.ndarray:
        """n_k, [C]."""
        return np.array([len(i) for i in self.indices])

    def padded(self) -> tuple[np.ndarray, np.ndarray]:
        """Indices [C, n] and mask [C, n], short clients padded with their first record under mask 0."""
        width = int(self.counts.max())
        index = np.zeros((len(self.indices), width), np.int64)
        for row, own in zip(index, self.indices, strict=True):
            row[: len(own)], row[len(own) :] = own, own[0]
        return index, (np.arange(width) < self.counts[:, None]).astype(np.float32)


class _Pure:
    """A module called with other weights: what `torch.func.functional_call` does, without walking the module each time.

    Weights are put in the parameters' places while the module runs, so each thread has a module of its own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._local = model, threading.local()

    def __call__(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        if not hasattr(self._local, "model"):
            self._local.model = copy.deepcopy(self._model)
            self._local.places = _places(self._local.model)
        places: list[tuple[dict[str, Any], str, str]] = self._local.places
        try:
            for holder, name, layer in places:
                holder[name] = weights[layer]
            out: Tensor = self._local.model(x)
            return out
        finally:
            for holder, name, _ in places:
                holder[name] = None  # or the module would keep the graph alive


def _places(model: nn.Module) -> list[tuple[dict[str, Any], str, str]]:
    """Where each parameter is kept, under which name, and its layer's name; tied ones are kept in several places."""
    layers = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        (module._parameters, name, layers[id(parameter)])
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


@contextmanager
def _exactly() -> Iterator[None]:
    """Products in float32 and not in fewer bits, whose rounding could be taken for what records do to each other."""
    precision, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = convolutions


MIXES = "mixes the records of a batch, so that padding changes a client's update"
INSTEAD = "nn.GroupNorm, nn.LayerNorm or nn.InstanceNorm without running statistics"


def _validate_pure(model: nn.Module, x: Tensor) -> None:
    """Refuse a model whose output depends on anything but its weights and its input, and say what to use instead."""
    if not any(True for _ in model.parameters()):
        raise ValueError("the model has no parameters; there is nothing to train")
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"parameter '{name}' is {parameter.dtype}; fedveil trains float32 weights: call model.float()"
            )
        if not parameter.requires_grad:
            raise ValueError(
                f"parameter '{name}' is frozen; register it as a buffer so that it is not part of the weights"
            )
    for name, module in model.named_modules():
        told = f"layer '{name}' ({type(module).__name__})"
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ValueError(f"{told} {MIXES}; use {INSTEAD}")
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
            raise ValueError(f"{told} keeps running statistics, which are not weights; set track_running_stats=False")
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise ValueError(
                f"layer '{name}' (Dropout) draws random numbers, so the model is no function of its weights; remove it"
            )
    probe = copy.deepcopy(model).cpu().train()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        before = {name: b.clone() for name, b in probe.named_buffers()}
        first, second = _call(probe, x), _call(probe, x)
    for name, buffer in probe.named_buffers():
        if not torch.equal(before[name], buffer):
            raise ValueError(
                f"buffer '{name}' changes when the model runs; keep it constant or make it a layer's output"
            )
    if not torch.equal(first, second):
        raise ValueError(
            "the model gives two outputs for one input; remove what draws random numbers or keeps state between calls"
        )


def _validate_unmixed(loss: Loss, model: nn.Module, data: Data) -> None:
    """Refuse a model or a loss in which the records of a batch change each other's loss, as padding then would too."""
    chosen = torch.linspace(0, len(data.x) - 1, min(4, len(data.x))).long()
    x, y = data.x[chosen], data.y[chosen]
    probe = copy.deepcopy(model).cpu().train()
    with torch.no_grad():
        _losses(loss, _call(probe, data.x[:2]), data.y[:2])
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in probe.parameters():
            if parameter.numel() and parameter.min() == parameter.max():  # a layer that starts at 0 hides what it does
                parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.1)
        together, ones = _call(probe, x), [x[i : i + 1] for i in range(len(x))]
        try:
            alone = torch.cat([probe(one) for one in ones])
        except Exception as error:  # whatever a layer may say
            raise ValueError(
                f"the model does not take a batch of one record ({_reason(error)}); "
                "clients have such batches, so let it keep the first dimension as it is"
            ) from error
        if not _alike(together, alone):
            raise ValueError(
                f"{_mixer(probe, x, ones[-1])} {MIXES}; use {INSTEAD}, and keep records in the first dimension"
            )
        each = torch.cat([_losses(loss, together[i : i + 1], y[i : i + 1]) for i in range(len(y))])
        if not _alike(_losses(loss, together, y), each):
            raise ValueError(
                f"the loss {_called(loss)} of a record depends on the other records of its batch, and so on padding; "
                "use one that treats each record alone"
            )


def _mixer(model: nn.Module, x: Tensor, last: Tensor) -> str:
    """The innermost layer that gives the last record of `x` [B, …] something else than it gives it alone."""
    seen: dict[nn.Module, list[tuple[Any, Any]]] = {}  # in the order in which layers finish
    single: dict[nn.Module, list[tuple[Any, Any]]] = {}
    for batch, notes in ((x, seen), (last, single)):

        def note(layer: nn.Module, given: Any, out: Any, notes: Any = notes) -> None:
            notes.setdefault(layer, []).append((given, out))

        hooks = [layer.register_forward_hook(note) for layer in model.modules()]
        model(batch)
        for hook in hooks:
            hook.remove()
    names = {layer: name for name, layer in model.named_modules()}
    for layer, calls in seen.items():
        for (given, out), (own, alone) in zip(calls, single.get(layer, []), strict=False):
            if names[layer] and _same_record(given, own) and not _same_record(out, alone):
                return f"layer '{names[layer]}' ({type(layer).__name__})"
    return "the model"


def _same_record(batch: Any, alone: Any) -> bool:
    """Whether what a layer takes or gives, a tensor or the first of some, holds the same last record in both."""
    while isinstance(batch, tuple) and batch:
        batch, alone = batch[0], alone[0]
    return isinstance(batch, Tensor) and batch.dim() > 0 and _alike(batch[-1:], alone)


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same but for rounding; what is not finite in one is not in the other."""
    if a.shape != b.shape:
        return False
    a, b = (t.double() for t in (a, b))
    difference, size = ((a - b).nan_to_num(0, 0, 0).abs(), a.nan_to_num(0, 0, 0).abs())
    return bool((difference.amax() <= ALIKE * size.amax()) & (a.isfinite() == b.isfinite()).all())


def _class_scores(loss: Loss, model: nn.Module, data: Data) -> bool:
    """Whether a model's outputs are scores of the classes, the more the likelier: they fit the labels, and of outputs
    that name one class the loss is lowest for the one that names the label."""
    with torch.no_grad():
        logits = _call(copy.deepcopy(model).cpu(), data.x[:1])
    if logits.dim() < 2 or logits.shape[:-1] != data.y[:1].shape or logits.shape[-1] < data.classes:
        return False
    if loss in LOSSES.values() or data.classes == 1:
        return True
    chosen = torch.linspace(0, data.classes - 1, min(10, data.classes)).long()
    named, labels = (t.flatten() for t in torch.meshgrid(chosen, chosen, indexing="ij"))
    rows = [t.view(-1, *[1] * (data.y.dim() - 1)).expand(-1, *data.y.shape[1:]) for t in (named, labels)]
    try:
        losses = loss(F.one_hot(rows[0], logits.shape[-1]).float(), rows[1]).view(len(chosen), -1)  # [named, label]
    except Exception:  # it may take other outputs only
        return False
    others = losses.clone().fill_diagonal_(torch.inf)
    return bool((losses.diagonal() < others.amin(0)).all())


def _called(loss: Loss) -> str:
    return str(getattr(loss, "__name__", loss))


def _reason(error: Exception) -> str:
    """The first line of what went wrong, without its full stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _losses(loss: Loss, logits: Tensor, y: Tensor) -> Tensor:
    """The loss of each record. One that is not a number a record for these outputs and labels is a ValueError."""
    try:
        losses = loss(logits, y)
        if list(losses.shape) == [len(y)]:
            return losses
        found = f"its result has shape {list(losses.shape)}, not one number a record"
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        found = " ".join(str(error).split())
    raise ValueError(
        f"the loss {_called(loss)} does not fit outputs of shape {list(logits.shape)} and labels of "
        f"shape {list(y.shape)} ({found}); use another loss or model"
    )


def _count(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Of one record's forward pass, roughly: multiply-adds (each layer's outputs times the inputs of one of them), and
    numbers that the backward pass needs again (the input and each layer's outputs)."""
    work, activations = 0, x[0].numel()

    def count(layer: nn.Module, _: Any, out: Any) -> None:
        nonlocal work, activations
        weight = getattr(layer, "weight", None)
        if isinstance(out, Tensor) and isinstance(weight, Tensor):
            work += out.numel() * weight[0].numel() // len(x)
        if isinstance(out, Tensor) and not any(True for _ in layer.children()):
            activations += out.numel() // len(x)

    probe = copy.deepcopy(model).cpu()
    for layer in probe.modules():
        layer.register_forward_hook(count)
    with torch.no_grad():
        _call(probe, x)
    return work, activations


def _call(model: nn.Module, x: Tensor) -> Tensor:
    try:
        out: Any = model(x)
    except Exception as error:
        raise ValueError(f"the model does not take inputs of shape {tuple(x.shape[1:])}: {error}") from error
    if not isinstance(out, Tensor):
        raise ValueError(f"the model returns a {type(out).__name__}; it must return one tensor of logits")
    return out
