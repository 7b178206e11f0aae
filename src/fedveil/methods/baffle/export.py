"""A task's model as an ONNX graph whose trained weights are inputs, and with it a client that needs no PyTorch."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from fedveil.core import directions
from fedveil.core.export import onnx_graph
from fedveil.core.losses import cross_entropy
from fedveil.core.task import Task
from fedveil.methods.baffle import edge
from fedveil.methods.baffle.baffle import Baffle

PACKAGE = "fedveil_edge"
MEMORY = 4 << 20  # bytes of activations that the client's passes may hold


def export(task: Task, method: Baffle, folder: Path, quantise: bool = False) -> dict[str, Any]:
    """Write model, settings and client to `folder`; what they are, in figures.

    quantise: weights that are not trained, which are part of the graph, become 8-bit integers with a scale a layer
    """
    if method.down != "weights" or method.secure or method.privacy:
        raise ValueError(
            'the edge client answers from full weights, in the clear and without noise; set method.down="weights" and '
            "leave method.secure and method.privacy out"
        )
    if method.local:
        raise ValueError("the edge client takes no local steps; leave method.local out")
    if task.loss is not cross_entropy or task.data.y.dim() != 1:
        raise ValueError("the edge client knows the loss 'cross-entropy' with one label a record, and no other")
    places = method.places(task)
    chosen = set(range(task.layout.size) if places is None else places.tolist())
    layers = [(each.name, list(each.shape), each.start, each.stop, each.start in chosen) for each in task.layout.layers]
    graph, frozen = _graph(task, [name for name, *_, trained in layers if trained], quantise)
    (folder / PACKAGE).mkdir(parents=True, exist_ok=True)
    (folder / PACKAGE / "__init__.py").write_text('"""A client of fedveil without PyTorch."""\n', encoding="utf-8")
    for name, module in (("edge.py", edge), ("directions.py", directions)):
        source = inspect.getsource(module).replace("from fedveil.core.directions", "from .directions")
        (folder / PACKAGE / name).write_text(source, encoding="utf-8")
    (folder / "model.onnx").write_bytes(graph)
    settings = {name: getattr(method, name) for name in ("directions", "law", "scheme", "seeds", "batch")}
    settings["sigma"] = method.scale
    settings["at_once"] = max(1, MEMORY // (4 * task.activations))  # records a pass
    told = {"input": list(task.data.input), "classes": task.data.classes, "layers": layers, **settings}
    (folder / "settings.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    trained = sum(stop - start for *_, start, stop, is_trained in layers if is_trained)
    weights = {"weights": task.layout.size, "trained": trained, "frozen": frozen}
    return {"folder": str(folder), **weights, "bytes": len(graph)}


def _graph(task: Task, trained: list[str], quantise: bool) -> tuple[bytes, int]:
    """The graph with `trained` weights as inputs, and how many weights it holds itself."""
    proto = onnx_graph(task, task.initial).model_proto  # says what is to be installed
    import onnx
    from onnx import helper

    graph = proto.graph
    kept = {tensor.name: tensor for tensor in graph.initializer}
    lost = [name for name in trained if name not in kept or not any(name in node.input for node in graph.node)]
    if lost:
        raise ValueError(f"this model cannot be exported with its weights as inputs: ONNX has no weight '{lost[0]}'")
    for name in trained:
        graph.initializer.remove(kept[name])
        graph.input.append(helper.make_tensor_value_info(name, kept[name].data_type, kept[name].dims))
    frozen = [layer.name for layer in task.layout.layers if layer.name in kept and layer.name not in trained]
    for name in frozen if quantise else []:
        _quantise(graph, kept[name])
    onnx.checker.check_model(proto)
    return proto.SerializeToString(), sum(onnx.numpy_helper.to_array(kept[name]).size for name in frozen)


def _quantise(graph: Any, tensor: Any) -> None:
    """Replace a matrix of the graph by 8-bit integers, a scale, and the node that multiplies them."""
    import numpy as np
    from onnx import helper, numpy_helper

    values = numpy_helper.to_array(tensor)
    if values.ndim < 2:
        return
    scale = np.float32(max(float(np.abs(values).max()) / 127, 1e-12))
    codes = np.rint(values / scale).astype(np.int8)
    name = tensor.name
    graph.initializer.remove(tensor)
    graph.initializer.append(numpy_helper.from_array(codes, f"{name}/codes"))
    graph.initializer.append(numpy_helper.from_array(np.asarray(scale), f"{name}/scale"))
    graph.node.insert(0, helper.make_node("DequantizeLinear", [f"{name}/codes", f"{name}/scale"], [name]))
