"""What the mean of a round tells: read from the server's step, and from no message of a single client."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fedveil.attacks.seen import Estimate, Seen
from fedveil.attacks.slopes import of_the_mean
from fedveil.attacks.updates import trained_at
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
    """Return an estimate of the mean of the round `seen.rounds[index]`.

    It is for adversaries that hold no other client's message: the server after a secure sum, or a client. The list is
    empty where clients answered in the clear, the round was lost, or the server's step cannot be undone.
    """
    kept = seen.rounds[index]
    clients = next((tuple(each.question.alive) for each in kept.messages if isinstance(each.question, Unmask)), ())
    own_view = seen.adversary == "client"
    if torch.equal(kept.state.weights, kept.after.weights) or not (clients or own_view):
        return []
    method, task = seen.method, seen.task
    server: ServerOptimizer = getattr(method, "server", ServerOptimizer())
    before, after = server.training(kept.state), server.training(kept.after)
    mean = undone(server, before, after, kept.round, _before(seen, index))
    if mean is None:
        return []
    mean, means, even = mean.to(task.device), "update", True
    w, parts = _trained_at(seen, kept, before)
    if isinstance(method, Baffle):
        mean, means, even = of_the_mean(seen, kept.round, -mean), "gradient", False
    elif isinstance(method, Surrogates):  # the server descends on sets that stand in for gradients
        mean, means, even = -mean, "gradient", method.weighting == "equal"
    elif isinstance(method, Averaging):
        even = not method.weighted or bool(parts and parts.equal)
        if isinstance(method, FedDyn) and method.name in kept.after.slots and clients:
            h, later = (state.slots[method.name].value for state in (kept.state, kept.after))
            mean = ((h - later) * (len(task.clients) / (method.alpha * len(clients)))).to(task.device)
        if isinstance(method.trainer, (FullGradient, PrivateFullGradient)) or method.up.replaces_training:
            mean, means = -mean, "gradient"
    return [Estimate(kept.round, () if own_view else clients, w, mean, means, "sum", None, even)]


def undone(server: ServerOptimizer, before: State, after: State, round_: int, first: Tensor | None) -> Tensor | None:
    """Return the merged update [d] that a step of the server's optimizer was taken along; None if it cannot be told.

    With m' = β m + Δ (momentum) or m' = β m + (1 - β) Δ (adam) the moments give Δ; a plain step is lr · Δ.

    first: the first moment before the step, where the states hold none and it is known all the same
    """
    step: Tensor = (after.weights.double() - before.weights.double()) / (server.lr * server.factor(round_))
    if server.optimizer == "plain":
        return step.to(torch.float32)
    m, later = moments(before)[0], moments(after)[0]
    if m is not None and later is not None:
        part = 1 - server.momentum if server.optimizer == "adam" else 1.0
        return ((later.double() - server.momentum * m.double()) / part).to(torch.float32)
    if server.optimizer == "momentum" and first is not None:
        return (step - server.momentum * first.double()).to(torch.float32)
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
    server: ServerOptimizer = seen.method.server
    return (last.after.weights - last.state.weights) / (server.lr * server.factor(last.round))


def _trained_at(seen: Seen, kept: KeptRound, before: State) -> tuple[Tensor, Parts | None]:
    """The weights [d] that the clients were sent, or the server's where no message tells; and for methods that average
    the parts by which the round was played."""
    asked, method = {type(q := _inner(each.question)): q for each in kept.messages}, seen.method
    if isinstance(method, Averaging):
        for parts in method.phases:
            if parts.down.question in asked:
                return trained_at(seen, kept, asked[parts.down.question], parts), parts
        return before.weights.to(seen.task.device), method.parts
    told = (getattr(question, "weights", None) for question in asked.values())
    return next((w for w in told if isinstance(w, Tensor)), before.weights).to(seen.task.device), None


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
