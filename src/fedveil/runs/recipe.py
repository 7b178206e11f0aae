"""Recipes: everything that decides a run, as a TOML file or a built-in name such as `digits/fedavg`."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from fedveil import data
from fedveil.core.losses import loss_by_name, outputs_of
from fedveil.core.method import Method
from fedveil.core.metrics import DEFAULTS, Primary, metrics_of, primary_of
from fedveil.core.sampling import CohortSampler
from fedveil.core.seeds import Seed
from fedveil.core.setup import settle
from fedveil.core.spelling import nearest
from fedveil.core.task import Task
from fedveil.core.version import ADDED
from fedveil.data import Data
from fedveil.data.files import data_directory
from fedveil.methods.fedavg import FedAvg
from fedveil.runs.fingerprint import fingerprint
from fedveil.runs.own import by_party, find_loss, find_metrics, load_data, load_part, make_model
from fedveil.runs.plugins import is_reference
from fedveil.runs.toml import written
from fedveil.runs.typed import typed
from fedveil.runs.unset import NONE
from fedveil.runs.weights import load_weights


@dataclass(frozen=True)
class TaskSpec:
    """Data set, model and loss, by name or by reference ("my_models:net"); the options are those of the data set's and
    the model's own functions."""

    data: str = "digits"
    model: str = "digits-cnn"
    loss: str = "cross-entropy"
    weights: str | None = None  # where training begins: a run folder, or a file of layers
    trainable: list[str] | None = field(default=None, metadata=ADDED)  # patterns of the parameters that are trained
    batch_norm: str | None = field(default=None, metadata=ADDED)  # federated, local or frozen
    data_options: dict[str, Any] = field(default_factory=dict)
    model_options: dict[str, Any] = field(default_factory=dict)
    loss_options: dict[str, Any] | None = field(default=None, metadata=ADDED)
    metrics: tuple[str, ...] = field(default=(), metadata=ADDED)  # the primary one first; none: as the loss suits
    validation: float = field(default=0.0, metadata=ADDED)  # share of the training records that is held out
    weights_seed: int | None = field(default=None, metadata=ADDED)  # of random weights; None: the run's

    def __post_init__(self) -> None:
        if not is_reference(self.loss):
            loss_by_name(self.loss, self.loss_options)
        metrics_of([name for name in self.metrics if not is_reference(name)])
        if not 0 <= self.validation < 1:
            raise ValueError(f"task.validation is {self.validation:g}; use a share of the records from 0 to below 1")

    @property
    def primary(self) -> Primary:
        """The primary metric, as far as it follows from the recipe."""
        first = [*self.metrics, *DEFAULTS.get(self.loss, ("accuracy",))][0]
        return Primary(first.partition(":")[2]) if is_reference(first) else primary_of(first)


@dataclass(frozen=True)
class SplitSpec:
    """How records are split over clients; the options are those of the kind."""

    kind: str = "iid"  # iid, dirichlet, classes, shards or natural
    clients: int = 10  # a natural split has as many as there are groups instead
    alpha: float | None = None
    classes: int | None = None
    shards: int | None = None
    min_records: int | None = None
    max_records: int | None = None  # the public bound on a client's records
    held: list[list[int]] | None = None  # the classes of each client, which are public; a classes split has its own
    seed: int | None = field(default=None, metadata=ADDED)  # of the split and what is held out; None: the run's

    @property
    def options(self) -> dict[str, Any]:
        chosen = {name: getattr(self, name) for name in ("alpha", "classes", "shards", "min_records")}
        return {name: value for name, value in chosen.items() if value is not None}


