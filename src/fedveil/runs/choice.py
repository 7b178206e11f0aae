"""Which measured recipe suits a situation: what it costs there, what it proves, and how far that goes beyond what was
measured.

`measured.json` has the recipes of the digits that were tuned and measured alike (results/tuned.py writes it). A
recipe's method is put on the user's task, split and cohort, and its cost there is forecast as `fedveil cost` does it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import msgspec
import numpy as np
from rich.filesize import decimal

from fedveil.core.account import AUTO
from fedveil.core.capability import FORWARD_PASSES
from fedveil.core.data import Data, Split
from fedveil.core.ledger import Right
from fedveil.core.task import Task
from fedveil.runs import recipe
from fedveil.runs.cost import cost
from fedveil.runs.recipe import Recipe
from fedveil.runs.statistics import Bits, Difference, Spread, crossed, paired, spread

FILE = "measured.json"
UNITS = {"record": "privacy", "client": "user_privacy"}  # what ε protects -> the method's key
DELTA = 1e-5


class MeasuredRun(msgspec.Struct, frozen=True):
    """A run of a measured recipe."""

    seed: int
    accuracy: float
    right: Right | None = None


class Measured(msgspec.Struct, frozen=True):
    """A recipe and its runs: a built-in recipe with changes, as for `--set`."""

    name: str
    recipe: str
    changes: list[str]
    runs: list[MeasuredRun]
    records: int  # the most that a client had
    epsilon: float | None = None

    @property
    def plan(self) -> Recipe:
        return recipe.read(self.recipe, self.changes)

    @property
    def accuracies(self) -> dict[int, float]:
        return {run.seed: run.accuracy for run in self.runs}

    @property
    def value(self) -> Spread:
        """The test accuracy over seeds."""
        return spread(list(self.accuracies.values()))

    def difference(self, base: Measured) -> Difference | None:
        """How far its accuracy is from that of another one, by seed and test record."""
        right, of_base = self._bits(), base._bits()
        return crossed(right, of_base) if right and of_base else paired(self.accuracies, base.accuracies)

    def _bits(self) -> dict[int, Bits]:
        return {run.seed: run.right.unpacked() for run in self.runs if run.right} if self._all_say else {}

    @property
    def _all_say(self) -> bool:
        return all(run.right for run in self.runs)


class Table(msgspec.Struct, frozen=True):
    """All measured recipes, and where their figures come from."""

    command: str
    commit: str
    rows: list[Measured]


def measured() -> Table:
    """The table that comes with fedveil."""
    return msgspec.json.decode((resources.files(__package__) / FILE).read_bytes(), type=Table)


@dataclass(frozen=True)
class Wish:
    """What a situation asks for; None: anything. Bytes, passes and memory are of one client in one round."""

    uplink: float | None = None
    downlink: float | None = None
    total: float | None = None  # bytes of all clients, both ways, over all rounds
    rounds: int | None = None
    passes: int | None = None
    memory: float | None = None
    epsilon: float | None = None
    delta: float = DELTA
    unit: str = "record"
    backprop: bool = True
    secure: bool = False

    def __post_init__(self) -> None:
        for name in ("uplink", "downlink", "total", "passes", "memory", "epsilon", "rounds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"--{name} is {value:g}; use a number above 0")
        if not 0 < self.delta < 1:
            raise ValueError(f"--delta is {self.delta:g}; use a number between 0 and 1")
        if self.unit not in UNITS:
            raise ValueError(f"--unit is '{self.unit}'; use {' or '.join(UNITS)}")


@dataclass(frozen=True)
class Broken:
    """A wish that a candidate does not grant: the option, why, and how many times too much it is."""

    option: str
    why: str
    excess: float = math.inf


@dataclass(frozen=True)
class Candidate:
    """A measured recipe on the user's task: what it costs there, or why it does not work there."""

    row: Measured
    plan: Recipe
    told: Mapping[str, Any] | None  # what `cost` tells
    failed: str = ""  # why it cannot run there
    broken: tuple[Broken, ...] = ()  # wishes that it does not grant

    @property
    def fits(self) -> bool:
        return not self.failed and not self.broken

    @property
    def bytes(self) -> int:
        """Bytes of all clients, both ways, over all rounds."""
        assert self.told
        return int(self.told["up"]["total"] + self.told["down"]["total"])

    @property
    def memory(self) -> int:
        """What a client needs for weights and activations, as an estimate."""
        assert self.told
        return int(sum(self.told["memory_estimate"].values()))


