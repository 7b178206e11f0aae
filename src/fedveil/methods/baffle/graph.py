"""A task as an ONNX graph: records, targets and trained weights in, the loss of each record out.

Weights that are not trained are constants. Those of more than `BESIDE` bytes lie in a file beside the graph, which ONNX
Runtime maps into memory instead of reading it.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.core.export import state_dict, to_onnx
from fedveil.core.functional import call
from fedveil.core.structure import inputs_of
from fedveil.core.task import Task

BESIDE = 1 << 12
PREFIX = "model."
MOVERS = {  # operations that move numbers and compute none
    *("Cast", "Concat", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Pad", "Reshape"),
    *("SequenceAt", "Slice", "Split", "SplitToSequence", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Where"),
}


@dataclass(frozen=True)
class Made:
    """What was written.

    frozen:  weights in the graph
    bytes:   of the graph and the file beside it
    lengths: whether records may be shorter than those of the data set
    """

    frozen: int
    bytes: int
    lengths: bool


class _Losses(nn.Module):
    """Records and targets -> the loss of each record, [n] in float64 as `Prober` computes it."""

    def __init__(self, task: Task, wide: bool, trained: list[str]) -> None:
        super().__init__()
        self.model = copy.deepcopy(task.model).cpu().eval()
        self.model.load_state_dict(state_dict(task, task.initial))
        self.loss, self.inputs = task.loss, inputs_of(task.data.structure, self.model)
        for name, parameter in self.model.named_parameters():
            if wide and name in trained:
                parameter.data = parameter.data.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(call(self.model, x, self.inputs).double(), y)


def write(task: Task, trained: list[str], folder: Path, wide: bool = False, quantise: bool = False) -> Made:
    """Write `model.onnx` with the weights called `trained` as inputs.

    wide: trained weights and records are float64; the others stay as they are, and the model converts them
    """
    program, lengths = _exported(task, trained, wide)
    import onnx
    from onnx import helper

    proto = program.model_proto
    graph = proto.graph
    kept = {tensor.name: tensor for tensor in graph.initializer}
    for name in trained:
        if (own := kept.get(PREFIX + name)) is None or not any(own.name in node.input for node in graph.node):
            raise ValueError(f"this model cannot be exported with its weights as inputs: ONNX has no weight '{name}'")
        graph.initializer.remove(own)
        graph.input.append(helper.make_tensor_value_info(name, own.data_type, own.dims))
        for node in graph.node:
            node.input[:] = [name if each == own.name else each for each in node.input]
    if wide:
        _require_wide(proto)
    _transpose(graph)
    frozen = [tensor for tensor in graph.initializer if tensor.name.startswith(PREFIX)]
    count = sum(int(torch.tensor(tensor.dims).prod()) for tensor in frozen)
    for tensor in frozen if quantise else []:
        _quantise(graph, tensor)
    if wide:
        _convert_late(graph)
    for node in graph.node:  # where in the sources each one comes from
        del node.metadata_props[:]
    del graph.value_info[:]
    onnx.checker.check_model(proto)
    onnx.save_model(
        proto, folder / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=BESIDE
    )
    written = sum(path.stat().st_size for path in folder.iterdir() if path.name in ("model.onnx", "weights.bin"))
    return Made(count, written, lengths)


def _exported(task: Task, trained: list[str], wide: bool) -> tuple[Any, bool]:
    """The graph as PyTorch exports it, and whether records may be of different lengths."""
    model, x, y = _Losses(task, wide, trained), task.data.x[:2].clone(), task.data.y[:2].clone()
    x = x.double() if wide and x.is_floating_point() else x if x.is_floating_point() else x.long()
    records, names = torch.export.Dim("records", min=1), ("x", "y")
    if task.data.padding is not None and task.data.structure is None and x.dim() == 2:
        length = torch.export.Dim("length", min=2, max=x.shape[1])
        try:
            return to_onnx(model, (x, y), names, ({0: records, 1: length}, {0: records}), "losses"), True
        except ValueError:  # a model of one length only
            pass
    return to_onnx(model, (x, y), names, ({0: records}, {0: records}), "losses"), False


def _require_wide(proto: Any) -> None:
    """Raise a ValueError if anything that depends on a record is computed in less than float64: such rounding depends
    on the other records of a pass, and would let one record move the slopes of others."""
    from onnx import TensorProto, shape_inference

    graph = shape_inference.infer_shapes(proto).graph
    types = {each.name: each.type.tensor_type.elem_type for each in (*graph.value_info, *graph.output)}
    narrow = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
    private = {each.name for each in graph.input}
    for node in graph.node:
        if node.op_type in ("Shape", "Size") or private.isdisjoint(node.input):
            continue
        private.update(node.output)
        if node.op_type not in MOVERS and any(types.get(name, TensorProto.FLOAT) in narrow for name in node.output):
            raise ValueError(
                f"method.privacy runs the model in float64, but its graph computes a {node.op_type} in float32; "
                "convert what that layer holds to the type of its input, or leave method.privacy out"
            )


def _transpose(graph: Any) -> None:
    """Store constants as products take them, where the graph transposes them: the runtime would hold them twice."""
    from onnx import numpy_helper

    held = {tensor.name: tensor for tensor in graph.initializer}
    uses = Counter(name for node in graph.node for name in node.input)
    made = {name: node for node in graph.node for name in node.output}
    for node in [node for node in graph.node if node.op_type == "Transpose"]:
        (source,), cast = node.input, made.get(node.input[0])
        first = cast.input[0] if cast is not None and cast.op_type == "Cast" else source
        if first not in held or uses[first] > 1 or uses[source] > 1:
            continue
        order = next(list(each.ints) for each in node.attribute if each.name == "perm")
        turned = numpy_helper.to_array(held[first]).transpose(order)
        held[first].CopyFrom(numpy_helper.from_array(turned.copy(), first))
        for other in graph.node:
            other.input[:] = [source if each == node.output[0] else each for each in other.input]
        graph.node.remove(node)


def _convert_late(graph: Any) -> None:
    """Let a constant be converted to float64 when the layer that needs it runs, and not all of them at the start.

    A runtime orders operations by their inputs. So the shape of the constant is told by a `Reshape` whose argument is
    made from the layer's other input.
    """
    import numpy as np
    from onnx import NodeProto, helper, numpy_helper

    held = {tensor.name: tensor for tensor in graph.initializer}
    uses = Counter(name for node in graph.node for name in node.input)
    casts = {node.output[0]: node for node in graph.node if node.op_type == "Cast" and node.input[0] in held}
    casts = {name: node for name, node in casts.items() if held[node.input[0]].dims}
    after = dict[str, str]()  # by constant, what is there before it is needed
    for node in graph.node:
        others = [name for name in node.input if name not in casts and name not in held]
        if others:
            after |= {name: others[0] for name in node.input if name in casts and uses[name] == 1}
    order = list[NodeProto]()
    for node in graph.node:
        for name in node.input if node.op_type != "Cast" else []:
            if name in after:
                (source,), own = casts[name].input, f"{name}/late"
                shape = np.array(held[source].dims, np.int64)
                graph.initializer.append(numpy_helper.from_array(shape, f"{own}/shape"))
                graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.int64), f"{own}/nothing"))
                order.append(helper.make_node("Size", [after[name]], [f"{own}/size"]))
                order.append(helper.make_node("Mul", [f"{own}/size", f"{own}/nothing"], [f"{own}/zero"]))
                order.append(helper.make_node("Add", [f"{own}/shape", f"{own}/zero"], [f"{own}/same"]))
                order.append(helper.make_node("Reshape", [source, f"{own}/same"], [own]))
                order.append(helper.make_node("Cast", [own], [name], to=casts[name].attribute[0].i))
        if not (node.op_type == "Cast" and node.output[0] in after):
            order.append(node)
    copied = [copy.deepcopy(node) for node in order]
    del graph.node[:]
    graph.node.extend(copied)


def _quantise(graph: Any, tensor: Any) -> None:
    """Replace a matrix of the graph by 8-bit integers, a scale, and the node that multiplies them."""
    import numpy as np
    from onnx import helper, numpy_helper

    values = numpy_helper.to_array(tensor)
    if values.ndim < 2 or values.dtype != np.float32:
        return
    scale = np.float32(max(float(np.abs(values).max()) / 127, 1e-12))
    codes = np.rint(values / scale).astype(np.int8)
    name = tensor.name
    graph.initializer.remove(tensor)
    graph.initializer.append(numpy_helper.from_array(codes, f"{name}/codes"))
    graph.initializer.append(numpy_helper.from_array(np.asarray(scale), f"{name}/scale"))
    graph.node.insert(0, helper.make_node("DequantizeLinear", [f"{name}/codes", f"{name}/scale"], [name]))