@dataclass(frozen=True)
class Recipe:
    """A run, before it begins."""

    rounds: int = 20
    seed: int = 0
    evaluate_every: int = 1
    target: float | None = None  # stop when the primary metric on the test records reaches it
    early_stopping: int | None = field(default=None, metadata=ADDED)  # evaluations without a better validation metric
    task: TaskSpec = field(default_factory=TaskSpec)
    split: SplitSpec = field(default_factory=SplitSpec)
    cohort: CohortSampler = field(default_factory=CohortSampler)
    method: Method = field(default_factory=FedAvg)

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.evaluate_every < 1:
            raise ValueError("rounds and evaluate_every are at least 1")
        if self.target is not None:
            self.task.primary.validate_target(self.target)
        if self.early_stopping is not None and self.early_stopping < 1:
            raise ValueError(f"early_stopping is {self.early_stopping}; use 1 evaluation or more")

    def build(self, directory: str | Path | None = None, fetch: bool = False, device: str = "cpu") -> Task:
        """Load the data, split it and make the model; all randomness is from the recipe's seed."""
        task = self.on(self.load(directory, fetch), device)
        task.origin = Origin(self, str(data_directory(directory).absolute()))
        return task

    @property
    def split_seed(self) -> Seed:
        """The seed of the data, of the records held out for validation, and of the split."""
        return Seed.root(self.seed if self.split.seed is None else self.split.seed)

    def load(self, directory: str | Path | None = None, fetch: bool = False) -> Data:
        """Load the data only."""
        seed = self.split_seed.child("data")
        return load_data(self.task.data, self.task.data_options, directory, fetch, self.split.clients, seed)

    def on(self, loaded: Data, device: str = "cpu") -> Task:
        """The same with data that is loaded already."""
        if self.task.validation:
            loaded = data.hold_out(loaded, self.task.validation, self.split_seed)
        parts = self._split(loaded)
        held = parts.held if self.split.held is None else self._held()
        return self.assembled(loaded, dataclasses.replace(parts, max_records=self.split.max_records, held=held), device)

    def part(self, partition: int | None, directory: str | Path | None = None) -> Data:
        """The records of one party of a deployment, client `partition` or the server (None): those that a data function
        with a parameter `partition` returns, or in a rehearsal a part of data that everybody can read."""
        if by_party(named := self.task.data):
            seed = self.split_seed.child("data")
            return load_part(named, self.task.data_options, directory, partition, self.split.clients, seed)
        whole = self.load(directory)
        if partition is None:
            return dataclasses.replace(whole, x=whole.test_x, y=whole.test_y, groups=None)
        own = self._split(whole)[partition]
        return dataclasses.replace(whole, x=whole.x[own], y=whole.y[own], groups=None)

    def _split(self, loaded: Data) -> data.Split:
        clients = None if self.split.kind == "natural" else self.split.clients
        return data.split(self.split.kind, loaded, clients, self.split_seed, **self.split.options)

    def _held(self) -> tuple[tuple[int, ...], ...] | None:
        """The classes of each client, where the recipe says them."""
        if self.split.held is None:
            return None
        if len(self.split.held) != self.split.clients:
            raise ValueError(f"split.held lists {len(self.split.held)} clients, but there are {self.split.clients}")
        return tuple(tuple(sorted(set(each))) for each in self.split.held)

    def party(self, own: Data, client: int | None, device: str = "cpu") -> Task:
        """The task of one party of a deployment: client `client` with its own records, or the server (None) with test
        records only. Public are split.clients and split.max_records, and nothing else about who holds what."""
        if self.split.max_records is None:
            raise ValueError(
                "split.max_records is not set; a deployment needs the most records that any client may hold"
            )
        if self.cohort.kind == "weighted":
            raise ValueError("cohort.kind is 'weighted', but a server does not know who holds how much; use uniform")
        if self.cohort.buffer is not None:
            raise ValueError(
                f"cohort.buffer is {self.cohort.buffer}, which simulates when answers arrive, but a deployed server "
                "waits for its cohort; leave it out, and set cohort.deadline"
            )
        if self.method.over(self.rounds) != self.method:
            raise ValueError(
                "a schedule is 'cosine', but a deployed client does not know the number of rounds; set schedule_rounds"
            )
        if self.task.validation:
            told = f"task.validation is {self.task.validation:g}, but a server holds no training records"
            raise ValueError(f"{told}; set it to 0, and give the server's data validation records")
        share = data.Share.of(client, self.split.clients, len(own.x), self.split.max_records, self._held())
        return self.assembled(own, share, device)

    def assembled(self, loaded: Data, parts: data.Split, device: str) -> Task:
        """The task, of records that are split already."""
        own = self.task.weights_seed
        seed = Seed.root(self.seed if own is None else own).child("weights")
        loss = find_loss(self.task.loss, self.task.loss_options)
        model = make_model(self.task.model, self.task.model_options, loaded.input, outputs_of(loss, loaded), seed)
        if self.task.weights is not None:
            load_weights(model, Path(self.task.weights), self.task.trainable)
        return Task(
            model,
            loaded,
            parts,
            loss=loss,
            metrics=find_metrics(self.task.metrics),
            trainable=self.task.trainable,
            batch_norm=self.task.batch_norm,
            device=pick_device(device),
        )

    def settled(self, task: Task) -> Recipe:
        """The recipe with a number in place of a noise "auto"."""
        return dataclasses.replace(self, method=settle(task, self.method, self.cohort, self.rounds, self.seed))

    def fingerprint(self) -> bytes:
        """What tells this recipe from others, but for how long the run goes on and how often it is evaluated."""
        return fingerprint(dataclasses.replace(self, rounds=1, evaluate_every=1, target=None, early_stopping=None))

    def toml(self) -> str:
        """The recipe as TOML, every value spelled out; reading it gives the same recipe."""
        return written(self)


