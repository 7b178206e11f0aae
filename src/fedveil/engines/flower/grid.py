"""The server's side: an engine whose clients are nodes of a Flower grid."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedveil.core.clients import Clients, Letter, Reply
from fedveil.core.message import Refused
from fedveil.engines import kept
from fedveil.engines.claims import Claims
from fedveil.engines.flower import wire

LEARNING = 60.0  # seconds a node has to say which client it is
TOLD_EVERY = 5.0  # seconds
note = logging.getLogger("fedveil").info


class Flower:
    """Carries questions to the nodes of a Flower grid; client k is the node to which `claims` binds that number.

    grid:      what Flower gives to a server app
    patience:  seconds to wait for nodes, and for answers where the run has no deadline
    nodes:     how many nodes must be there before the run begins; None: one for each client of the task
    poll:      seconds between two looks for answers
    tell:      called with a sentence while nodes are waited for
    simulated: what clients keep travels with the messages, what they measure is taken, and time limits are not real
    alive:     called while answers are waited for; raises if there is nobody left to give them
    claims:    which node is which client; by default the first to say so, as long as the engine is used
    """

    def __init__(
        self,
        grid: Grid,
        patience: float = 600.0,
        nodes: int | None = None,
        *,
        poll: float = 1.0,
        tell: Callable[[str], object] = note,
        simulated: bool = False,
        alive: Callable[[], object] = lambda: None,
        claims: Claims | None = None,
    ) -> None:
        self.grid, self.patience, self.nodes, self.poll, self.tell = grid, patience, nodes, poll, tell
        self.simulated, self.alive, self.claims = simulated, alive, claims or Claims()
        self._clients: Clients | None = None
        self._kept: dict[int, bytes] = {}  # in a simulation, what clients keep, of those that were asked in this round
        self._round = 0
        self._node: dict[int, int] = {}  # client -> the node that may be asked for it
        self._refused: dict[int, str] = {}  # node -> why it is not asked
        self._unfit: dict[int, str] = {}  # client -> why its own node is not asked
        self._events: list[str] = []

    def open(self, clients: Clients) -> None:
        """Wait until the nodes are there. Raises TimeoutError."""
        self._clients, self._kept = clients, {}
        wanted = len(clients.task.clients) if self.nodes is None else self.nodes
        end, told = time.monotonic() + self.patience, time.monotonic()
        self._learn()
        while len(self._node) < wanted:
            now = time.monotonic()
            if now > end:
                others = "; ".join(["", *self._refused.values()])
                raise TimeoutError(
                    f"{len(self._node)} of {wanted} Flower nodes were there after {self.patience:g} s; "
                    f"start the others, or let the run begin with fewer nodes{others}"
                )
            if now - told > TOLD_EVERY:
                told = now
                self.tell(f"waiting for Flower nodes, {len(self._node)} of {wanted} are there")
            time.sleep(self.poll)
            self._learn()

    def close(self) -> None:
        """The grid is whoever's it was."""

    def events(self) -> list[str]:
        """What happened since this was last asked, for the ledger: which nodes were refused, and why."""
        events, self._events = self._events, []
        return events

    def deliver(self, letters: Sequence[Letter], deadline: float | None) -> Iterable[Reply]:
        """Ask every node at once and take what answers there are in time; whoever has none says why."""
        assert self._clients
        self._forget()
        if letters and letters[0].envelope.round != self._round:  # notes are void, and the clients' memory has the rest
            self._kept, self._round = {}, letters[0].envelope.round
        if any(letter.client not in self._node for letter in letters):
            self._learn()
        timeout = self.patience if deadline is None or self.simulated else deadline
        replies, messages, sizes = [], {}, {}
        for letter in letters:
            k = letter.client
            if k not in self._node:
                replies.append(Reply(k, problem=self._unfit.get(k, f"failed: no Flower node is client {k}")))
                continue
            content = self._content({"frame": letter.frame}, self._keeps(k))
            messages[k] = Message(content, self._node[k], MessageType.TRAIN, ttl=timeout)
            sizes[k] = wire.size(messages[k])
        for k, came in self._exchange(messages, timeout).items():
            replies.append(self._read(k, came, sizes[k], timeout))
        return sorted(replies, key=lambda reply: reply.client)

    def _read(self, client: int, came: Message | str | None, down: int, timeout: float) -> Reply:
        if not isinstance(came, Message):
            problem = came or f"late: no answer within {timeout:g} s"
            return Reply(client, problem=problem, wire_down=down)
        reply = wire.read_answer(came, client, self.simulated)
        if self.simulated and not reply.problem:
            self._keep(client, came)
        return replace(reply, wire_up=wire.size(came), wire_down=down)

    # ------------------------------------------------------------------------------------------------ messages

    def _content(self, values: Mapping[str, Any], kept: bytes = b"") -> RecordDict:
        """A question. Flower takes an answer from any node that knows the question's id, a hash of its content, so what
        is really sent has random bytes in it."""
        nonce = {} if self.simulated else {"nonce": secrets.token_bytes(16)}
        return wire.content({**values, **wire.versions(), **nonce}, kept)

    def _exchange(self, messages: Mapping[int, Message], timeout: float) -> dict[int, Message | str | None]:
        """Send each message and wait for its answer: that, or why there is none, or None if it is late.

        One at a time, so that a message which Flower cannot take or read costs its own client only.
        """
        came: dict[int, Message | str | None] = dict.fromkeys(messages)
        end = time.monotonic() + timeout
        waiting: dict[int, str] = {}
        for k, message in messages.items():
            try:
                pushed = list(self.grid.push_messages([message]))
                if pushed and pushed[0]:
                    waiting[k] = pushed[0]
                else:
                    came[k] = "failed: Flower did not take the question"
            except Exception as error:
                came[k] = Clients.problem(error)
        while waiting and time.monotonic() < end:
            self.alive()
            for k, number in list(waiting.items()):
                try:
                    came[k] = next(iter(self.grid.pull_messages([number])), None)
                except Exception as error:
                    came[k] = f"refused: malformed: Flower cannot read the answer ({type(error).__name__})"
                if came[k] is not None:
                    del waiting[k]
            if waiting:
                time.sleep(self.poll)
        return came

    def _forget(self) -> set[int]:
        """Who is there; whoever is not, or is no longer the client it was, is not asked again."""
        present, bound = set(self.grid.get_node_ids()), self.claims.bound()
        self._node = {k: node for k, node in self._node.items() if node in present and bound.get(k) == node}
        self._refused = {node: why for node, why in self._refused.items() if node in present}
        self._unfit = {k: why for k, why in self._unfit.items() if bound.get(k) in self._refused}
        return present

    def _learn(self) -> None:
        """Which node is which client: ask the nodes that have not said so."""
        others = self._forget() - set(self._node.values())
        strangers = sorted(n for n in others if n not in self._refused or self.claims.open_to(n))
        asked = {n: Message(self._content({}), n, MessageType.QUERY, ttl=LEARNING) for n in strangers}
        for node, came in self._exchange(asked, min(LEARNING, self.patience)).items():
            try:
                if not isinstance(came, Message):
                    raise Refused("malformed", came or "it did not answer")
                why = self._enter(node, came)
            except Refused as error:
                why = f"Flower node {node} did not say which client it is: {error}"
            before = self._refused.pop(node, "")
            if why:
                self._refused[node] = why
            if why not in ("", before):
                self.tell(why)
                self._events.append(why)

    def _enter(self, node: int, came: Message) -> str:
        """Take a node as the client it says it is, or say why not."""
        assert self._clients
        client = wire.claimed(came)
        if not 0 <= client < (clients := len(self._clients.task.clients)):
            return f"Flower node {node} says that it is client {client}, but this run has {clients}, from 0"
        if why := self.claims.refusal(client, node):
            return why
        try:
            wire.agree(came, f"client {client}", "the server")
        except Refused as error:
            self._unfit[client] = f"refused: {error}"
            return f"Flower node {node} is not asked: {error}"
        self._node[client] = node
        return ""

    # ------------------------------------------------------------------------------------------------ a simulation

    def _keeps(self, client: int) -> bytes:
        """What a simulated client keeps, as it is sent along."""
        assert self._clients
        if not self.simulated:
            return b""
        if client not in self._kept and (entries := self._clients.memory.entries.get(client)):
            return kept.pack_memory(self._clients.run, client, entries)
        return self._kept.get(client, b"")

    def _keep(self, client: int, came: Message) -> None:
        assert self._clients
        frame = wire.take(came, "frame", bytes, b"", wire.KEPT)
        self._kept[client] = frame
        if frame and (entries := kept.entries(frame)):
            self._clients.memory.entries[client] = entries
