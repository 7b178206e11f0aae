"""`check_method`: what every method must do, tried on a toy task."""

from __future__ import annotations

import dataclasses
import tempfile
import tomllib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fedveil as fv
from fedveil.core import message
from fedveil.core.clients import Reply
from fedveil.core.message import KINDS, Envelope
from fedveil.runs import recipe
from fedveil.runs.cost import turn_bytes, turns_of
from fedveil.testing.attacks import attacks
from fedveil.testing.toys import ROUNDS, Observed, Trial, dropped, label, require, tampered, toy_task, trial

CLOSE = 1e-5  # how far weights may be apart because of rounding
CULPRIT = 2  # the client that attacks
KINDS_OF_CLAIMS = ("proved", "measured", "heuristic")
SECURE = fv.SecureSum(clip=16.0, bits=40)
FLOWER = (
    "Flower is not installed, so check_method did not compare engines; to do so, run: pip install 'fedveil[flower]'"
)


@dataclass
class Case:
    """A method, the toy task, and a run that several checks look at."""

    method: fv.Method
    task: fv.Task
    close: float = CLOSE

    @cached_property
    def plain(self) -> Trial:
        return trial(self.method, self.task)


def check_method(method: fv.Method, close: float = CLOSE) -> None:
    """Raise an AssertionError with one sentence if a method breaks a rule that every method must keep.

    The checks run in seconds on a toy task, with the settings that the method has. Give it settings that are quick: a
    few steps and a few points. `METHOD_CHECKS` lists what is checked, in order.

    close: how far weights may be apart if clients answer in one stack and not one by one
    """
    require(isinstance(method, fv.Method), f"check_method takes a method, not {called(method)}; give it an instance")
    case = Case(method, toy_task(), close)
    for check in METHOD_CHECKS.values():
        check(case)


def called(thing: object) -> str:
    """What somebody gave instead of an instance."""
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"a {type(thing).__name__}"


def check_described(case: Case) -> None:
    """A method is a frozen dataclass, registered under its name, and says what it sends and what its privacy is."""
    method = case.method
    kind = type(method)
    known = getattr(kind, "name", None)
    require(known, f"{kind.__name__} has no name; state `name: ClassVar[str]` so that recipes can use it")
    require(
        fv.METHODS.get(str(known)) is kind,
        f"{kind.__name__} is not the method that is registered as '{known}'; state a name of its own in the class",
    )
    frozen = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen
    require(frozen, f"{kind.__name__} is no frozen dataclass; put @dataclass(frozen=True) above the class")
    about = getattr(kind, "about", None)
    require(
        isinstance(about, fv.About), f"{known} has no `about`; state `about: ClassVar[fv.About]` for `fedveil describe`"
    )
    assert isinstance(about, fv.About)
    for each in dataclasses.fields(about):
        value = getattr(about, each.name)
        if each.name != "claims":
            said = isinstance(value, str) and value.strip()
            require(said, f"{known}: about.{each.name} is {value!r}; say it in a sentence")
    require(about.claims, f"{known}: about.claims is empty; say what protects clients, or that nothing does")
    for claim, sentence in about.claims:
        require(
            claim in KINDS_OF_CLAIMS,
            f"{known}: the claim '{sentence}' is labelled '{claim}'; label it {', '.join(KINDS_OF_CLAIMS[:-1])} or "
            f"{KINDS_OF_CLAIMS[-1]}",
        )


def check_recipe(case: Case) -> None:
    """A recipe with the method, written and read again, gives an equal method."""
    method = case.method
    try:
        text = fv.Recipe(method=method).toml()
        found = recipe.parse(tomllib.loads(text)).method
    except Exception as error:
        raise AssertionError(
            f"{label(method)}: a recipe with it cannot be written and read again ({error}); let its fields be numbers, "
            "text, lists of these, and dataclasses"
        ) from error
    require(
        found == method,
        f"{label(method)}: its recipe gives {found} in place of {method}; let its fields be numbers, text, lists of "
        "these, and dataclasses",
    )


def check_run(case: Case) -> None:
    """A run has an answer from every client, moves the weights, and gives the same when it is repeated."""
    method, task = case.method, case.task
    first = case.plain
    for row in first.rows:
        for client, why in row.missing.items():
            raise AssertionError(
                f"{label(method)}: client {client} gave no answer in round {row.round} ({why}); fix its handler"
            )
        for event in row.events:
            raise AssertionError(f"{label(method)}: in round {row.round} of an ordinary run this happened: {event}")
    require(torch.isfinite(first.weights).all(), f"{label(method)}: its weights are not finite after {ROUNDS} rounds")
    require(
        not torch.equal(first.weights, task.initial),
        f"{label(method)}: {ROUNDS} rounds left the weights as they were; let `round` return a state with new weights",
    )
    require(
        first.equals(trial(method, task)),
        f"{label(method)}: two runs with one seed differ; draw from stack.seeds, stack.secrets and cohort.seed only",
    )


