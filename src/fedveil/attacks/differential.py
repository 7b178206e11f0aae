"""What a server that averages codes can find out about one client (FedAGE, section 4.3).

The server is honest but curious: it holds the codes of every client, and the decoder. It can decode the codes of one
client (`direct`), or take the decoded mean apart by leaving that client out (`differential`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedveil.seeds import Seed
from fedveil.task import Task
from fedveil.updates.codec import Tuned
from fedveil.updates.fedage import FedAge
from fedveil.updates.fit import cosine


def direct(task: Task, codec: Tuned, payloads: Sequence[Any]) -> Tensor:
    """D(E(l_i)) of each client i, [m, d]."""
    return codec.decode(task, task.initial.expand(len(payloads), -1), payloads)


def differential(task: Task, codec: Tuned, payloads: Sequence[Any]) -> Tensor:
    """ĝ_i = m (D(mean of codes) - D(mean with E(0) for client i's)), [m, d]."""
    (nothing,) = codec.encode(task, task.initial[None], torch.zeros_like(task.initial)[None], [Seed.root(0)], None)
    whole = codec.merge(task, payloads)
    others = [[nothing if j == i else p for j, p in enumerate(payloads)] for i in range(len(payloads))]
    return len(payloads) * torch.stack([whole - codec.merge(task, rest) for rest in others])


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


def expose(task: Task, codec: FedAge, updates: Tensor, seed: Seed, round_: int = 1) -> Exposure:
    """Attack the codes of a cohort of m ≥ 2 with these updates [m, d]; `seed` is that of the round."""

    def attacked(code: FedAge) -> tuple[Tensor, Tensor]:
        tuned = code.at(code.agree(updates.abs().amax(1), round_), seed)
        seeds = [seed.child("attack", i) for i in range(len(updates))]
        payloads = tuned.encode(task, updates, updates, seeds, None)
        return direct(task, tuned, payloads), differential(task, tuned, payloads)

    decoded, difference = attacked(codec)
    _, faithful = attacked(replace(codec, code=codec.block, width=0, levels=1 << 15, scale=1.0, decay=1.0, most=None))
    return Exposure(
        cosine(faithful, updates),
        cosine(decoded, updates),
        cosine(difference, updates),
        cosine(updates.roll(1, 0), updates),
        cosine(difference - difference.mean(0), updates - updates.mean(0)),
        (difference - updates) / updates.std(1, keepdim=True),
    )
