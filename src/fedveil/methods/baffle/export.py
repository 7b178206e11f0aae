"""A task's model as an ONNX graph whose trained weights are inputs, and with it a client that needs no PyTorch."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.core.losses import targets
from fedveil.core.seeds import Seed
from fedveil.core.task import Task
from fedveil.methods.baffle import graph
from fedveil.methods.baffle.baffle import Baffle
from fedveil.methods.baffle.edge.model import Model
from fedveil.methods.baffle.edge.replayed import Server
from fedveil.methods.baffle.probing import forward_only
from fedveil.privacy.account import Account
from fedveil.privacy.secagg.rules import Rules

PACKAGE = "fedveil_edge"
MEMORY = 4 << 20  # bytes of activations that the client's passes may hold
EDGE = "fedveil.methods.baffle.edge"
BASE = ("core.refused", "core.seeds", "core.directions")
REPLAYED = ("core.digests", "core.version", "train.moments", "train.schedules")
PRIVATE = ("privacy.draws", "privacy.skellam", "privacy.secagg.masks")
SUMMED = (
    *("core.digests", "core.identity"),
    *(f"privacy.secagg.{name}" for name in ("context", "graph", "masks", "party", "rules", "shamir")),
)


def export(
    task: Task, method: Baffle, folder: Path, quantise: bool = False, seed: Seed | None = None
) -> dict[str, Any]:
    """Write model, settings and client to `folder`; what they are, in figures.

    quantise: weights that are not trained become 8-bit integers with a scale a layer
    seed:     the public root of the run, for secure sums
    """
    if method.local:
        raise ValueError("the edge client takes no local steps; leave method.local out")
    method.init_state(task)  # says what the method cannot do with this task
    settings, beside = _settings(task, method, seed), folder.with_name(folder.name + ".new")
    beside.mkdir(parents=True)
    try:
        trained = [name for name, *_, is_trained in settings["layers"] if is_trained]
        made = graph.write(task, trained, beside, wide=settings["float"] == "float64", quantise=quantise)
        settings["lengths"] = made.lengths
        if method.down == "replay":
            np.save(beside / "initial.npy", task.initial.cpu().numpy())
        (beside / "settings.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        if not quantise:
            _check(task, beside, settings)
        copied = _copy(beside / PACKAGE, settings)
        os.replace(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    counted = sum(stop - start for _, _, start, stop, is_trained in settings["layers"] if is_trained)
    weights = {"weights": task.layout.size, "trained": counted, "frozen": made.frozen}
    needs = ["numpy", "onnxruntime", *(["cryptography"] if "fedveil.privacy.secagg.masks" in copied else [])]
    return {"folder": str(folder), **weights, "bytes": made.bytes, "needs": " ".join(needs)}


def _settings(task: Task, method: Baffle, seed: Seed | None) -> dict[str, Any]:
    """All that the client goes by."""
    places = method.places(task)
    chosen = set(range(task.layout.size) if places is None else places.tolist())
    layers = [(each.name, list(each.shape), each.start, each.stop, each.start in chosen) for each in task.layout.layers]
    told = {name: getattr(method, name) for name in ("directions", "law", "scheme", "seeds", "batch", "weak", "share")}
    told |= {"sigma": method.scale, "down": method.down, "clip": method.clip}
    data, secure, privacy = task.data, method.secure, method.privacy
    told |= {
        "input": list(data.input),
        "target": list(task.y.shape[1:]),
        "x": "float32" if task.x.is_floating_point() else "int64",
        "y": "float32" if task.y.is_floating_point() else "int64",
        "classes": data.classes if targets(task.loss) == "labels" and task.y.dim() == 1 else None,
        "padding": data.padding,
        "layers": layers,
        "float": "float64" if privacy else "float32",
        "at_once": max(1, MEMORY // ((8 if privacy else 4) * task.activations)),  # records a pass
        "largest": task.largest,
        "server": None,
        "secure": None,
        "privacy": None,
    }
    if method.down == "replay":
        told["server"] = {each.name: getattr(method.server, each.name) for each in fields(Server)}
        if callable(method.server.schedule):
            raise ValueError("server.schedule is a function, which cannot be exported; use constant or cosine")
        method.server.factor(1)  # says if a cosine has no length
    if secure:
        if seed is None:
            raise ValueError("a secure sum goes by the public seed of the run; give export(…, seed=fv.Seed.root(n))")
        even = {each.name: getattr(secure, each.name) for each in fields(Rules)}
        told |= {"secure": even, "heaviest": 1 if privacy else task.largest, "seed": seed.key.hex()}
    if privacy:
        account, batch = method.client_cost(task), min(method.batch or task.largest, task.largest)
        assert account
        how = {"clip": privacy.clip, "sigma": privacy.sigma, "mechanism": privacy.mechanism}
        told["privacy"] = {**how, "rate": privacy.rate(task, batch), "batch": batch, "answers": _most_answers(account)}
    return told


def _copy(folder: Path, settings: dict[str, Any]) -> list[str]:
    """Copy the client's modules into one folder, as far as the settings need them; their names."""
    own, shared = ["__init__", "__main__", "client", "frames", "model", "probing"], [*BASE]
    for part, name, modules in (
        ("server", "replayed", REPLAYED),
        ("privacy", "private", PRIVATE),
        ("secure", "summed", SUMMED),
    ):
        if settings[part]:
            own, shared = [*own, name], [*shared, *modules]
    if len(own) > 6:
        own, shared = [*own, "store"], [*shared, "core.files"]
    names = dict.fromkeys([*(f"fedveil.{name}" for name in shared), *(f"{EDGE}.{name}" for name in own)])
    folder.mkdir()
    for name in names:
        module = import_module(name.removesuffix(".__init__"))
        source = re.sub(r"^( *)from (fedveil[\w.]*) import", _moved, inspect.getsource(module), flags=re.MULTILINE)
        (folder / f"{name.rpartition('.')[2]}.py").write_text(source, encoding="utf-8")
    return list(names)


