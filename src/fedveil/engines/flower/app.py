"""The client's side: a Flower client app that answers fedveil's questions."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from fedveil.core.clients import Clients, Letter, Reply, Unanswered
from fedveil.core.message import Refused
from fedveil.core.task import Task
from fedveil.engines import kept
from fedveil.engines.flower import wire
from fedveil.gpu.graphs import one_thread

Make = Callable[[Context], Clients]
_log = logging.getLogger("fedveil")
_made: dict[Make, Clients] = {}  # the last one: a Ray actor answers many messages, each with a copy of the app


def client_app(clients: Make, memory: Callable[[Context], Path] | None = None) -> ClientApp:
    """An app that answers for the partition its node is configured as (`partition-id`).

    clients: makes the client's task and method; called once a process, so it is hashable, and equal to its own copy.
             The run is whatever the server's question says.
    memory:  the folder of a deployed client's own file, written and fsynced before it answers. Without it the app is
             part of a simulation: what a client keeps comes with the question and goes back with the answer, together
             with what it measured, and it works on one thread as the local engine does.
    """
    app = ClientApp()

    @app.query()
    def partition(message: Message, context: Context) -> Message:
        own = _partition(context)
        values = {"client": own, **wire.versions()}
        try:
            wire.agree(message, "the server", f"client {own}")
            values["partition"] = own  # a server that does not know of versions asks nobody without it
        except Refused as error:
            _log.error("%s", error)
        return Message(wire.content(values), reply_to=message)

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        simulated = memory is None
        with one_thread() if simulated else nullcontext():
            try:
                reply, after = _answer(message, context, clients, memory)
            except Exception as error:
                reply, after = Reply(-1, problem=_told(error, simulated)), b""
        return Message(wire.content(wire.answer(reply, figures=simulated), after), reply_to=message)

    return app


def _answer(
    message: Message, context: Context, make: Make, memory: Callable[[Context], Path] | None
) -> tuple[Reply, bytes]:
    """The reply, and in a simulation what the client keeps."""
    wire.agree(message, "the server", f"client {_partition(context)}")  # a node may be upgraded between two rounds
    frame = wire.take(message, "frame", bytes)
    if make not in _made:
        _made.clear()
        _made[make] = make(context)
    like = _made[make]
    if len(frame) > limit(like.task):
        raise Refused("too large", f"{len(frame)} bytes where at most {limit(like.task)} were expected")
    letter = Letter.read(frame)
    own, run = _partition(context), letter.envelope.run
    if letter.client != own:
        raise Refused("unknown client", f"this is client {own}, not {letter.client}")
    here = Clients(like.method, like.task, run, like.seed, like.secret, like.identities)
    if memory is None:
        if before := wire.take(message, "frame", bytes, b"", wire.KEPT):
            kept.unpack(before, here, own, _key(context))
        try:
            (reply,) = here.answer([letter])
        except Exception as error:
            reply = Reply(own, problem=Clients.problem(error))
        return reply, kept.pack(here, own, _key(context))
    here.discreet = True
    with kept.Home(memory(context), own) as home:
        home.load(here, _key(context))
        here.persist = lambda: home.save_account(here)
        (reply,) = here.answer([letter])
        home.save(here, _key(context))
    return reply, b""


def _key(context: Context) -> bytes:
    """What the secrets of a round are sealed with between two questions. Flower keeps a node's state in the node's
    memory only, so a node that restarts has another key and finds those secrets lost."""
    if "fedveil" not in context.state:
        context.state["fedveil"] = ConfigRecord({"key": secrets.token_bytes(32)})
    key = context.state.config_records["fedveil"]["key"]
    assert isinstance(key, bytes)
    return key


def limit(task: Task) -> int:
    """The most bytes a question may have: a few times the weights, and room for steps that were missed."""
    return (1 << 20) + 8 * 4 * task.layout.size


def _partition(context: Context) -> int:
    return int(context.node_config["partition-id"])


def _told(error: Exception, simulated: bool) -> str:
    """What the server hears of a failure. An exception's words may quote a record, so a deployed client keeps them."""
    if simulated or isinstance(error, Refused | Unanswered):
        return Clients.problem(error)
    _log.exception("the question could not be answered")
    return Clients.problem(Unanswered())
