"""The attacks of `images` on a synthetic set that a client sent, with their control and their baseline."""

from __future__ import annotations

import msgspec
import torch

from fedveil.attacks.images import Points, SetFigures, audit, copies, points
from fedveil.attacks.seen import Seen
from fedveil.codecs.fedsynth import Synthetic
from fedveil.codecs.tofu import Proxies
from fedveil.core.seeds import Seed
from fedveil.core.task import Task
from fedveil.methods.surrogates.sets import Surrogate
from fedveil.runs.messages import Truths

KINDS = (Surrogate, Synthetic, Proxies)  # answers that hold synthetic points


class SetExposure(msgspec.Struct, frozen=True):
    """What a client's synthetic set gives away as data.

    control:  the same with the client's own records in place of the images; it must be found
    baseline: the same with strangers' records, which say nothing about the client
    """

    round: int
    client: int
    found: SetFigures
    control: SetFigures
    baseline: SetFigures


def has_sets(seen: Seen) -> bool:
    """Whether a message holds synthetic points."""
    return any(isinstance(each.answer, KINDS) for kept in seen.rounds for each in kept.messages)


def exposed(task: Task, seen: Seen, truths: Truths) -> SetExposure:
    """Attack one synthetic set, drawn by the public seed. Test records are the others, and the attacker's own pool."""
    seed = seen.seed.child("audit", "sets")
    sent = [(kept.round, each) for kept in seen.rounds for each in kept.messages if isinstance(each.answer, KINDS)]
    number, message = sent[int(seed.child("victim").numpy().integers(len(sent)))]
    assert message.answer
    held = truths[number][message.client]["records"].to(task.device)
    members = task.x[held], task.y[held]
    order = torch.from_numpy(seed.child("records").numpy().permutation(len(task.test_x))).to(task.device)
    places = (3 * len(order) // 4, 7 * len(order) // 8)
    others, pool, strangers = ((task.test_x[part], task.test_y[part]) for part in order.tensor_split(places))
    told = points(task, message.answer)
    classes = task.data.classes

    def reached(sent: Points, of: Seed) -> SetFigures:
        return audit(sent, members, others, pool, classes, of)

    return SetExposure(
        number,
        message.client,
        reached(told, seed.child("set")),
        reached(copies(told, *members, seed.child("copies")), seed.child("control")),
        reached(copies(told, *strangers, seed.child("strangers")), seed.child("baseline")),
    )