def _moved(line: re.Match[str]) -> str:
    """The beginning of an import in the flat copy of the package."""
    indent, name = line.groups()
    is_package = hasattr(import_module(name), "__path__")
    return f"{indent}from {PACKAGE if is_package else f'{PACKAGE}.' + name.rpartition('.')[2]} import"


def _check(task: Task, folder: Path, settings: dict[str, Any]) -> None:
    """Raise a ValueError unless the graph computes the losses that PyTorch does."""
    wide = settings["float"] == "float64"
    x, y, w = task.x[:3].cpu(), task.y[:3].cpu(), task.initial
    with forward_only(task.device):
        given = (w.double(), x.double() if x.is_floating_point() else x) if wide else (w, x)
        expected = task.loss(task.f(*(t.to(task.device) for t in given)).double(), y.to(task.device)).cpu().numpy()
    try:
        x_, y_ = x.numpy().astype(settings["x"]), y.numpy().astype(settings["y"])
        found = Model(folder, settings).losses(w.cpu().numpy(), x_, y_)
    except Exception as error:  # the runtime fails in many ways
        what = "in float64, which method.privacy needs" if wide else "as it was exported"
        raise ValueError(
            f"ONNX Runtime does not run this model {what}: {' '.join(str(error).split())[:200]}"
        ) from error
    if not np.allclose(found, expected, 1e-3, 1e-4):  # tables of a model may be float32 in either
        raise ValueError(
            f"the exported model has losses {found.tolist()} where PyTorch has {expected.tolist()}; it cannot be used"
        )


def _most_answers(account: Account) -> int | None:
    """How many private answers the budget allows; None: there is none."""
    if account.promise.budget is None:
        return None
    low, high = 0, 1
    while not account.exceeded(high) and high < 1 << 30:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if account.exceeded(middle) else (middle, high)
    return low