@dataclass(frozen=True)
class Origin:
    """How a task was built: its recipe, and the folder of the data sets. `fv.run` writes both to a run folder."""

    recipe: Recipe
    data_dir: str


def pick_device(name: str) -> str:
    """`auto` is a GPU where there is one."""
    if name not in ("auto", "cpu", "cuda") and not name.startswith("cuda:"):
        raise ValueError(f"device '{name}' is not known; use auto, cpu or cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for but PyTorch finds no GPU; use --device cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


# ---------------------------------------------------------------------------------------------------- reading


def names() -> list[str]:
    """The built-in recipes."""
    root = resources.files("fedveil") / "runs" / "recipes"
    found = (
        f"{d.name}/{f.name[:-5]}" for d in root.iterdir() if d.is_dir() for f in d.iterdir() if f.name.endswith(".toml")
    )
    return sorted(found)


def read(source: str, changes: Iterable[str] = ()) -> Recipe:
    """A recipe from a built-in name or a TOML file, with `key=value` changes on top; `key=none` unsets a key."""
    table = tables(source)
    for change in changes:
        key, found, value = change.partition("=")
        if not found or not key:
            raise ValueError(f"--set takes key=value, not '{change}'")
        _put(table, key.strip().split("."), None if value.strip() == NONE else _value(value.strip()))
    return parse(table)


def parse(table: Mapping[str, Any]) -> Recipe:
    """A recipe from nested tables. A wrong key or value is one sentence that names it."""
    recipe: Recipe = typed(Recipe, table)
    return recipe


def tables(source: str, depth: int = 0) -> dict[str, Any]:
    """The tables of a recipe, laid over those of the recipe it is `like`."""
    own = source.endswith(".toml")
    if own and not Path(source).is_file():
        raise ValueError(f"there is no recipe file {source}")
    if not own and source not in names():
        raise ValueError(f"there is no recipe '{source}'{nearest(source, names()) or '; see fedveil list recipes'}")
    file = Path(source) if own else resources.files("fedveil") / "runs" / "recipes" / f"{source}.toml"
    try:
        table = tomllib.loads(file.read_bytes().decode())
    except ValueError as error:
        raise ValueError(f"recipe {source} is not valid TOML: {error}") from None
    base = table.pop("like", None)
    if base is None:
        return table
    if not isinstance(base, str) or depth > 8:
        raise ValueError(f"recipe {source}: 'like' names one other recipe, and never in a circle")
    if base.endswith(".toml") if own else "/" not in base:
        base = (Path(source).parent / base).as_posix()
    return _over(tables(base, depth + 1), table)


def _over(base: dict[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = _over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _put(table: dict[str, Any], path: list[str], value: Any) -> None:
    for i, part in enumerate(path[:-1]):
        if table.get(part) is None:
            table[part] = {}
        table = table[part]
        if not isinstance(table, dict):
            raise ValueError(f"'{'.'.join(path[: i + 1])}' is a value, so it has no '{path[i + 1]}'")
    table[path[-1]] = value


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text
