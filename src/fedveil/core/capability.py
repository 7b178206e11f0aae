"""What a method may need of a model, and what to do about a model that cannot do it."""

from __future__ import annotations

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