def check_stacks(case: Case) -> None:
    """A client's answer does not depend on who is in its stack."""
    method, task = case.method, case.task
    alone = trial(method, task, engine=Observed(stack=1)).weights
    together = trial(method, task, engine=Observed(stack=len(task.clients))).weights
    apart = _apart(alone, together)
    require(
        apart <= case.close,
        f"{label(method)}: weights differ by {apart:.2g} if clients answer in one stack and not one by one, where "
        f"{case.close:g} is rounding; let row k of every tensor depend on client k alone",
    )


def check_wires(case: Case) -> None:
    """A run whose messages stay what they are gives the same as one whose messages are bytes, bit for bit."""
    found = trial(case.method, case.task, engine=Observed(wire="memory"))
    apart = _apart(found.weights, case.plain.weights)
    require(
        found.equals(case.plain),
        f"{label(case.method)}: without bytes between server and clients the weights differ by {apart:.2g}, or the "
        "ledger does; change no tensor of a message in place, and compute on the task's device",
    )


def check_memory(case: Case) -> None:
    """What clients remember fits into frames, and says which of it is the server's."""
    method = case.method
    clients = case.plain.engine.clients
    for client, entries in clients.memory.entries.items():
        for round_, serial, part, record in entries:
            kind, told = type(record).__name__, f"{label(method)}: clients remember a {type(record).__name__}"
            require(KINDS.get(getattr(record, "kind", -1)) is type(record), f"{told}, which is not registered; put "
                    f"@message.kind above {kind}")  # fmt: skip
            require(
                record.common is not None,
                f"{told} in '{part}' that does not state `common`; list the fields that the server supplied, or "
                "`common = ()`",
            )
            for name in record.common or ():
                require(name in record.__struct_fields__, f"{told}, whose `common` names '{name}', which is no field")
            frame = message.frame(record, Envelope(clients.run, round_, client, serial))
            again = message.frame(message.unfold(frame), Envelope(clients.run, round_, client, serial))
            require(frame == again, f"{told} that is another one after a checkpoint; use tensors and plain numbers")


def check_resume(case: Case) -> None:
    """A run that stopped after round 1 and was resumed is the run that did not stop, bit for bit."""
    method, task = case.method, case.task
    with tempfile.TemporaryDirectory() as home:
        whole = trial(method, task, folder=Path(home) / "whole")
        trial(method, task, folder=Path(home) / "halves", stop=lambda: True)
        resumed = trial(method, task, folder=Path(home) / "halves")
    apart = _apart(whole.weights, resumed.weights)
    require(
        torch.equal(whole.weights, resumed.weights),
        f"{label(method)}: after a resume from round 1 the weights differ by {apart:.2g}; keep what a round needs in "
        "the state's slots or in the clients' memory, and nowhere else",
    )
    require(
        whole.rows == resumed.rows,
        f"{label(method)}: after a resume the ledger has other rows; {_other(whole, resumed)}",
    )


def _other(a: Trial, b: Trial) -> str:
    """The first field in which two ledgers differ."""
    for one, two in zip(a.rows, b.rows, strict=False):
        for name in one.__struct_fields__:
            if getattr(one, name) != getattr(two, name):
                return f"in round {one.round} `{name}` is {getattr(two, name)} where it was {getattr(one, name)}"
    return f"{len(b.rows)} rows where there were {len(a.rows)}"


def check_hostile(case: Case) -> None:
    """A hostile answer is refused by name, and counts as little as one that never came."""
    method, task = case.method, case.task
    honest: dict[int, bytes] = {}

    def note(letter: Any, reply: Reply) -> Reply:
        if letter.client == CULPRIT and letter.envelope.round == 1:
            honest[letter.envelope.serial] = reply.frame
        return reply

    trial(method, task, engine=Observed(change=note))
    for serial, noted in honest.items():
        without = trial(method, task, engine=Observed(change=dropped(CULPRIT, 1, serial)))
        for name in attacks(noted):
            change = tampered(CULPRIT, 1, serial, _attacking(name))
            found = trial(method, task, engine=Observed(change=change))
            told = f"{label(method)}: {name}, sent by client {CULPRIT} in answer {serial + 1} of round 1,"
            row = found.rows[0]
            why = [row.missing.get(str(CULPRIT), ""), *(e for e in row.events if e.startswith(f"client {CULPRIT}:"))]
            require(
                any("refused" in each for each in why),
                f"{told} is not refused; state shape, dtype and range of every field with Shape, and check the rest "
                "with cohort.reject",
            )
            require(torch.isfinite(found.weights).all(), f"{told} makes weights that are not finite")
            require(
                torch.equal(found.weights, without.weights),
                f"{told} changes the weights by {_apart(found.weights, without.weights):.2g} against a run in which it "
                "never came; use the answers that cohort.ask returns and nothing else",
            )


