"""From messages to updates, for methods that average: decode each client's message as the server could."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fedveil.attacks.differential import differential, direct
from fedveil.attacks.seen import Estimate, Seen
from fedveil.codecs.base import Codec
from fedveil.codecs.fedage import FedAgeCodec
from fedveil.codecs.powersgd import PowerSgd
from fedveil.core.message import Refused
from fedveil.core.stack import ClientStack, at_once
from fedveil.core.task import Task
from fedveil.links.agreed import Agreed
from fedveil.links.decoded import Decoded
from fedveil.links.down import EncodedSteps
from fedveil.links.summed import Summed
from fedveil.methods.averaging import Averaging
from fedveil.methods.parts import Parts
from fedveil.methods.qfedavg import QFedAvg
from fedveil.methods.scaffold import Scaffold
from fedveil.runs.messages import Exchanged, KeptRound
from fedveil.train.local import GRADIENT_CHUNK
from fedveil.train.trainers import FullGradient, PrivateFullGradient


def updates(seen: Seen, kept: KeptRound, controls: dict[int, Tensor] | None, checked: bool = True) -> list[Estimate]:
    """Return estimates from the messages of single clients in a round.

    controls: SCAFFOLD's control variates of clients after the rounds before, to which this round's changes are added;
              None: not all of these rounds were kept
    checked:  whether messages that the server would refuse are left out
    """
    method, found = seen.method, list[Estimate]()
    assert isinstance(method, Averaging)
    for parts in method.phases:
        mine = [each for each in kept.messages if type(each.question) in parts.questions and each.answer is not None]
        if not mine:
            continue
        if isinstance(parts.up, Agreed):
            found += _codes(seen, kept, parts.up, parts, mine, checked)
        elif isinstance(parts.up, (Decoded, Summed)):
            found += _decoded(seen, kept, parts.up, parts, mine, controls, checked)
    return found


def trained_at(seen: Seen, kept: KeptRound, question: Any, parts: Parts) -> Tensor:
    """Return the weights [d] from which a question asks clients to train."""
    assert isinstance(seen.method, Averaging)
    if isinstance(parts.down, EncodedSteps):
        return seen.method.server.training(kept.state).weights.to(seen.task.device)
    seed = seen.round_seed(kept.round)
    return parts.down.held(ClientStack(seen.task, (), kept.round, seed, seed, [], []), question)


def _decoded(
    seen: Seen,
    kept: KeptRound,
    up: Decoded | Summed,
    parts: Parts,
    mine: Sequence[Exchanged],
    controls: dict[int, Tensor] | None,
    checked: bool,
) -> Iterator[Estimate]:
    """Updates of clients whose messages are decoded one by one."""
    task, method = seen.task, seen.method
    assert isinstance(method, Averaging)
    names, w = up.payloads.vectors, trained_at(seen, kept, mine[0].question, parts)
    kind = "decoded" if up.codec.lossy else "raw"
    usable: list[tuple[int, Any]] = [(each.client, each.answer) for each in mine]
    if checked:
        usable = [(k, a) for k, a in usable if all(_fits(up.codec, task, k, up.payloads.part(a, n)) for n in names)]
    for first in range(0, len(usable), some := at_once(task)):
        batch = usable[first : first + some]
        base = w.expand(len(batch), -1)
        rows = {n: up.codec.decode(task, base, [up.payloads.part(a, n) for _, a in batch]).detach() for n in names}
        for i, (client, answer) in enumerate(batch):
            if not all(bool(vectors[i].isfinite().all()) for vectors in rows.values()):
                continue
            records = answer.records if up.counted else None
            means, vector = _meaning(
                task, method, up.codec, w, rows[names[0]][i], kept.round, getattr(answer, "weight", None)
            )
            yield Estimate(kept.round, (client,), w, vector, means, kind, records)
            if isinstance(method, Scaffold) and controls is not None:
                controls[client] = controls.get(client, torch.zeros_like(w)) + rows["control"][i]
                yield Estimate(kept.round, (client,), w, controls[client], "gradient", "control", records)


def _fits(codec: Codec, task: Task, client: int, payload: Any) -> bool:
    """Whether the server can decode a payload."""
    try:
        codec.for_client(client).check(task, payload)
    except Refused:
        return False
    return True


def _meaning(
    task: Task, method: Averaging, codec: Codec, w: Tensor, vector: Tensor, round_: int, weight: float | None = None
) -> tuple[str, Tensor]:
    """Return what a decoded vector [d] means, "update" or "gradient", and that update or gradient.

    FedSGD sends the negative gradient. A codec that makes its own updates sends no update of local training, and the
    nearest thing to its direction is the negative gradient. q-FedAvg sends F^q · (w - w_end) / lr beside a `weight` h.
    """
    if isinstance(method.trainer, (FullGradient, PrivateFullGradient)) or codec.replaces_training:
        return "gradient", -vector
    if isinstance(method, QFedAvg) and weight is not None:
        lr = method.local.rate(round_)
        with torch.no_grad():
            public = task.losses(w, task.test_x[:GRADIENT_CHUNK], task.test_y[:GRADIENT_CHUNK]).mean()
        power = loss_to_the(method.q, float(weight), float(vector.double().norm()), lr, float(public))
        return "update", -vector * (lr / power)
    return "update", vector


def loss_to_the(q: float, h: float, norm: float, lr: float, public: float) -> float:
    """Return F^q, the loss of a q-FedAvg client to the power q (Li et al. 2020, algorithm 2).

    Its message holds Δ = F^q (w - w_end) / lr, of norm n, and h = q F^(q-1) (n / F^q)² + F^q / lr. As a function of
    log F that falls and then rises, so two losses may fit. The one nearer to `public`, the loss of public records, is
    taken; a wrong choice changes the length of an update and not its direction.
    """
    if q == 0 or norm == 0:
        return 1.0 if q == 0 else h * lr

    def told(log: float) -> float:
        return q * norm**2 * math.exp(-(q + 1) * log) + math.exp(q * log) / lr

    least = math.log((q + 1) * norm**2 * lr) / (2 * q + 1)  # log F where h is least
    found = []
    for away in (math.log(q * norm**2 / h) / (q + 1), math.log(h * lr) / q):  # where one of the two terms alone is h
        low, high = least, away  # h is too small at `low` and large enough at `high`
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if told(middle) < h else (low, middle)
        found.append(low)
    return math.exp(q * min(found, key=lambda log: abs(log - math.log(max(public, 1e-30)))))


# ---------------------------------------------------------------------------------------------------- codes


def _codes(
    seen: Seen, kept: KeptRound, up: Agreed, parts: Parts, mine: Sequence[Exchanged], checked: bool
) -> Iterator[Estimate]:
    """Updates of clients whose codes are to be averaged: each decoded by itself, and by leaving it out of the mean."""
    task, method = seen.task, seen.method
    assert isinstance(method, Averaging)
    asked = {each.client: each for each in mine if type(each.question) is parts.down.question}
    sent = {each.client: each for each in mine if type(each.question) is up.codec.agreement and each.client in asked}
    if checked:
        sent = {k: each for k, each in sent.items() if _fits(up.codec, task, k, each.answer)}
    if not sent:
        return
    first: Any = next(iter(asked.values())).question
    w = trained_at(seen, kept, first, parts)
    codec = up.codec.at(task, next(iter(sent.values())).question, seen.round_seed(kept.round))
    payloads: list[Any] = [each.answer for each in sent.values()]
    offers: list[Any] = [asked[k].answer for k in sent]
    rows = direct(task, codec, payloads).detach()
    if isinstance(up.codec, PowerSgd):
        rows = _both_sides(task, up.codec, rows, first.basis, offers)
    found = {"code": rows}
    if isinstance(up.codec, FedAgeCodec) and len(payloads) > 1 and checked:
        found["difference"] = differential(task, codec, payloads).detach().to(rows)
    weighed = method.weighted and not parts.equal  # whether a share is that of the client's records
    for kind, vectors in found.items():
        for client, offer, payload, vector in zip(sent, offers, payloads, vectors, strict=True):
            share = float(payload.share)
            told = round(share * task.largest) if weighed else None
            means, own = _meaning(task, method, up.codec, w, vector / share, kept.round, getattr(offer, "weight", None))
            yield Estimate(kept.round, (client,), w, own, means, kind, told)


def _both_sides(task: Task, codec: PowerSgd, rows: Tensor, basis: Tensor, offers: Sequence[Any]) -> Tensor:
    """Return updates [m, d] of clients of PowerSGD, which told M Q before they told Mᵀ P̂ (Vogels et al. 2019).

    P̂ P̂ᵀ M has been decoded. With orthonormal Q the smallest matrix that fits both is that plus
    (M Q - P̂ P̂ᵀ M Q) Qᵀ.
    """
    right = codec.factors(task, basis.to(rows), left=False)
    left = codec.factors(task, torch.stack([offer.vector for offer in offers]).to(rows), left=True)
    whole = rows.clone()
    layers = [layer for layer in codec.layers(task) if layer[-1]]
    for (at, n, m, _), q, told in zip(layers, right, left, strict=True):
        decoded = rows[:, at].unflatten(1, (n, m))
        whole[:, at] += ((told - decoded @ q) @ q.mT).flatten(1)
    return whole
