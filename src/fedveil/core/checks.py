"""Refuse models and losses with which padding or stacking would change an update."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedveil.core.batchnorm import Batches, BatchNorms
from fedveil.core.data import Data, Split
from fedveil.core.functional import Inputs, call, first_line, output
from fedveil.core.lengths import lengths, trimmed
from fedveil.core.losses import Loss, class_scores, targets
from fedveil.core.modes import Modes
from fedveil.core.noise import Seeded

ALIKE = 1e-3  # of the largest output is what rounding may change
STACKED = 0.01  # of a gradient is what stacking may change


@contextmanager
def full_precision() -> Iterator[None]:
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


def validate_types(data: Any, split: Any) -> None:
    """Raise a TypeError if something else is given in the place of a `Data` or a `Split`."""
    if not isinstance(data, Data):
        raise TypeError(f"data is a {type(data).__name__}; make a Data, for instance with fedveil.data.from_tensors")
    if not isinstance(split, Split):
        raise TypeError(f"split is a {type(split).__name__}; make a Split, for instance with fedveil.split")


def trained_names(model: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """The names of the parameters that are trained: those that match a pattern, or that require gradients."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}; give an nn.Module")
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ValueError("the model has no parameters; there is nothing to train")
    names = [name for name, parameter in parameters.items() if parameter.requires_grad]
    if patterns is not None:
        if isinstance(patterns, str) or not patterns or not all(isinstance(each, str) for each in patterns):
            raise ValueError(f'trainable is {patterns!r}; it is a list of patterns, such as ["head.*"]')
        for pattern in patterns:
            if not fnmatch.filter(parameters, pattern):
                some = ", ".join(list(parameters)[:3])
                raise ValueError(f"trainable has the pattern '{pattern}', which matches no parameter; some are {some}")
        names = [name for name in parameters if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if not names:
        raise ValueError('no parameter of the model requires gradients; name some with trainable=["head.*"]')
    for name in names:
        if parameters[name].dtype != torch.float32:
            raise ValueError(
                f"parameter '{name}' is {parameters[name].dtype}; fedveil trains float32 weights: call model.float(), "
                "or leave it out of what is trained"
            )
    return names


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model without gradients. A ValueError says why a model cannot be copied."""
    try:
        return copy.deepcopy(model).requires_grad_(False)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(
            f"the model cannot be copied ({first_line(error)}); run lazy layers once before, take weight_norm from "
            "torch.nn.utils.parametrizations, and give a module that is not scripted"
        ) from error


def validate_pure(modes: Modes, norms: BatchNorms, x: Tensor, inputs: Inputs) -> bool:
    """Refuse a model whose output depends on anything but weights, input and a key, and say what to use instead.

    Return whether it works differently in training for another reason than batch norm: it draws random numbers.
    """
    for name, module in modes.training.named_modules():
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats and module.training:
            raise ValueError(
                f"layer '{name}' ({type(module).__name__}) keeps running statistics, which are not weights; set "
                "track_running_stats=False"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"layer '{name}' ({type(module).__name__}) changes its weights when it runs; set max_norm=None"
            )
    key = torch.tensor(0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        evaluated = _twice(modes.evaluation, x, inputs)
        seeded = [Seeded(key), Seeded(key)]
        with Batches(torch.ones(len(x)), norms.places(modes.training)):
            trained = _twice(modes.training, x, inputs, seeded)
    return seeded[0].calls > 0 or not (len(norms) or torch.equal(evaluated, trained))


def _twice(
    model: nn.Module, x: Tensor, inputs: Inputs, within: Sequence[Any] = (nullcontext(), nullcontext())
) -> Tensor:
    """The output of a model for some records, which must be the same if it is called again."""
    before = {name: b.clone() for name, b in model.named_buffers()}
    outputs = []
    for context in within:
        with context:
            outputs.append(call(model, x, inputs))
    for name, buffer in model.named_buffers():
        if not torch.equal(before[name], buffer):
            raise ValueError(
                f"buffer '{name}' changes when the model runs; keep it constant or make it a layer's output"
            )
    if not torch.equal(*(each.nan_to_num() for each in outputs)):
        raise ValueError(
            "the model gives two outputs for one input; remove what keeps state between calls, and draw random numbers "
            "in training mode only, by dropout, torch.rand, randn, rand_like, randn_like, bernoulli, or in place by "
            "bernoulli_, uniform_, normal_ or exponential_"
        )
    return outputs[0]


def validate_unmixed(loss: Loss, model: nn.Module, data: Data, inputs: Inputs) -> None:
    """Refuse a model or a loss in which the records of a batch change each other's loss, as padding then would too."""
    chosen = torch.linspace(0, len(data.x) - 1, min(4, len(data.x))).long()
    if data.padding is not None:
        chosen = lengths(data.x, data.padding).argsort(stable=True)[:4]  # the shortest, of which most can be cut
    x, y = data.x[chosen], data.y[chosen]
    probe = copy.deepcopy(model)
    with torch.no_grad():
        _losses(loss, call(probe, data.x[:2], inputs), data.y[:2])
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in probe.parameters():
            if parameter.numel() and parameter.min() == parameter.max():  # a layer that starts at 0 hides what it does
                parameter.add_(torch.randn(parameter.shape, generator=draw).to(parameter), alpha=0.1)
        together, ones = call(probe, x, inputs), [x[i : i + 1] for i in range(len(x))]
        try:
            alone = torch.cat([output(_given(probe, one, inputs)) for one in ones])
        except Exception as error:  # whatever a layer may say
            raise ValueError(
                f"the model does not take a batch of one record ({first_line(error)}); "
                "clients have such batches, so let it keep the first dimension as it is"
            ) from error
        if not _alike(together, alone):
            raise ValueError(
                f"{_mixer(probe, x, ones[-1], inputs)} {MIXES}; use {INSTEAD}, and keep records in the first dimension"
            )
        each = torch.cat([_losses(loss, together[i : i + 1], y[i : i + 1]) for i in range(len(y))])
        if not _alike(_losses(loss, together, y), each):
            raise ValueError(
                f"the loss {_called(loss)} of a record depends on the other records of its batch, and so on padding; "
                "use one that treats each record alone"
            )
        shorter = x if data.padding is None else trimmed(x, data.padding)
        if shorter.shape != x.shape and not _alike(together, output(_given(probe, shorter, inputs))):
            raise ValueError(
                f"the model's outputs depend on how many padding tokens ({data.padding}) follow a record; make it "
                "ignore them, or leave padding out of the data"
            )


def same_gradients(found: Tensor, expected: Tensor) -> bool:
    """Whether gradients are the same but for what stacking may change, and finite in the same places."""
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return False
    return not bool((found - expected).norm() > STACKED * expected.norm())


def validate_padding(padded: Tensor, alone: Tensor) -> None:
    """Refuse a model in which padding changes a client's gradient, though it changes no loss."""
    if not same_gradients(padded, alone):
        raise ValueError(
            f"the model's gradient {MIXES}; use layers that treat each record alone, such as nn.Embedding without "
            "scale_grad_by_freq"
        )


def _given(model: nn.Module, x: Tensor, inputs: Inputs) -> Any:
    args, kwargs = inputs(x)
    return model(*args, **kwargs)


def _mixer(model: nn.Module, x: Tensor, last: Tensor, inputs: Inputs) -> str:
    """The innermost layer that gives the last record of `x` [B, …] something else than it gives it alone."""
    seen: dict[nn.Module, list[tuple[Any, Any]]] = {}  # in the order in which layers finish
    single: dict[nn.Module, list[tuple[Any, Any]]] = {}
    for batch, notes in ((x, seen), (last, single)):

        def note(layer: nn.Module, given: Any, out: Any, notes: Any = notes) -> None:
            notes.setdefault(layer, []).append((given, out))

        hooks = [layer.register_forward_hook(note) for layer in model.modules()]
        _given(model, batch, inputs)
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


def gives_class_scores(loss: Loss, outputs: Tensor, data: Data) -> bool:
    """Whether a model's outputs are scores of the classes, the more the likelier: they fit the labels, and of outputs
    that name one class the loss is lowest for the one that names the label."""
    if data.y.is_floating_point() or not data.classes or targets(loss) == "bits":
        return False
    try:
        logits = class_scores(outputs, data.y[:1])
    except ValueError:
        return False
    if logits.dim() < 2 or logits.shape[-1] < data.classes:
        return False
    if targets(loss) or data.classes == 1:
        return True
    chosen = torch.linspace(0, data.classes - 1, min(10, data.classes)).long()
    pairs = (t.flatten() for t in torch.meshgrid(chosen, chosen, indexing="ij"))
    rows = [t.view(-1, *[1] * (data.y.dim() - 1)).expand(-1, *data.y.shape[1:]) for t in pairs]
    try:
        named = F.one_hot(rows[0], logits.shape[-1]).float()
        named = named.movedim(-1, 1) if data.y.ndim > 2 else named  # as the model has them
        losses = loss(named, rows[1]).view(len(chosen), -1)  # [named, label]
    except Exception:  # it may take other outputs only
        return False
    others = losses.clone().fill_diagonal_(torch.inf)
    return bool((losses.diagonal() < others.amin(0)).all())


def _called(loss: Loss) -> str:
    return str(getattr(loss, "__name__", loss))


def _losses(loss: Loss, logits: Tensor, y: Tensor) -> Tensor:
    """The loss of each record. One that is not a number a record for these outputs and labels is a ValueError."""
    instead = "use another loss or model"
    try:
        losses = loss(logits, y)
        if list(losses.shape) == [len(y)]:
            return losses
        found = f"its result has shape {list(losses.shape)}, not one number a record"
        if losses.dim() == 0:
            instead = "return the loss of each record, as losses of PyTorch do with reduction='none'"
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        found = " ".join(str(error).split())
    raise ValueError(
        f"the loss {_called(loss)} does not fit outputs of shape {list(logits.shape)} and labels of "
        f"shape {list(y.shape)} ({found}); {instead}"
    )
