"""The configuration of the nginx in front of the SuperLink: nodes' requests pass, as long as the recipe's answers."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fedveil.core import schema
from fedveil.core.files import write
from fedveil.core.forecast import Turn
from fedveil.data import Data
from fedveil.data.splits import Share
from fedveil.runs import recipe
from fedveil.runs.recipe import Recipe

if TYPE_CHECKING:
    from fedveil.core.task import Task

SLACK = 1 << 16  # bytes; Flower's envelope around a frame has some hundred, its other requests a few thousand


def longest(plan: Recipe, data: Data) -> int:
    """The most bytes of a client's answer in any round of `plan`; the server refuses longer ones.

    data: any records of the recipe's kind; only their shapes and the number of classes count
    """
    largest, clients = plan.split.max_records or 1, plan.split.clients
    chosen = torch.arange(max(1, min(largest, data.classes)))  # whoever holds every class sends the most
    y = chosen if data.labelled else data.y[chosen % len(data.y)]
    task = plan.party(dataclasses.replace(data, x=data.x[chosen % len(data.x)], y=y, groups=None), 0)
    together = tuple(range(clients if plan.cohort.kind == "poisson" else min(plan.cohort.size, clients)))
    found = 0
    for client in range(clients):
        task.clients = Share.of(client, clients, len(chosen), largest, task.clients.held)
        for number in (1, plan.rounds):
            turn = Turn(client, largest, number, plan.rounds, number - 1, together, largest)
            found = max(found, _answer(plan, task, turn))
    return found


def _answer(plan: Recipe, task: Task, turn: Turn) -> int:
    """The longest answer of a turn."""
    method, found = plan.method, 0
    for question in method.forecast_messages(task, turn):
        sizes = {**method.schema(task, question, turn.client), **question.sizes()}
        found = max(found, schema.size_limit(method.reply(question), sizes))
    return found


def nginx(answer: int) -> str:
    """The configuration for answers of at most so many bytes."""
    text = (resources.files("fedveil") / "deploy" / "template" / "nginx.conf").read_text(encoding="utf-8")
    figures = {"LONGEST": f"{answer:,}", "SLACK": f"{SLACK:,}", "LIMIT": str(-(-(answer + SLACK) // 1024))}
    for name, figure in figures.items():
        text = text.replace(name, figure)
    return text


def rewrite(folder: Path) -> int:
    """Write nginx.conf of the deployment in `folder` for its present recipe; the most bytes of an answer."""
    if not (path := folder / "app" / "recipe.toml").is_file():
        raise ValueError(f"{folder} holds no deployment; 'fedveil deploy init {folder}' writes one")
    for name in [name for name in sys.modules if name.partition(".")[0] == "app"]:
        del sys.modules[name]
    sys.path.insert(0, str(folder.absolute()))
    try:
        load = importlib.import_module("app.data").load  # it may bring a method of its own
    finally:
        sys.path.remove(str(folder.absolute()))
    plan = recipe.read(str(path))
    answer = longest(plan, load(None, plan.split.clients))
    write(folder / "nginx.conf", nginx(answer).encode())
    return answer
