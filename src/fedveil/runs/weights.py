"""Weights from a finished run or a file of tensors, for training to go on from. Nothing that is read is executed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fedveil.core.checks import trained_names
from fedveil.core.layout import Layout
from fedveil.data.files import read_npz
from fedveil.runs.checkpoint import newest


def load_weights(model: nn.Module, source: Path, trainable: Sequence[str] | None = None) -> None:
    """Copy weights into `model`: those of a run folder's newest checkpoint, or of an .npz file with an array a layer.

    Layers that the file does not name stay as they are, so that a new last layer can be put on an old network.
    """
    own = dict(model.named_parameters())
    trained = Layout.of({name: own[name] for name in trained_names(model, trainable)})
    found = _newest(source, Layout.of(own), trained) if source.is_dir() else _arrays(source)
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


def _newest(folder: Path, *layouts: Layout) -> dict[str, Tensor]:
    """The weights of the newest checkpoint that is whole, by the first of these layouts that they fit."""
    saved = newest(folder)
    if saved is None:
        raise ValueError(f"task.weights is {folder}, which holds no checkpoint; give a finished run")
    weights: Tensor = saved.state.weights
    for layout in layouts:
        if weights.shape == (layout.size,):
            return layout.split(weights.float())
    size = layouts[0].size
    raise ValueError(f"{folder} holds {weights.numel()} weights, the model has {size}; give a run of this model")


def _arrays(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"task.weights is {path}, which is neither a run folder nor an .npz file")
    return {name: torch.from_numpy(array.astype("float32")) for name, array in read_npz(path).items()}
