"""A model in training and in evaluation: two modules that share their constants."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from torch import nn

from fedveil.core.batchnorm import BatchNorms
from fedveil.core.functional import clone
from fedveil.core.noise import silence


@dataclass(frozen=True)
class Modes:
    """A module as it is in training, where layers in eval mode stay so, and in evaluation."""

    training: nn.Module
    evaluation: nn.Module

    @staticmethod
    def of(model: nn.Module, norms: BatchNorms, notice: bool = False) -> Modes:
        """Two modules that share a model's tensors. A batch norm layer whose statistics are constants is in evaluation
        in both. With `notice` a warning says which dropout is off."""
        training, evaluation = clone(model), clone(model).eval()
        for name, layer in training.named_modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.num_batches_tracked = None  # a count that would change in every call
                if f"{name}.running_mean" not in norms.statistics:
                    layer.eval()
        for layer in evaluation.modules():
            if isinstance(layer, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
                layer.training = True  # its fast path can be neither stacked nor differentiated
            if isinstance(layer, nn.MultiheadAttention):
                layer.dropout = 0.0
        silenced = silence(training)
        if silenced and notice:
            told = ", ".join(f"'{name}'" for name in silenced)
            warnings.warn(
                f"dropout inside {told} cannot be seeded and is off; use nn.Dropout beside the layer", stacklevel=4
            )
        return Modes(training, evaluation)
