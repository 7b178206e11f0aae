"""Keeping in step, of whatever the steps are made: here each adds a number to the weights."""

import pytest
import torch
from msgspec.structs import replace

import fedveil as fv
from fedveil.core import message
from fedveil.core.message import Refused, Slots
from fedveil.core.method import State
from fedveil.links.down import TrainHere
from fedveil.links.steps import CatchUp, ClientWeights, Steps
from fedveil.methods.baffle.baffle import ProbeHere
from fedveil.train.optimizers import Moments
from toys import linear_task

TASK = linear_task()
MOMENT = torch.zeros_like(TASK.initial)


def state(*moments: torch.Tensor) -> State:
    """The initial weights, with moments of the server's optimizer."""
    start = State(TASK.initial)
    return start.put("server", Moments(*moments)) if moments else start


class Adding(Steps):
    """Steps that count how often they are taken, and under which numbers."""

    def __init__(self, start: State) -> None:
        super().__init__(lambda task: start, lambda task, frame: float(frame), self.add, moments=True)
        object.__setattr__(self, "taken", [])
        object.__setattr__(self, "numbers", [])

    def add(self, task: fv.Task, now: State, step: float, number: int) -> State:
        self.taken.append(step)
        self.numbers.append(number)
        return replace(now, weights=now.weights + step)


def follow(steps: Steps, question: CatchUp, *memory: ClientWeights | None) -> list[ClientWeights]:
    clients = tuple(range(len(memory)))
    held = [Slots({} if own is None else {"down": own}) for own in memory]
    stack = fv.ClientStack(TASK, clients, 1, fv.Seed.root(0), fv.Seed.root(0), held, [{} for _ in clients])
    steps.follow(stack, question)
    return stack.kept["down"]


def test_clients_that_hold_the_same_take_its_steps_once():
    steps = Adding(state())
    other = ClientWeights(1, TASK.initial + 7)
    first, second, third = follow(steps, CatchUp(2, [b"1", b"2"]), None, ClientWeights(), other)
    assert steps.taken == [1.0, 2.0, 2.0]
    assert steps.numbers == [1, 2, 2]
    assert torch.equal(first.weights, TASK.initial + 1 + 2)
    assert torch.equal(second.weights, first.weights)
    assert torch.equal(third.weights, other.weights + 2)
    assert {each.version for each in (first, second, third)} == {2}


def test_the_same_weights_with_other_moments_are_not_the_same():
    steps = Adding(state(MOMENT))
    memory = [ClientWeights(1, TASK.initial, moment) for moment in (MOMENT, MOMENT + 1)]
    kept = follow(steps, CatchUp(2, [b"1"]), *memory)
    assert steps.taken == [1.0, 1.0]
    assert not torch.equal(kept[0].first, kept[1].first)


@pytest.mark.parametrize(
    ("start", "sent"),
    [
        (state(), CatchUp(1, weights=TASK.initial, first=MOMENT)),
        (state(MOMENT, MOMENT), CatchUp(1, weights=TASK.initial, first=MOMENT)),
        (state(MOMENT), CatchUp(1, weights=TASK.initial)),
    ],
)
def test_a_state_with_other_moments_than_the_runs_is_refused(start, sent):
    with pytest.raises(Refused, match="wrong field: the state has not the moments"):
        follow(Adding(start), sent, None)


def test_a_state_takes_the_place_of_what_a_client_holds():
    (kept,) = follow(Adding(state()), CatchUp(5, weights=TASK.initial + 3), ClientWeights(9, TASK.initial))
    assert (kept.version, kept.first, kept.second) == (5, None, None)
    assert torch.equal(kept.weights, TASK.initial + 3)


@pytest.mark.parametrize("version", [-1, 2**40 + 1])
@pytest.mark.parametrize("question", [CatchUp, TrainHere, lambda version: ProbeHere(version, 1, 1)])
def test_a_version_that_no_run_reaches_is_refused(question, version):
    asked = question(version)
    with pytest.raises(Refused, match="wrong field"):
        message.unpack(message.pack(asked), type(asked))
