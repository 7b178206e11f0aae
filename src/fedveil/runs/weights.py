"""Weights from a finished run or a file of tensors, for training to go on from. Nothing that is read is executed."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from fedveil.core.layout import Layout
from fedveil.data.files import read_npz
from fedveil.runs.checkpoint import newest


def load_weights(model: nn.Module, source: Path) -> None:
    """Copy weights into `model`: those of a run folder's newest checkpoint, or of an .npz file with an array a layer.

    Layers that the file does not name stay as they are, so that a new last layer can be put on an old network.
    """
    layout, own = Layout.of(model), dict(model.named_parameters())
    found = layout.split(_newest(source, layout.size)) if source.is_dir() else _arrays(source)
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


def _newest(folder: Path, size: int) -> Tensor:
    """The weights [d] of the newest checkpoint that is whole."""
    saved = newest(folder)
    if saved is None:
        raise ValueError(f"task.weights is {folder}, which holds no checkpoint; give a finished run")
    weights: Tensor = saved.state.weights
    if weights.shape != (size,):
        raise ValueError(f"{folder} holds {weights.numel()} weights, the model has {size}; give a run of this model")
    return weights.float()


def _arrays(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"task.weights is {path}, which is neither a run folder nor an .npz file")
    return {name: torch.from_numpy(array.astype("float32")) for name, array in read_npz(path).items()}
