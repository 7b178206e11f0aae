"""A trained model in a file: its state for PyTorch, or a graph for ONNX Runtime."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fedveil.core.structure import inputs_of
from fedveil.core.task import Task

if TYPE_CHECKING:
    from torch.onnx import ONNXProgram

OPSET = 18
STATES, GRAPHS = (".safetensors", ".pt"), (".onnx",)  # suffixes


def state_dict(task: Task, w: Tensor) -> dict[str, Tensor]:
    """The model's own `state_dict` with weights `w` [d], on the CPU: tied weights under each of their names, constants,
    and buffers with the running statistics of `task.norms`."""
    layers = task.layout.split(w.detach().cpu()) | task.norms.split()
    names = {id(tensor): name for name, tensor in [*task.model.named_parameters(), *task.model.named_buffers()]}
    state: dict[str, Tensor] = {}
    for name, value in task.model.state_dict(keep_vars=True).items():
        own = layers.get(names.get(id(value), ""), value.detach())
        state[name] = own.to("cpu", value.dtype, copy=True, memory_format=torch.contiguous_format)
    return state


def write(task: Task, w: Tensor, path: Path | str, suffixes: Sequence[str] = (*STATES, *GRAPHS)) -> None:
    """Write the model with weights `w` [d] to a file, whose suffix decides the format."""
    path = Path(path)
    if path.suffix not in suffixes:
        raise ValueError(f"{path} has the suffix '{path.suffix}'; use {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} for {path.name}; make it first")
    if path.suffix == ".onnx":
        onnx_graph(task, w).save(path)
    elif path.suffix == ".pt":
        torch.save(state_dict(task, w), path)
    else:
        from safetensors.torch import save_file

        save_file(state_dict(task, w), path, {"format": "pt"})


def onnx_graph(task: Task, w: Tensor) -> ONNXProgram:
    """The model with weights `w` [d] as PyTorch exports it to ONNX, in eval mode: it takes any number of records, in an
    input "x" where a record is one tensor, and its weights are named initialisers. The exporter's log lines are left
    out."""
    x = task.data.x[:2].clone()
    model = copy.deepcopy(task.model).cpu().eval()
    model.load_state_dict(state_dict(task, w))
    args, kwargs = inputs_of(task.data.structure, model)(x)
    records = {0: torch.export.Dim("records", min=1)}
    names = ["x"] if task.data.structure is None else None
    return to_onnx(model, args, names, tree_map(lambda _: records, kwargs or args), kwargs=kwargs)


def to_onnx(
    model: nn.Module,
    args: tuple[Any, ...],
    names: Sequence[str] | None,
    shapes: Any,
    output: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> ONNXProgram:
    """A module as PyTorch exports it to ONNX, called with these arguments; a ValueError says why it cannot.

    names:  of the inputs
    shapes: which of their dimensions vary, as in `torch.export`
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise ImportError("an export to ONNX needs the extra 'edge': pip install 'fedveil[edge]'") from None
    level = logging.getLogger("torch.onnx").level
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                model,
                args,
                kwargs=dict(kwargs or {}),
                input_names=names,
                output_names=[output] if output else None,
                dynamic_shapes=shapes,
                opset_version=OPSET,
                dynamo=True,
                optimize=False,
                verbose=False,
            )
    except Exception as error:  # the exporter fails in many ways
        raise ValueError(f"PyTorch cannot export this model to ONNX: {' '.join(str(error).split())[:300]}") from error
    finally:
        logging.getLogger("torch.onnx").setLevel(level)
    assert program
    return program
