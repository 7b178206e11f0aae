"""What an adversary has of a run, and what it makes of one message.

Attacks get a `Seen` and nothing else; only scores look at what messages hide.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedveil.core.data import Split
from fedveil.core.message import Slots
from fedveil.core.method import Method, State
from fedveil.core.seeds import Seed
from fedveil.core.task import Task
from fedveil.runs.messages import KeptRound
from fedveil.train.optimizers import AVERAGE, SLOT

ADVERSARIES = ("server", "client")


@dataclass(frozen=True)
class Seen:
    """The view of one adversary.

    adversary: "server", honest but curious, which has all messages and its own state; or "client", of the last round,
               which has its own messages and the published weights before and after each round, but nothing else of
               the server's state
    task:      the model, the loss and the shape of records, without anyone's records (see `public`)
    method:    the method with all its settings
    seed:      the public root of the run, from which directions, permutations and orders of batches are drawn
    rounds:    the rounds whose messages were kept, in order
    """

    adversary: str
    task: Task
    method: Method
    seed: Seed
    rounds: tuple[KeptRound, ...]

    def round_seed(self, number: int) -> Seed:
        """The public seed of a round."""
        return self.seed.child("round", number)


@dataclass(frozen=True)
class Estimate:
    """What an adversary takes for a client's gradient or update, or for the mean of several clients'.

    round:   the round of the message
    clients: one client, or all whose sum this is; empty: whoever took part, which the adversary is not told
    weights: from which the clients trained or at which they measured, [d]
    vector:  the estimate, [d]
    means:   "update", the weights after training less those before; or "gradient", of the mean loss over the client's
             records; of slopes its projection onto their directions
    kind:    how it was made, a key of `estimate.KINDS`
    records: n_k as the message states it; None where it does not
    even:    whether the clients of a sum count the same, and not by their records
    """

    round: int
    clients: tuple[int, ...]
    weights: Tensor
    vector: Tensor
    means: str
    kind: str
    records: int | None = None
    even: bool = False


def view(adversary: str, task: Task, method: Method, seed: Seed, rounds: Sequence[KeptRound]) -> Seen:
    """What `adversary` has of some kept rounds of a run on `task`."""
    if adversary not in ADVERSARIES:
        raise ValueError(f"the adversary is '{adversary}'; use {' or '.join(ADVERSARIES)}")
    chosen = tuple(rounds)
    if adversary == "client":
        last = [each.client for each in chosen[-1].messages] if chosen else []
        chosen = tuple(_published(each, method, last[:1]) for each in chosen)
    return Seen(adversary, public(task), method, seed, chosen)


def _published(kept: KeptRound, method: Method, clients: Sequence[int]) -> KeptRound:
    """A round as these clients see it: their own messages, and the weights. Clients that replay the server's steps also
    hold what its optimizer keeps."""
    held = (SLOT, AVERAGE) if getattr(method, "down", None) == "replay" else ()

    def seen(state: State) -> State:
        return State(state.weights, Slots({name: state.slots[name] for name in held if name in state.slots}))

    messages = tuple(each for each in kept.messages if each.client in clients)
    return replace(kept, state=seen(kept.state), after=seen(kept.after), messages=messages)


def public(task: Task) -> Task:
    """The same task with a blank record for each client in the place of its records. Test records stay: they stand for
    what an attacker knows of the world."""
    count, data = len(task.clients), task.data
    blank, label = torch.zeros_like(data.x[:1]), torch.zeros_like(data.y[:1])
    hidden = copy.copy(task)
    hidden.data = replace(data, x=blank, y=label, groups=None, validation_x=None, validation_y=None)
    hidden.x, hidden.y, hidden.validation = blank.to(task.device), label.to(task.device), None
    order, starts = np.zeros(count, np.int64), np.arange(count + 1)
    hidden.clients = Split(order, starts, "hidden", task.largest, task.clients.held)
    hidden.__dict__.pop("sizes", None)
    hidden.origin, hidden.steppers, hidden._fused = None, {}, {}
    return hidden
