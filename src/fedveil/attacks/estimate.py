"""From a message to an estimate of the gradient or the update behind it: the first step of every attack.

`estimates` reads the kept messages as the adversary can: it decodes them at the weights that were sent, with the public
model and the public seed. `truth_of` and the scores compare an estimate with what the client really computed; they are
for reports, and no attack calls them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedveil.attacks.seen import Estimate, Seen
from fedveil.attacks.slopes import slopes, slopes_over_rounds
from fedveil.attacks.sums import opened, sums
from fedveil.attacks.updates import updates
from fedveil.core.method import Method
from fedveil.core.task import Task
from fedveil.methods.averaging import Averaging
from fedveil.methods.baffle.baffle import Baffle
from fedveil.methods.surrogates.base import Surrogates
from fedveil.methods.surrogates.calibration import Calibrated, stretched
from fedveil.methods.surrogates.sets import Surrogate
from fedveil.privacy.secagg.records import Masked
from fedveil.runs.messages import KeptRound
from fedveil.train.local import GRADIENT_CHUNK

__all__ = ["KINDS", "Estimate", "about", "cosines", "estimates", "masked", "nothing", "relative_errors", "truth_of"]

Truth = Mapping[int, Mapping[str, Tensor]]  # of a round, by client and name: see `runs.messages.read_truth`

KINDS = {
    "raw": "The message is the update or the gradient itself.",
    "decoded": "The server decodes the message of each client at the weights that it sent.",
    "control": "SCAFFOLD's control changes of a client, added up over its rounds, are its mean gradient.",
    "code": "The server decodes the code of a single client, though the method decodes only the mean.",
    "difference": "The server decodes the mean of the codes with and without one client and takes the difference.",
    "slopes": "The smallest gradient that has the slopes a client sent, along directions that everyone can regrow.",
    "slopes over rounds": "The smallest gradient that has all slopes a client sent in the rounds that were kept.",
    "set": "The gradient of the mean loss of a client's synthetic set, at the weights that were sent.",
    "sum": "The mean over all clients, from the server's step; no message of a single client is read.",
    "masked": "The masked vector of a single client, read as if it had no mask; it must look like noise.",
}


def about(kind: str) -> str:
    """Return one sentence on how estimates of a kind are made."""
    return KINDS[kind]


def nothing(method: Method, adversary: str = "server") -> str:
    """Return why a method's messages give `adversary` nothing to attack; empty if they give it something."""
    if not isinstance(method, (Averaging, Baffle, Surrogates)):
        return (
            f"{method.name} sends messages that no attack knows how to read as a gradient or an update; derive it from "
            "Averaging, or read its messages in an attack of your own"
        )
    server = getattr(method, "server", None)
    if adversary == "client" and server and (server.ema or server.optimizer == "adam"):
        if getattr(method, "down", None) == "replay":
            return ""
        why = "a moving average of its weights" if server.ema else "weights after a step of Adam"
        return f"the server of {method.name} publishes {why}, from which a client cannot tell the mean of a round"
    return ""


def estimates(seen: Seen) -> list[Estimate]:
    """Return what the adversary takes for each client's gradient or update, in the order of the rounds.

    Only the messages, the server's published state and public settings are read: the same messages give the same
    estimates, whatever the records are.
    """
    found: list[Estimate] = []
    if nothing(seen.method, seen.adversary):
        return found
    controls = dict[int, Tensor]()
    for number, kept in enumerate(seen.rounds, 1):
        if seen.adversary == "server":
            found += _in_the_clear(seen, kept, controls if kept.round == number else None)
        found += sums(seen, number - 1)
    return found + (slopes_over_rounds(seen) if seen.adversary == "server" else [])


def masked(seen: Seen) -> list[Estimate]:
    """Return the masked vectors of single clients, read as if there were no mask: a check of the secure sum."""
    found: list[Estimate] = []
    for kept in seen.rounds:
        if not any(isinstance(each.answer, Masked) for each in kept.messages):
            continue
        messages = tuple(opened(seen.method, seen.task, each) for each in kept.messages)
        found += _in_the_clear(seen, replace(kept, messages=messages), None, checked=False)
    return [replace(each, kind="masked", records=None) for each in found]