def _attacking(name: str) -> Callable[[Reply], Reply]:
    """Replace an honest frame: a recorded one would be refused because it is of another run."""
    return lambda reply: dataclasses.replace(reply, frame=attacks(reply.frame)[name])


def check_cost(case: Case) -> None:
    """`fedveil cost` foretells the bytes and passes of the ledger."""
    method, task = case.method, case.task
    sampler = fv.CohortSampler(size=len(task.clients))
    plan = fv.Recipe(rounds=ROUNDS, cohort=sampler, method=fv.settle(task, method, sampler, ROUNDS))
    rows = case.plain.rows
    bounded = any("bytes" in codec.sizes(task) for codec in method.codecs)
    passes = dict.fromkeys(range(1, ROUNDS + 1), 0)
    for turn in turns_of(task, plan):
        row, told = rows[turn.round - 1], f"{label(method)}: in round {turn.round}"
        up, down = turn_bytes(plan.method, task, turn)
        require(up and down, f"{label(method)} forecasts no message; override forecast_messages")
        passes[turn.round] += plan.method.forecast_compute(turn).passes
        for way, expected, sent in (("sends", up, row.up), ("receives", down, row.down)):
            found = sent.get(str(turn.client), 0)
            require(
                found <= expected if bounded else found == expected,
                f"{told} client {turn.client} {way} {found} bytes, but {expected} are forecast; override "
                "forecast_messages, or let every field have a fixed size",
            )
    for row in rows:
        require(
            row.passes,
            f"{label(method)} counts no passes; add the records that a handler runs through the model to stack.passes, "
            "and override forecast_compute",
        )
        require(
            row.passes == passes[row.round],
            f"{label(method)}: clients make {row.passes} passes in round {row.round}, but {passes[row.round]} are "
            "forecast; override forecast_compute",
        )


def check_secure(case: Case) -> None:
    """A secure sum gives the weights of the clear one, up to its rounding; checked where the method has the option."""
    method, task = case.method, case.task
    own: Any = method
    if not hasattr(method, "secure") or method.promise is not None:
        return
    try:
        masked = own if own.secure else dataclasses.replace(own, secure=SECURE)
    except ValueError:  # its answers do not add up
        return
    clear = dataclasses.replace(masked, secure=None)
    found, expected = trial(masked, task), trial(clear, task)
    sum_: fv.SecureSum = masked.secure
    allowed = ROUNDS * max(1e-4, sum_.clip * 2.0 ** (2 - sum_.bits))
    apart = _apart(found.weights, expected.weights)
    require(
        not any(row.missing for row in found.rows) and apart <= allowed,
        f"{label(method)}: with `secure` the weights differ by {apart:.2g} from those in the clear, where "
        f"{allowed:.2g} is rounding; send vectors whose weighted sum is all that the server needs",
    )


def check_engines(case: Case) -> None:
    """A run on a Flower grid in this process gives the weights of the local engine."""
    method, task = case.method, case.task
    try:
        from fedveil.testing.grid import OnFlower
    except ImportError:
        warnings.warn(FLOWER, stacklevel=3)
        return
    local = trial(method, task, engine=Observed(stack=1))
    flower = trial(method, task, engine=OnFlower())
    missing = {client: why for row in flower.rows for client, why in row.missing.items()}
    require(not missing, f"{label(method)}: on Flower clients give no answer ({_first(missing)}); keep what a later "
            "question needs in stack.notes, as numbers, text, bytes and tensors")  # fmt: skip
    require(
        torch.equal(local.weights, flower.weights),
        f"{label(method)}: on Flower the weights differ by {_apart(local.weights, flower.weights):.2g} from those of "
        "the local engine; keep nothing in the method, a module or the task between two questions",
    )


def _apart(a: Tensor, b: Tensor) -> float:
    """The largest difference."""
    return float((a - b).abs().max())


def _first(reasons: dict[str, str]) -> str:
    return next((f"client {client}: {why}" for client, why in reasons.items()), "")


METHOD_CHECKS: dict[str, Callable[[Case], None]] = {
    "described": check_described,
    "recipe": check_recipe,
    "run": check_run,
    "wires": check_wires,
    "stacks": check_stacks,
    "memory": check_memory,
    "resume": check_resume,
    "hostile": check_hostile,
    "cost": check_cost,
    "secure": check_secure,
    "engines": check_engines,
}
