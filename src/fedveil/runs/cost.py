"""What a run will cost, before anything is trained: bytes by message schemas and cohorts by the recipe's seed.

Bytes are exact as long as every client answers: they are the lengths of the frames that will be sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as with_fields

from fedveil.core import message, schema
from fedveil.core.forecast import FLOAT, Turn
from fedveil.core.seeds import Seed

if TYPE_CHECKING:
    from fedveil.core.method import Method
    from fedveil.core.task import Task
    from fedveil.runs.recipe import Recipe


def cost(task: Task, recipe: Recipe) -> dict[str, Any]:
    """The figures of `fedveil cost`: bytes up and down, passes, ε and an estimate of a client's memory."""
    from fedveil.core.setup import init_state
    from fedveil.methods.fedavg import FedAvg

    found, recipe = recipe, recipe.settled(task)
    method, plain = recipe.method, FedAvg()
    init_state(task, method, recipe.cohort)  # says what does not suit the task
    turns = list(turns_of(task, recipe))
    if not turns:
        raise ValueError("the recipe's draws choose nobody in any round; raise cohort.size")
    up, down = zip(*(turn_bytes(method, task, turn) for turn in turns), strict=True)
    if not any(method.forecast_messages(task, turn) for turn in turns) and method.min_clients < 2:
        raise ValueError(f"{method.name} forecasts no message; override forecast_messages in {type(method).__name__}")
    if not sum(up):
        raise ValueError("the recipe's draws choose too few clients for a secure sum in every round; raise cohort.size")
    plain_up, plain_down = zip(*(turn_bytes(plain, task, turn) for turn in turns), strict=True)
    works = [method.forecast_compute(turn) for turn in turns]
    privacy, lasting = _privacy(task, recipe)
    if found.method.promise != method.promise:
        lasting.append(f'Noise "auto" is {privacy["noise"]:g}, the least with which all rounds stay within the budget.')
    return {
        "method": method.name,
        "rounds": recipe.rounds,
        "weights": task.layout.size,
        "up": _spread(up) | {"fedavg": sum(plain_up), "ratio": sum(plain_up) / sum(up)},
        "down": _spread(down) | {"fedavg": sum(plain_down), "ratio": sum(plain_down) / sum(down)},
        "passes": _spread([work.passes for work in works]),
        "memory_estimate": {
            "weights": FLOAT * task.layout.size * max(work.vectors for work in works),
            "activations": FLOAT * task.activations * max(work.held for work in works),
        },
        **privacy,
        "notes": _notes(task, recipe, turns) + lasting,
    }


def _cohorts(task: Task, recipe: Recipe) -> list[tuple[int, ...]]:
    """Who takes part in each round, as the recipe's seed draws it."""
    from fedveil.core.timeline import asked_each_round

    return list(asked_each_round(recipe.cohort, task, Seed.root(recipe.seed), recipe.rounds))


def _privacy(task: Task, recipe: Recipe) -> tuple[dict[str, Any], list[str]]:
    """The ε at the end, if any is promised, what it is of, and what there is to say about it."""
    if (account := recipe.method.account(task, recipe.cohort)) is None:
        return dict.fromkeys(("epsilon", "epsilon_pld", "noise", "relation")), []
    tally, promise, epsilon = account.tally(), account.promise, 0.0
    cohorts = _cohorts(task, recipe)
    done = 0
    while done < recipe.rounds and not tally.exhausted(cohorts[done]):
        epsilon, done = tally.ask(cohorts[done]), done + 1
    tight = tally.tightened(epsilon)
    beside = "" if tight is None else f"; by the tighter PLD accountant it is {tight:.4g}"
    notes = [
        f"Differential privacy (method.{promise.key}): ε is {epsilon:.4g} at δ {promise.delta:g} in the end, for "
        f"neighbours by {promise.relation}{beside}."
    ]
    if account.colluders is not None:
        notes.append(
            f"ε holds if at most {account.colluders} clients of a sum tell the server their noise (colluders)."
        )
    if done < recipe.rounds:
        notes.append(f"The budget of ε {promise.budget:g} ends the run after round {done}; bytes are of all.")
    if account.everyone:
        notes.append("Cohorts are drawn in private; the other figures are those of one such run.")
    figures = {"epsilon": epsilon, "epsilon_pld": tight, "noise": promise.sigma, "relation": promise.relation}
    return figures, notes


def turns_of(task: Task, recipe: Recipe) -> Iterator[Turn]:
    """Each client's turns, in order."""
    seen: dict[int, int] = {}
    for number, cohort in enumerate(_cohorts(task, recipe), 1):
        for client in cohort:
            missed = number - seen.get(client, 1)
            yield Turn(client, int(task.clients.sizes[client]), number, recipe.rounds, missed, cohort, task.largest)
            seen[client] = number


def turn_bytes(method: Method, task: Task, turn: Turn) -> tuple[int, int]:
    """What a client sends and receives in a turn."""
    up = down = 0
    for question in method.forecast_messages(task, turn):
        sizes = {**method.schema(task, question, turn.client), **question.sizes()}
        answer = schema.blank(method.reply(question), sizes)
        if "records" in answer.__struct_fields__:
            answer = with_fields(answer, records=1 if sizes["records"] == 1 else turn.records)
        up, down = up + message.size(answer), down + message.size(question)
    return up, down


def _spread(each: Sequence[int]) -> dict[str, Any]:
    """Figures a client and round, and their sum over all clients and rounds."""
    return {"least": min(each), "mean": sum(each) / len(each), "most": max(each), "total": sum(each)}


def _notes(task: Task, recipe: Recipe, turns: Sequence[Turn]) -> list[str]:
    """What the figures depend on."""
    notes, method = [], recipe.method
    if not any(method.forecast_compute(turn).passes for turn in turns):
        notes.append(f"{method.name} forecasts no passes; if it trains, override its forecast_compute.")
    if recipe.cohort.drop or recipe.cohort.deadline is not None:
        notes.append("Clients drop out or are late in this recipe; the figures are for all of them answering.")
    if recipe.cohort.buffer is not None:
        notes.append(
            "The server does not wait for a cohort: figures are of every client that is asked, and count answers that "
            "are on their way when the run ends. With replay, steps that mix versions of the weights are longer."
        )
    if recipe.target is not None:
        notes.append(
            f"The run ends before its {recipe.rounds} rounds if it reaches its target {recipe.task.primary.words}."
        )
    if recipe.early_stopping is not None:
        notes.append(f"The run ends before its {recipe.rounds} rounds if the validation metric stops improving.")
    if any("bytes" in codec.sizes(task) for codec in method.codecs):
        notes.append("What is compressed has no fixed size; its bytes are the most that they can be.")
    late = [turn for turn in turns if turn.missed > 1]
    always = max((turn_bytes(method, task, replace(turn, missed=1))[1] for turn in late), default=0)
    never = max((turn_bytes(method, task, replace(turn, missed=turn.round - 1))[1] for turn in late), default=0)
    if never > always:
        notes.append(
            "A client that was away is caught up, so what it receives depends on who is drawn: down is for this seed's "
            f"draws, {always:,} bytes or fewer if it was there the round before, never more than {never + 16:,}."
        )  # 16: a version that is a longer number, twice
    return notes
