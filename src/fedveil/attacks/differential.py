"""What a server that averages codes can find out about one client (FedAGE, section 4.3).

The server is honest but curious: it holds the codes of every client, and the decoder. It can decode the codes of one
client (`direct`), or take the decoded mean apart by leaving that client out (`differential`). Under a secure sum it
holds a masked vector of each client, and the attacks are made on that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from msgspec.structs import replace as changed
from torch import Tensor

from fedveil.codecs.agreed import Tuned
from fedveil.codecs.fedage import Codes, FedAgeCodec
from fedveil.codecs.fit import cosine
from fedveil.core import message, schema
from fedveil.core.clients import Letter, Reply
from fedveil.core.loop import Federation
from fedveil.core.method import State
from fedveil.core.sampling import CohortSampler
from fedveil.core.seeds import Seed
from fedveil.core.task import Task
from fedveil.engines.local import LocalEngine
from fedveil.methods.averaging import Averaging
from fedveil.privacy.secagg.records import Masked
from fedveil.privacy.secagg.settings import shapes


def direct(task: Task, codec: Tuned, payloads: Sequence[Any]) -> Tensor:
    """D(E(l_i)) of each client i, [m, d]."""
    return codec.decode(task, task.initial.expand(len(payloads), -1), payloads)


def differential(task: Task, codec: Tuned, payloads: Sequence[Any], seen: Sequence[Any] | None = None) -> Tensor:
    """ĝ_i = m (D(mean of codes) - D(mean with E(0) for client i's)), [m, d].

    seen: what the server takes for each client's codes where it is not the codes themselves, of which it has the mean
    """
    (nothing,) = codec.encode(task, task.initial[None], torch.zeros_like(task.initial)[None], [Seed.root(0)], None)
    whole, m = schema.stack(payloads, "codes").double().mean(0), len(payloads)
    rest = [changed(p, codes=whole + (nothing.codes - p.codes.double()) / m) for p in seen or payloads]
    left = torch.stack([codec.merge(task, [p], m)[0] for p in rest])
    return m * (codec.merge(task, [changed(nothing, codes=whole)], m)[0] - left)


class Listening(LocalEngine):
    """Clients in this process, and a server that keeps every masked vector it is sent, by client."""

    def __init__(self) -> None:
        super().__init__(wire="bytes")
        self.heard: dict[int, Tensor] = {}

    def deliver(self, letters: Sequence[Letter], deadline: float | None) -> Iterable[Reply]:
        for reply in super().deliver(letters, deadline):
            if reply.frame and message.envelope(reply.frame)[0] == Masked.kind:
                masked, _ = message.unframe(reply.frame, {Masked.kind: Masked}, len(reply.frame))
                assert isinstance(masked, Masked)
                self.heard[reply.client] = masked.vector
            yield reply


def overheard(
    task: Task, method: Averaging, sampler: CohortSampler, seed: Seed, state: State, number: int
) -> dict[int, Codes]:
    """Play round `number` of a run under a secure sum: each client's masked vector, read as if it were its codes."""
    how = method.parts.secure
    assert how
    engine = Listening()
    Federation(task, method, engine, sampler, seed).step(state, number, number)
    n = len(engine.heard)
    fixed = how.fixed_point(n, how.quorum(n), task.sizes, Codes)
    bound, read = shapes(Codes, method.up.sizes(task)), {}
    for client, vector in engine.heard.items():
        values, _, _ = fixed.decode(vector.numpy().view(fixed.dtype))
        parts = torch.from_numpy(values).float().split([math.prod(shape) for shape in bound.values()])
        read[client] = Codes(*(part.view(shape) for part, shape in zip(parts, bound.values(), strict=True)))
    return read


COSINES = ("control", "direct", "differential", "baseline", "own")


@dataclass(frozen=True)
class Exposure:
    """How near the server comes to each client's update: cosines [m], and the errors of the differential attack.

    control:      the differential attack on a code that loses nothing: near 1, or the attack is wrong
    direct:       decoding the client's codes
    differential: leaving the client out of the mean
    baseline:     another client's update; high where clients are alike, so look at `own` too
    own:          of ĝ_i and g_i, each less its mean over the cohort: what the mean alone does not tell. 0 is nothing
    errors:       (ĝ_i - g_i) / the standard deviation of g_i, [m, d]
    """

    control: Tensor
    direct: Tensor
    differential: Tensor
    baseline: Tensor
    own: Tensor
    errors: Tensor

    def figures(self) -> dict[str, list[float]]:
        """The cosines and the spread of the errors, by name."""
        cosines = {name: getattr(self, name).tolist() for name in COSINES}
        return cosines | {"spread": self.errors.std(1).tolist()}


def expose(
    task: Task, codec: FedAgeCodec, updates: Tensor, seed: Seed, round_: int = 1, seen: Sequence[Codes] | None = None
) -> Exposure:
    """Attack the codes of a cohort of m ≥ 2 with these updates [m, d]; `seed` is that of the round.

    seen: under a secure sum, what the server holds instead of each client's codes
    """

    def attacked(code: FedAgeCodec, seen: Sequence[Codes] | None = None) -> tuple[Tensor, Tensor]:
        scales = code.scales_of(code.magnitudes(task, updates), round_)
        tuned = code.at(task, code.sending(scales), seed)
        seeds = [seed.child("attack", i) for i in range(len(updates))]
        payloads = tuned.encode(task, updates, updates, seeds, None)
        return direct(task, tuned, seen or payloads), differential(task, tuned, payloads, seen)

    decoded, difference = attacked(codec, seen)
    _, faithful = attacked(
        replace(codec, code_size=codec.block, code="linear", levels=1 << 15, scale=1.0, decay=1.0, max_scale=None)
    )
    return Exposure(
        cosine(faithful, updates),
        cosine(decoded, updates),
        cosine(difference, updates),
        cosine(updates.roll(1, 0), updates),
        cosine(difference - difference.mean(0), updates - updates.mean(0)),
        (difference - updates) / updates.std(1, keepdim=True),
    )