def consider(
    wish: Wish, plan: Recipe, task: Task, table: Table, tell: Callable[[int, int], object] = lambda done, of: None
) -> list[Candidate]:
    """All candidates for a task, those that fit first and the best of them first. Recipes that were measured on IID
    clients are none for a task with others, and the other way round.

    plan: the recipe of the task, whose split, cohort and seed are taken
    tell: is told how many candidates of how many are done
    """
    rows = [row for row in table.rows if _skewed(row.plan) == _skewed(plan)]
    found = []
    for done, row in enumerate(rows):
        tell(done, len(rows))
        found.append(_candidate(wish, plan, task, row))
    return ranked(found)


def _skewed(plan: Recipe) -> bool:
    return plan.split.kind != "iid"


def ranked(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that fit before those that do not. Of those that fit, first the `unbeaten` ones, by their bytes; then the
    others, by accuracy. Of those that do not fit, first the ones that come nearest."""
    fits = sorted((each for each in found if each.fits), key=lambda each: -each.row.value.mean)
    first = sorted(unbeaten(fits), key=lambda each: each.bytes)
    rest = [each for each in fits if each not in first]
    others = [each for each in found if not each.fits]

    def distance(each: Candidate) -> tuple[bool, int, float]:
        return bool(each.failed), len(each.broken), max((b.excess for b in each.broken), default=math.inf)

    return first + rest + sorted(others, key=distance)


def unbeaten(fits: Sequence[Candidate]) -> list[Candidate]:
    """Those of which no other one is seen to be more accurate, by the interval of their difference."""
    return [each for each in fits if not any(_beats(other, each) for other in fits)]


def _beats(one: Candidate, other: Candidate) -> bool:
    difference = one.row.difference(other.row)
    return difference is not None and difference.low > 0


def _candidate(wish: Wish, plan: Recipe, task: Task, row: Measured) -> Candidate:
    source = row.plan
    own = dataclasses.replace(plan, rounds=source.rounds, method=source.method, target=None, early_stopping=None)
    broken = [*_traits(wish, own), *_participation(source, own, task)]
    if not broken:
        own = _private(wish, own)
        try:
            told = cost(task, own)
        except ValueError as error:
            return Candidate(row, own, None, failed=str(error))
        broken = [*_amounts(wish, told)]
        return Candidate(row, own, told, broken=tuple(broken))
    return Candidate(row, own, None, broken=tuple(broken))


def _participation(source: Recipe, plan: Recipe, task: Task) -> Iterator[Broken]:
    """Where clients differ, a round without some of them lacks what only they know. A method that was measured with all
    of them in every round is none for rounds of a few."""
    everybody = source.cohort.size >= source.split.clients
    if _skewed(source) and everybody and plan.cohort.size < len(task.clients):
        yield Broken("--cohort", "was measured with all clients in every round", len(task.clients) / plan.cohort.size)


def _private(wish: Wish, plan: Recipe) -> Recipe:
    """The recipe with the noise that the wished ε needs."""
    promise: Any = plan.method.promise
    if wish.epsilon is None or promise is None:
        return plan
    promise = dataclasses.replace(promise, noise=AUTO, budget=wish.epsilon, delta=wish.delta)
    changed: Any = dataclasses.replace(plan.method, **{promise.key: promise})  # type: ignore[type-var]
    return dataclasses.replace(plan, method=changed)


def _traits(wish: Wish, plan: Recipe) -> Iterator[Broken]:
    """Wishes that the method cannot grant, whatever the task."""
    method: Any = plan.method
    if not wish.backprop and (needs := [each for each in method.needs if each != FORWARD_PASSES]):
        yield Broken("--no-backprop", f"needs {needs[-1]}")
    if wish.secure and getattr(method, "secure", None) is None:
        yield Broken("--secure", "shows the server the message of each client")
    promise = method.promise
    if wish.epsilon is not None and (promise is None or promise.key != UNITS[wish.unit]):
        yield Broken("--epsilon", f"has no differential privacy for each {wish.unit}")
    if wish.rounds is not None and plan.rounds > wish.rounds:
        yield Broken("--rounds", f"was measured with {plan.rounds} rounds", plan.rounds / wish.rounds)


def _amounts(wish: Wish, told: Mapping[str, Any]) -> Iterator[Broken]:
    """Amounts that are too large."""
    up, down, memory = told["up"], told["down"], sum(told["memory_estimate"].values())
    amounts = (
        ("--uplink", wish.uplink, up["most"], f"sends {decimal(up['most'])}"),
        ("--downlink", wish.downlink, down["most"], f"receives {decimal(down['most'])}"),
        ("--total", wish.total, both := up["total"] + down["total"], f"moves {decimal(both)}"),
        ("--passes", wish.passes, told["passes"]["most"], f"takes {told['passes']['most']:,} passes"),
        ("--memory", wish.memory, memory, f"takes about {decimal(memory)}"),
        ("--epsilon", wish.epsilon, told["epsilon"] or 0.0, f"charges ε {told['epsilon'] or 0.0:.4g}"),
    )
    for option, most, amount, why in amounts:
        if most is not None and amount > most:
            yield Broken(option, why, amount / most)


# ------------------------------------------------------------------------------------------------ what to say of it


def proves(plan: Recipe) -> list[tuple[str, str]]:
    """The labelled privacy claims of a recipe's method: those of the options that it uses, and others. What attacks
    measured is of the method without these options, so it is left out if there are some."""
    method: Any = plan.method
    options = (*UNITS.values(), "secure")
    used = tuple(f"with {key}:" for key in options if getattr(method, key, None) is not None)
    found = [(kind, sentence) for kind, sentence in method.about.claims if sentence.startswith(used)] if used else []
    others = [
        claim for claim in method.about.claims if not claim[1].startswith(tuple(f"with {key}:" for key in options))
    ]
    return found + [claim for claim in others if not found or claim[0] != "measured"]


def beyond(candidate: Candidate, task: Task, imagined: bool) -> list[str]:
    """How the task differs from the one in which the candidate's accuracy was measured, a sentence each.

    imagined: whether its clients are imagined ones
    """
    row, plan = candidate.row, candidate.plan
    source, found = row.plan, []
    if (plan.task.data, plan.task.model, plan.task.loss) != (source.task.data, source.task.model, source.task.loss):
        found.append(
            f"The accuracy is of {source.task.model} on {source.task.data}; yours is {plan.task.model} on "
            f"{plan.task.data}, with {task.layout.size:,} weights."
        )
    ours = (source.cohort.size, source.split.clients, row.records)
    yours = (min(plan.cohort.size, len(task.clients)), len(task.clients), task.largest)
    if imagined or ours != yours:
        asked, clients, records = ours
        found.append(
            f"It was measured with {asked} of {clients:,} clients a round and up to {records:,} records each; yours "
            f"are {yours[0]:,} of {yours[1]:,}, with up to {yours[2]:,}."
        )
    if (source.split.kind, source.split.options) != (plan.split.kind, plan.split.options):
        found.append(f"Its split was {_split(source)}; yours is {_split(plan)}.")
    promised, measured_at = plan.method.promise, source.method.promise
    if promised and measured_at and row.epsilon is not None and candidate.told:
        epsilon, noise = candidate.told["epsilon"], candidate.told["noise"]
        if (f"{epsilon:.3g}", promised.delta) != (f"{row.epsilon:.3g}", measured_at.delta):
            found.append(
                f"It was measured at ε {row.epsilon:.3g} and δ {measured_at.delta:g}; yours has ε {epsilon:.3g} at δ "
                f"{promised.delta:g}, with noise {noise:.3g}."
            )
    return found


def _split(plan: Recipe) -> str:
    options = ", ".join(f"{key} {value}" for key, value in plan.split.options.items())
    return f"{plan.split.kind} ({options})" if options else plan.split.kind


# ------------------------------------------------------------------------------------------------ the user's clients


def placed(plan: Recipe, loaded: Data, records: int | None = None) -> tuple[Recipe, Task]:
    """The recipe and its task, both with a public bound on a client's records, which differential privacy needs. By
    default, the bound is what the largest client holds.

    records: clients are imagined ones with so many records each; None: the recipe's split
    """
    if plan.split.max_records is None:
        most = plan.on(loaded).largest if records is None else records
        plan = dataclasses.replace(plan, split=dataclasses.replace(plan.split, max_records=most))
    return plan, plan.on(loaded) if records is None else _imagined(plan, loaded, records)


def _imagined(plan: Recipe, loaded: Data, records: int) -> Task:
    """The task with as many clients as the split names, each with `records` records. All hold the same ones, repeated
    where the data have fewer. It serves forecasts, which look at numbers of records only."""
    kept, held = np.arange(len(loaded.x)), None
    if (classes := plan.split.classes) and loaded.y.ndim == 1:
        kept = kept[np.asarray(loaded.y) < classes]
        held = (tuple(range(classes)),) * plan.split.clients
    rows = np.resize(kept, records)
    data = dataclasses.replace(loaded, x=loaded.x[rows], y=loaded.y[rows], groups=None)
    order, starts = np.tile(np.arange(records), plan.split.clients), np.arange(plan.split.clients + 1) * records
    return plan.assembled(data, Split(order, starts, plan.split.kind, plan.split.max_records, held), "cpu")
