"""What the mean of a round tells: read from the server's step, and from no message of a single client."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fedveil.attacks.seen import Estimate, Seen
from fedveil.attacks.slopes import of_the_mean
from fedveil.core import message
from fedveil.core.message import KINDS as RECORDS
from fedveil.core.message import Question
from fedveil.core.method import Method, State
from fedveil.core.task import Task
from fedveil.methods.averaging import Averaging
from fedveil.methods.baffle.baffle import Baffle
from fedveil.methods.feddyn import FedDyn
from fedveil.methods.parts import Parts
from fedveil.methods.surrogates.base import Surrogates
from fedveil.privacy.secagg.records import Mask, Masked, Unmask
from fedveil.privacy.secagg.settings import SecureSum, shapes
from fedveil.runs.messages import Exchanged, KeptRound
from fedveil.train.optimizers import ServerOptimizer, moments
from fedveil.train.trainers import FullGradient, PrivateFullGradient


def sums(seen: Seen, index: int) -> list[Estimate]:
    """Return the mean of the round `seen.rounds[index]`, for an adversary that has no client's own message: a server
    after a secure sum, or a client. None where the step cannot be undone."""
    kept = seen.rounds[index]
    clients = next((tuple(each.question.alive) for each in kept.messages if isinstance(each.question, Unmask)), ())
    own_view = seen.adversary == "client"
    if torch.equal(kept.state.weights, kept.after.weights) or not (clients or own_view):
        return []
    method, task = seen.method, seen.task
    server = getattr(method, "server", ServerOptimizer())
    before, after = server.training(kept.state), server.training(kept.after)
    mean = undone(server, before, after, kept.round, _before(seen, index))
    if mean is None:
        return []
    mean, means, even = mean.to(task.device), "update", True
    if isinstance(method, Baffle):
        mean, means, even = of_the_mean(seen, kept.round, -mean), "gradient", False
    elif isinstance(method, Surrogates):  # the server descends on sets that stand in for gradients
        mean, means, even = -mean, "gradient", method.weighting == "equal"
    elif isinstance(method, Averaging):
        even = not method.weighted or _phase(method, kept).equal
        if isinstance(method, FedDyn) and method.name in kept.after.slots and clients:
            h, later = (state.slots[method.name].value for state in (kept.state, kept.after))
            mean = ((h - later) * (len(task.clients) / (method.alpha * len(clients)))).to(task.device)
        if isinstance(method.trainer, (FullGradient, PrivateFullGradient)) or method.up.replaces_training:
            mean, means = -mean, "gradient"
    return [
        Estimate(kept.round, () if own_view else clients, _weights(seen, kept, before), mean, means, "sum", None, even)
    ]


def undone(server: ServerOptimizer, before: State, after: State, round_: int, first: Tensor | None) -> Tensor | None:
    """Return the merged update [d] that a step of the server's optimizer was taken along; None if it cannot be told.

    With m' = β m + Δ (momentum) or m' = β m + (1 - β) Δ (adam) the moments give Δ; a plain step is lr · Δ.

    first: the first moment before the step, where the states hold none and it is known all the same
    """
    step = (after.weights.double() - before.weights.double()) / (server.lr * server.factor(round_))
    if server.optimizer == "plain":
        return step.float()
    m, later = moments(before)[0], moments(after)[0]
    if m is not None and later is not None:
        part = 1 - server.momentum if server.optimizer == "adam" else 1.0
        return ((later.double() - server.momentum * m.double()) / part).float()
    if server.optimizer == "momentum" and first is not None:
        return (step - server.momentum * first.double()).float()
    return None


def _before(seen: Seen, index: int) -> Tensor | None:
    """The first moment of a server with momentum before a round, from the weights alone: 0 before the first, later the
    last step over its rate."""
    kept = seen.rounds[index]
    if kept.round == 1:
        return torch.zeros_like(kept.state.weights)
    last = seen.rounds[index - 1] if index else None
    if last is None or last.round != kept.round - 1 or not hasattr(seen.method, "server"):
        return None
    server: Any = seen.method.server
    step: Tensor = last.after.weights - last.state.weights
    return step / (server.lr * server.factor(last.round))


def _phase(method: Averaging, kept: KeptRound) -> Parts:
    """The parts by which a round was played; those of an ordinary one where no message tells."""
    asked = {type(_inner(each.question)) for each in kept.messages}
    return next((parts for parts in method.phases if parts.down.question in asked), method.parts)


def _weights(seen: Seen, kept: KeptRound, before: State) -> Tensor:
    """The weights [d] that the clients were sent, or the server's where no question holds any."""
    asked = (getattr(_inner(each.question), "weights", None) for each in kept.messages)
    return next((w for w in asked if isinstance(w, Tensor)), before.weights).to(seen.task.device)


# ---------------------------------------------------------------------------------------------------- masked vectors


def _inner(question: Question) -> Question:
    """The method's own question within one of the secure sum; any other as it is."""
    if not isinstance(question, Mask):
        return question
    kind: Any = RECORDS[question.asked]
    inner: Question = message.unpack(question.question.numpy().data, kind)
    return inner


def opened(method: Method, task: Task, each: Exchanged) -> Exchanged:
    """Return a masked vector as the answer that it would be without its mask; any other message as it is."""
    if not isinstance(each.question, Mask) or not isinstance(each.answer, Masked):
        return each
    how: SecureSum | None = method.parts.secure if isinstance(method, Averaging) else getattr(method, "secure", None)
    assert how
    inner, n = _inner(each.question), len(each.question.ids)
    kind: Any = method.reply(inner)
    fixed = how.fixed_point(n, how.quorum(n), task.sizes, kind)
    elements = each.answer.vector.numpy()
    values, _, _ = fixed.decode(elements.view(f"u{elements.itemsize}"))
    bound = shapes(kind, {**method.schema(task, inner, each.client), **inner.sizes()})
    parts = torch.from_numpy(values).float().split([math.prod(shape) for shape in bound.values()])
    fields = {name: part.view(shape) for (name, shape), part in zip(bound.items(), parts, strict=True)}
    return Exchanged(each.serial, each.client, inner, kind(**fields))
