"""What decides a run: fingerprints that a resumed run must share, and the environment."""

from __future__ import annotations

import dataclasses
import hashlib
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from fedveil.core.method import Method
from fedveil.core.sampling import CohortSampler
from fedveil.core.task import Task
from fedveil.core.version import __version__
from fedveil.runs.checkpoint import RunError

SAMPLED = 1 << 24  # numbers of a data set that its fingerprint looks at


def fingerprint(*parts: Any) -> bytes:
    """8 bytes that tell settings, arrays and tensors from any others: equal for equal values, in every process.

    A dataclass counts with its class and its fields, except for `ADDED` ones at their defaults. A tensor or an array
    counts with its values, anything else that is no plain value with its class alone.
    """

    def plain(thing: Any) -> Any:
        if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
            counted = [f for f in dataclasses.fields(thing) if f.compare and not _unused(thing, f)]
            own = {f.name: plain(getattr(thing, f.name)) for f in counted}
            return [type(thing).__qualname__, own]
        if isinstance(thing, Tensor):
            thing = thing.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        if isinstance(thing, np.ndarray):
            return [str(thing.dtype), list(thing.shape), hashlib.blake2b(thing.tobytes()).hexdigest()]
        if isinstance(thing, Mapping):
            return {str(key): plain(value) for key, value in thing.items()}
        if isinstance(thing, (list, tuple)):
            return [plain(each) for each in thing]
        if isinstance(thing, float) and thing.is_integer():  # a recipe may say 1 where a file says 1.0
            return int(thing)
        if thing is None or isinstance(thing, (bool, int, float, str, bytes)):
            return thing
        return getattr(thing, "__qualname__", type(thing).__qualname__)

    text = msgspec.json.encode(plain(parts), order="sorted")
    return hashlib.blake2b(text, digest_size=8).digest()


def _unused(thing: Any, option: dataclasses.Field[Any]) -> bool:
    """Whether an option came later (`ADDED`) and has its default, so that the run is one that older versions knew."""
    return "added" in option.metadata and bool(getattr(thing, option.name) == option.default)


def validate_same(path: Path, before: Mapping[str, bytes], now: Mapping[str, bytes]) -> None:
    """Raise a `RunError` that names what decides the run in `path` and is not what it was when the run began."""
    if others := [name for name, value in now.items() if before.get(name, value) != value]:
        names = " and ".join([", ".join(others[:-1]), others[-1]] if others[1:] else others)
        raise RunError(f"{path} holds a run of another {names}; choose another folder, or change the {names} back")


def environment(**more: Any) -> dict[str, Any]:
    """What a result depends on besides its recipe."""
    return {
        "fedveil": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **more,
    }


def decided(
    task: Task, method: Method, cohort: CohortSampler, seed: int, rounds: int, noise: int | None
) -> dict[str, bytes]:
    """Fingerprints of what decides a run, by name: one that is resumed must share them."""
    data, sample = task.data, max(1, task.data.x.numel() // SAMPLED)
    records = [data.x.reshape(-1)[::sample], data.y, list(data.x.shape)]
    return {
        "method": fingerprint(method),
        "model": fingerprint([(layer.name, layer.start, layer.stop) for layer in task.layout.layers]),
        "data": fingerprint(*records, data.classes, task.loss),
        "split": fingerprint(task.clients.sizes, task.largest),
        "cohort": fingerprint(cohort),
        "seed": fingerprint(seed, noise),
    } | ({"number of rounds": fingerprint(rounds)} if method.reads_rounds else {})
