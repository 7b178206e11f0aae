"""Weights from a finished run or a file of tensors, for training to go on from. Nothing that is read is executed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fedveil.core.batchnorm import SLOT, Norms, find
from fedveil.core.checks import trained_names
from fedveil.core.functional import first_line
from fedveil.core.layout import Layout
from fedveil.data.files import read_npz
from fedveil.runs.checkpoint import newest


def load_weights(model: nn.Module, source: Path, trainable: Sequence[str] | None = None) -> None:
    """Copy weights into `model`: those of a run folder's newest checkpoint, or of a file with an array a layer, .npz or
    .safetensors. Running statistics of batch norm layers come with them.

    Layers that the file does not name stay as they are, so that a new last layer can be put on an old network.
    """
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = _newest(source, model, trainable) if source.is_dir() else _arrays(source)
    for name, value in found.items():
        if name not in own or value.shape != own[name].shape:
            wanted = f"is {list(own[name].shape)}" if name in own else "has no such layer"
            raise ValueError(
                f"{source} holds '{name}' of shape {list(value.shape)}, the model {wanted}; leave it out of the file"
            )
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"{source} holds '{name}' with values that are not finite; give another")
        with torch.no_grad():
            own[name].copy_(value)


def _newest(folder: Path, model: nn.Module, trainable: Sequence[str] | None) -> dict[str, Tensor]:
    """The weights of the newest checkpoint that is whole, of all layers or of those that are trained."""
    saved = newest(folder)
    if saved is None:
        raise ValueError(f"task.weights is {folder}, which holds no checkpoint; give a finished run")
    weights, own, names = saved.state.weights, dict(model.named_parameters()), trained_names(model, trainable)
    layouts = [Layout.of(own), Layout.of({name: own[name] for name in names})]
    fitting = [layout for layout in layouts if weights.shape == (layout.size,)]
    if not fitting:
        size = layouts[0].size
        raise ValueError(f"{folder} holds {weights.numel()} weights, the model has {size}; give a run of this model")
    found, kept, norms = fitting[0].split(weights.float()), saved.state.slots.get(SLOT), find(model, names, None)
    if isinstance(kept, Norms) and kept.statistics.shape == norms.values.shape:
        found |= norms.split(kept.statistics)
    return found


def _arrays(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"task.weights is {path}, which is neither a run folder nor an .npz or .safetensors file")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a readable .safetensors file ({first_line(error)})") from None
    return {name: torch.from_numpy(array.astype("float32")) for name, array in read_npz(path).items()}