def _in_the_clear(
    seen: Seen, kept: KeptRound, controls: dict[int, Tensor] | None, checked: bool = True
) -> list[Estimate]:
    """Estimates from the messages of single clients in a round; see `updates` for the arguments."""
    if isinstance(seen.method, Baffle):
        return slopes(seen, kept)
    if isinstance(seen.method, Surrogates):
        return list(_sets(seen, kept))
    return updates(seen, kept, controls, checked)


# ---------------------------------------------------------------------------------------------------- sets


def _sets(seen: Seen, kept: KeptRound) -> Iterator[Estimate]:
    """Gradients of synthetic sets at the weights that were sent (FedLAP-DP, eq. 10: they are fitted to be alike).

    Clients that calibrate also send the norm of their gradient in each layer, to which it is stretched (eq. 20).
    """
    task, method = seen.task, seen.method
    for each in kept.messages:
        answer: Any = each.answer
        if isinstance(answer, Surrogate) and int(answer.labels.max()) < task.data.classes:
            w = each.question.weights.to(task.device)  # type: ignore[attr-defined]
            vector = gradient(task, w, answer.images.to(task.device), answer.labels.to(task.device, task.y.dtype))
            if isinstance(answer, Calibrated):
                vector = stretched(task.layout, vector[None], answer.lengths.to(task.device)[None])[0]
            if bool(vector.isfinite().all()):
                records = None if method.promise else answer.records
                yield Estimate(kept.round, (each.client,), w, vector, "gradient", "set", records)


def gradient(task: Task, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient [d] at `w` [d] of the mean loss of records x [n, …], y [n, …], some records at a time."""
    total = torch.zeros_like(w)
    for u, v in zip(x.split(GRADIENT_CHUNK), y.split(GRADIENT_CHUNK), strict=True):
        ones = torch.ones(1, len(u), device=w.device)
        total += task.gradient(w[None], u[None], v[None], ones)[0][0] * (len(u) / len(x))
    return total


# ---------------------------------------------------------------------------------------------------- scores


def truth_of(task: Task, estimate: Estimate, truth: Truth) -> Tensor:
    """Return the true counterpart of an estimate, [d]: the client's update, or the gradient over its records.

    The counterpart of a sum is the mean over its clients, by records unless they count the same. With DP-SGD an update
    is what private training led to, noise included. Only scores may depend on it.

    task:  with the records
    truth: of the estimate's round
    """
    clients = estimate.clients or tuple(k for k, own in truth.items() if "records" in own)
    w = estimate.weights.to(task.device)
    total, weight = torch.zeros_like(w), 0.0
    for client in clients:
        own = truth[client]
        rows = own["records"].long()
        counts = 1.0 if estimate.even else float(len(rows))
        if estimate.means == "update":
            vector = own["update"].to(w)
        else:
            vector = gradient(task, w, task.x[rows.to(task.device)], task.y[rows.to(task.device)])
        total, weight = total + counts * vector, weight + counts
    return total / weight


def cosines(task: Task, found: Sequence[Estimate], truths: Mapping[int, Truth]) -> list[float]:
    """Return the cosine between each estimate and its truth; `truths` is by round."""
    pairs = ((each.vector.double(), truth_of(task, each, truths[each.round]).double()) for each in found)
    return [float(torch.cosine_similarity(a, b, dim=0, eps=1e-30)) for a, b in pairs]


def relative_errors(task: Task, found: Sequence[Estimate], truths: Mapping[int, Truth]) -> list[float]:
    """Return ‖estimate - truth‖ / ‖truth‖ of each estimate; `truths` is by round."""
    pairs = ((each.vector.double(), truth_of(task, each, truths[each.round]).double()) for each in found)
    return [float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs]
