"""The exported model: an ONNX graph from trained weights, records and labels to the loss of each record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MULTIPLE = 8  # lengths are rounded up to it, so that few shapes occur
Floats = NDArray[np.float32]
Losses = NDArray[np.float64]


class Model:
    """A session of ONNX Runtime that holds little: no arena, no second copy of the weights for its kernels."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.enable_cpu_mem_arena = False
        options.log_severity_level = 3
        options.add_session_config_entry("session.disable_prepacking", "1")
        path, wide = folder / "model.onnx", settings["float"] == "float64"
        folded = ["ConstantFolding"] if wide else []  # it would keep frozen weights in float64
        self._session = onnxruntime.InferenceSession(
            path, options, ["CPUExecutionProvider"], disabled_optimizers=folded
        )
        self._layers = [
            (name, shape, start, stop) for name, shape, start, stop, trained in settings["layers"] if trained
        ]
        self._float, self._at_once = np.dtype(settings["float"]), settings["at_once"]
        self._padding = settings["padding"] if settings["lengths"] else None
        self.places = np.concatenate([np.arange(start, stop) for *_, start, stop in self._layers])

    def losses(self, weights: Floats, x: NDArray[Any], y: NDArray[Any]) -> Losses:
        """The loss of each record, [n]: weights [d], x [n, *input], y [n, …]."""
        found, order = np.empty(len(x)), np.arange(len(x))
        feeds = {
            name: weights[start:stop].reshape(shape).astype(self._float) for name, shape, start, stop in self._layers
        }
        if self._padding is not None:  # records of like length together
            order = np.argsort(self._lengths(x), kind="stable")
        for first in range(0, len(x), self._at_once):
            some = order[first : first + self._at_once]
            found[some] = self._session.run(None, {"x": self._trimmed(x[some]), "y": y[some], **feeds})[0]
        return found

    def _lengths(self, x: NDArray[Any]) -> NDArray[np.int64]:
        """The number of tokens of each record before its padding."""
        lengths: NDArray[np.int64] = ((x != self._padding) * np.arange(1, x.shape[-1] + 1)).max(-1)
        return lengths

    def _trimmed(self, x: NDArray[Any]) -> NDArray[Any]:
        """Cut records to the longest of them, rounded up to a multiple of `MULTIPLE`."""
        if self._padding is None:
            return x if x.dtype == np.int64 else x.astype(self._float)
        longest = max(1, int(self._lengths(x).max()))
        return np.ascontiguousarray(x[..., : -(-longest // MULTIPLE) * MULTIPLE])
