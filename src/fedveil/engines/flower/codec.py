"""One piece for a Flower app of your own: updates that travel encoded, as a client mod and a server's helper."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable

import torch
from flwr.app import ArrayRecord, Context, Message, MessageType
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor

from fedveil.codecs.base import Codec
from fedveil.core import message, schema
from fedveil.core.message import Envelope, Refused
from fedveil.core.seeds import Seed
from fedveil.core.task import Task
from fedveil.engines.flower import wire

_log = logging.getLogger("fedveil")


def codec_mod(codec: Codec, task: Task) -> Mod:
    """A client mod for train messages: the weights that the app returns leave the client as an encoded update.

    The question and the app's answer hold one ArrayRecord each, with the parameters of `task`'s model by name. Metrics
    and configs of the answer stay as they are.
    """
    if not codec.server_can_encode:
        raise ValueError(f"{codec.name} needs more of a client than its update; use it in a method of fedveil")
    codec.validate(task)

    def encode(question: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if question.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
            return call_next(question, context)
        w = _flat(task, _only(question))
        reply = call_next(question, context)
        if reply.has_error():
            return reply
        update = _flat(task, _only(reply)) - w
        seed = Seed.root(context.node_id).child(question.metadata.message_id)
        (payload,) = codec.encode(task, w[None], update[None], [seed], None)
        for name in list(reply.content.array_records):
            del reply.content[name]
        reply.content.update(wire.content({"frame": message.frame(payload, Envelope())}))
        return reply

    return encode


def decode_replies(codec: Codec, task: Task, sent: ArrayRecord, replies: Iterable[Message]) -> list[Message]:
    """Train replies as a Flower strategy expects them: with the weights that each client reached from those `sent`.

    A reply whose bytes must not be used is left out, and the log says whose and why.
    """
    w, usable = _flat(task, sent), []
    for reply in replies:
        try:
            if not reply.has_error():
                update = _decoded(codec, task, w, wire.take(reply, "frame", bytes))
                del reply.content[wire.OURS]
                reply.content["arrays"] = _record(task, w + update, sent)
            usable.append(reply)
        except Refused as error:
            _log.warning("the reply of node %d is left out: %s", reply.metadata.src_node_id, error)
    return usable


def _decoded(codec: Codec, task: Task, w: Tensor, frame: bytes) -> Tensor:
    sizes = codec.sizes(task)
    payload, _ = message.unframe(frame, {codec.payload.kind: codec.payload}, schema.size_limit(codec.payload, sizes))
    schema.check(payload, sizes)
    codec.check(task, payload)
    update = codec.decode(task, w[None], [payload])[0]
    if not update.isfinite().all():
        raise Refused("not finite", "the decoded update holds a value that is not a number")
    return update


def _only(message: Message) -> ArrayRecord:
    """The one ArrayRecord of a message."""
    records = list(message.content.array_records.values())
    if len(records) != 1:
        raise ValueError(f"the codec mod takes messages with one ArrayRecord, and this one has {len(records)}")
    return records[0]


def _flat(task: Task, record: ArrayRecord) -> Tensor:
    """Named parameters -> [d]."""
    named, layers = record.to_torch_state_dict(), task.layout.layers
    if set(named) != {layer.name for layer in layers}:
        raise ValueError(
            f"the ArrayRecord holds {', '.join(named)}, but the parameters of the task's model are "
            f"{', '.join(layer.name for layer in layers)}"
        )
    return task.layout.join(named).to(task.device, torch.float32)


def _record(task: Task, w: Tensor, like: ArrayRecord) -> ArrayRecord:
    """[d] -> named parameters, in the order and of the types of `like`."""
    named = task.layout.split(w.cpu())
    return ArrayRecord(OrderedDict((n, named[n].to(t.dtype)) for n, t in like.to_torch_state_dict().items()))
