"""A Flower grid in this process: messages cross as bytes, and each is answered as if by a process of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as Proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedveil.core.clients import Clients, Letter, Reply
from fedveil.engines.flower import Flower, client_app
from fedveil.engines.flower import app as client_side


@dataclass(frozen=True, eq=False)
class _Made:
    """Makes the clients of every node: those of the run."""

    clients: Clients

    def __call__(self, context: Context) -> Clients:
        return self.clients


class Nodes(Grid):
    """Nodes in this process, one for each partition."""

    def __init__(self, app: ClientApp, partitions: Iterable[int]) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 7, 1
        self.app, self.replies, self.contexts = app, dict[str, Any](), dict[int, Context]()
        for partition in partitions:
            self.join(partition, 1000 - 7 * partition)

    def join(self, partition: Any, node: int) -> None:
        self.contexts[node] = Context(7, node, {"partition-id": partition}, RecordDict(), {})

    def answer(self, node: int, question: Message) -> Any:
        """Return a node's reply, or whatever a test puts in its place."""
        return self.app(question, self.contexts[node])

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        numbers = []
        for message in messages:
            number = str(len(self.replies))
            message.metadata.__dict__["_message_id"] = number
            client_side._made.clear()  # every question meets a process that has just started
            reply = self.answer(message.metadata.dst_node_id, _crossed(message))
            self.replies[number] = _crossed(reply) if isinstance(reply, Message) else reply
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies[number] for number in message_ids]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def get_node_ids(self) -> Iterable[int]:
        return set(self.contexts)

    def set_run(self, run: Any) -> None: ...

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError


class OnFlower:
    """An engine whose clients are nodes of such a grid."""

    def open(self, clients: Clients) -> None:
        own = Clients(clients.method, clients.task, bytes(8), clients.seed, clients.secret, clients.identities)
        grid = Nodes(client_app(_Made(own)), range(len(clients.task.clients)))
        self._engine = Flower(grid, simulated=True, tell=lambda sentence: None)
        self._engine.open(clients)

    def deliver(self, letters: Sequence[Letter], deadline: float | None) -> Iterable[Reply]:
        return self._engine.deliver(letters, deadline)

    def close(self) -> None:
        self._engine.close()


def _crossed(message: Message) -> Message:
    return message_from_proto(Proto.FromString(message_to_proto(message).SerializeToString()))
