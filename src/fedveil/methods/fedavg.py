"""FedAvg: clients send their update, as it is or by a codec, and the server merges them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from msgspec.structs import replace
from torch import Tensor

from fedveil.codecs.base import Codec, decodable
from fedveil.codecs.fit import cosine
from fedveil.codecs.raw import Raw, Update
from fedveil.core import schema
from fedveil.core.cohort import Answers, Cohort
from fedveil.core.forecast import Compute, Turn
from fedveil.core.message import Answer, Question, Refused, Size
from fedveil.core.method import SUMMED, About, Method, State
from fedveil.core.sampling import CohortSampler
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.links.agreed import CodeSpace, Magnitude, Send, in_code_space, noted, recalled, shares, tuned
from fedveil.links.down import ClientMemory, Down, Train, TrainFrom, TrainFull, TrainHere
from fedveil.links.steps import CatchUp
from fedveil.privacy.account import Account
from fedveil.privacy.dpsgd import DpSgd, clipped
from fedveil.privacy.secagg.protocol import SecureSum
from fedveil.privacy.users import UserLevel
from fedveil.train.aggregators import Aggregator
from fedveil.train.local import LocalTraining
from fedveil.train.optimizers import ServerOptimizer, ServerState

PRIVATE = (
    (
        "proved",
        "with privacy: what a client sends is (ε, δ)-differentially private for each of its records (add/remove), at "
        "the ε it has charged, up to the rounding of floats; codec, merge and whatever else comes after the noise cost "
        "nothing.",
    ),
    (
        "proved",
        "with user_privacy: the model is (ε, δ)-differentially private for each client. Neighbours differ by the key "
        "relation: another update in the client's place (replacement), or an update of zero (zero-out). The party "
        "adding the noise must be honest: the server, or with secure the clients. Of these, as many as the key "
        "colluders says may tell the server their noise; if all but one of a sum may, each client adds all of it. "
        'With where="client" each message is private by itself.',
    ),
)


def raw_about(summary: str, sends: str, paper: str, more: Sequence[tuple[str, str]] | None = None) -> About:
    """What holds for every method that sends updates in the clear, and `more`: by default what FedAvg's family has."""
    return About(
        summary,
        sends,
        server_sees="every client's update, exactly; from one record's gradient its input can be rebuilt",
        network_sees="the same bytes, unless the transport encrypts them",
        claims=(
            ("measured", "by others: inputs are rebuilt from updates by inversion. It protects nothing."),
            *((SUMMED, *PRIVATE) if more is None else more),
        ),
        paper=paper,
    )


@dataclass(frozen=True)
class FedAvg(Method):
    """Local training, then the mean of the updates (McMahan et al. 2017, algorithm 1).

    up, down:     how an update travels to the server, and the server's to the clients (None: full weights)
    feedback:     a client adds what the codec lost of its update to its next one (Seide et al. 2014)
    full_rounds:  the last so many rounds send full updates and full weights (TOFU's switch₂)
    privacy:      local training is DP-SGD, and what a client sends is private for each of its records
    user_privacy: what is released is private for each client
    secure:       the server learns the sum of the updates only, or of the codes; with a codec whose messages do not add
                  up, that of the full rounds
    """

    name: ClassVar[str] = "fedavg"
    about: ClassVar[About] = raw_about(
        "Clients train locally; the server averages what changed.",
        "the weight update w_k - w (d floats) and the record count n_k",
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017",
    )

    local: LocalTraining = field(default_factory=LocalTraining)
    up: Codec = field(default_factory=Raw)
    down: Codec | None = None
    server: ServerOptimizer = field(default_factory=ServerOptimizer)
    aggregator: Aggregator = field(default_factory=Aggregator)
    feedback: bool = False
    full_rounds: int = 0
    privacy: DpSgd | None = None
    user_privacy: UserLevel | None = None
    secure: SecureSum | None = None

    def __post_init__(self) -> None:
        if self.full_rounds < 0:
            raise ValueError(f"method.full_rounds is {self.full_rounds}; it is 0 or more")
        if self.down and not self.down.server_can_encode:
            raise ValueError(f"method.down is {self.down.name}, which is for the way up only; give it another codec")
        if self.codes and self.aggregator.kind != "mean":
            raise ValueError(
                f"method.aggregator.kind is {self.aggregator.kind}, but of {self.up.name}'s codes only the mean is "
                'decoded and there are no single updates to choose among; use mean, with user_privacy.where="client" '
                "against large ones"
            )
        if self.feedback and self.codes and self.codes.fixed:
            raise ValueError(
                f"method.feedback adds what {self.up.name} lost to the next update, but a code that is the same in "
                "every round never sends it; set method.up.permute=true"
            )
        if self.secure and self.full_rounds and self.codes:
            raise ValueError(
                f"method.secure sums either {self.up.name}'s codes or full updates, which have another range; "
                "set full_rounds to 0"
            )
        if self.privacy and self.user_privacy:
            raise ValueError("method.privacy is for each record, method.user_privacy for each client; set one of them")
        if self.user_privacy and self.user_privacy.where == "sum":
            self._validate_sum()
        if self.user_privacy and self.user_privacy.colluders and not self.jointly:
            raise ValueError(
                f"user_privacy.colluders is {self.user_privacy.colluders}, but clients share noise only with "
                'user_privacy.where="sum" and method.secure; set it to 0'
            )
        if self.user_privacy and self.user_privacy.accountant == "pld" and self.jointly:
            raise ValueError('user_privacy.accountant is pld, but noise inside a secure sum is accounted by "rdp" only')

    def _validate_sum(self) -> None:
        """Say what would change a sum by more than one client's cut update, or skip a round that has to be noised."""
        other = 'use another, or user_privacy.where="client"'
        if self.codes:
            raise ValueError(
                f"user_privacy cuts each update before they are summed, and {self.up.name}'s are summed in code; "
                'use another codec, or user_privacy.where="client"'
            )
        if self.secure and not self.up.payload.additive:
            raise ValueError(f"{self.up.name}'s messages are not summed securely, so nobody noises them; {other}")
        if self.aggregator.kind != "mean":
            raise ValueError(
                f"method.aggregator.kind is {self.aggregator.kind}, which bounds nobody's part in it; {other}"
            )
        if self.down and self.down.reference == "last" and not self.secure:
            raise ValueError(
                f"method.down is {self.down.name}, which skips a round without anybody in step, and the noise with it; "
                "leave it out"
            )

    @property
    def codes(self) -> CodeSpace | None:
        """The codec up, if it is one in code space."""
        return self.up if isinstance(self.up, CodeSpace) else None

    @property
    def trusted(self) -> bool:
        """Whether it is the server that makes the sum private."""
        return bool(self.user_privacy and self.user_privacy.where == "sum" and not self.secure)

    @property
    def jointly(self) -> bool:
        """Whether it is the clients who make the sum private, with a share of the noise each."""
        return bool(self.user_privacy and self.user_privacy.where == "sum" and self.secure)

    @property
    def unweighted(self) -> bool:
        """Whether clients count the same: how many records one has is private."""
        return bool(self.privacy or self.user_privacy)

    @property
    def min_clients(self) -> int:
        return self.secure.min_clients if self.secure else 0 if self.trusted else 1

    @property
    def reads_rounds(self) -> bool:
        return self.full_rounds > 0

    def init_state(self, task: Task) -> State:
        for codec in (self.up, self.down):
            if codec:
                codec.validate(task)
        if self.client_cost(task):
            for codec in dict.fromkeys(self.up.for_client(client) for client in range(len(task.clients))):
                if codec.reads_records:
                    raise ValueError(
                        f"{codec.name} looks at a client's records again when it encodes, past the noise of "
                        f"differential privacy; set its {codec.reads_records}"
                    )
        if how := self.summing:
            summed = self.up.payload if self.up.payload.additive or not self.full_rounds else Update
            how.validate(task, summed, self.aggregator.kind)
        return self.server.init_state(task.initial)

    @property
    def summing(self) -> SecureSum | None:
        """How sums are taken. Codes and private updates have a range of their own, whatever is said of updates."""
        how, private = self.secure, self.user_privacy
        if how and self.codes:
            how = dataclasses.replace(how, clip=self.codes.reach)
        elif how and private and private.where == "sum":
            return dataclasses.replace(how, clip=private.clip).noised(private.sum_noise)
        elif how and private:
            how = dataclasses.replace(how, clip=private.reach)
        return how.even() if how and self.unweighted else how

    # ------------------------------------------------------------------------------------------------ privacy

    def account(self, task: Task, cohort: CohortSampler) -> Account | None:
        if self.user_privacy and self.secure and self.jointly:
            enough = self.secure.quorum(min(cohort.size, len(task.clients)))
            if enough <= self.user_privacy.colluders:
                raise ValueError(
                    f"user_privacy.colluders is {self.user_privacy.colluders}, but {enough} clients are enough for a "
                    f"sum, whose noise they would have all of; set it to {enough - 1} or less"
                )
        if not (self.user_privacy and self.trusted):
            return super().account(task, cohort)
        if cohort.quorum != 1:
            raise ValueError(
                f"cohort.quorum is {cohort.quorum:g}, but a round that is skipped would tell who was drawn, so with "
                "method.user_privacy whoever answers is summed; leave it at 1"
            )
        return self.user_privacy.account(task, cohort.rate(task))

    def client_cost(self, task: Task) -> Account | None:
        if self.privacy:
            return self.privacy.account(task, *self.private_steps(task.largest))
        if self.user_privacy and not self.trusted:
            return self.user_privacy.account(task, secure=self.secure if self.jointly else None)
        return None

    def private_steps(self, largest: int) -> tuple[int, int]:
        """The expected batch and the number of private steps of an answer."""
        return self.local.batch, self.local.private_steps(largest)

    def released(self, stack: ClientStack, w: Tensor) -> Tensor:
        """Each client's update after training from `w` [d] as it may leave, [C, d]: charged and, where it has to be,
        noised, or clipped for the noise that the secure sum adds. Whatever comes after looks at this and not at the
        records, so it costs nothing."""
        if price := self.client_cost(stack.task):
            stack.charge(price)
        updates = self.update(stack, w)
        if not self.user_privacy or self.trusted:
            return updates
        return clipped(updates, self.user_privacy.clip) if self.jointly else self.user_privacy.noised(stack, updates)

    # ------------------------------------------------------------------------------------------------ the server

    def round(self, state: ServerState, cohort: Cohort) -> State:
        if cohort.rounds_left < self.full_rounds:
            delta = self.merged(Raw(), state.weights, TrainFull(state.weights), cohort)
            return self.server.step(state, delta)
        down = Down(self.down)
        base, question, cohort = down.reach(state, cohort)
        return down.step(self.server, state, self.merged(self.up, base, question, cohort), cohort)

    def merged(self, up: Codec, base: Tensor, question: Question, cohort: Cohort) -> Tensor:
        """The cohort's update [d] from `base` [d]: of its codes, of a secure sum, or of single updates."""
        if isinstance(up, CodeSpace):
            mean, share, _ = in_code_space(up, cohort.ask(question), cohort, self.summing)
            return mean / share
        if self.summing and up.payload.additive:
            total = cohort.ask_sum(question, self.summing)
            if self.jointly:
                return (total.totals["update"] / cohort.expected).float().to(base.device)
            return total.mean("update").to(base.device)
        if self.user_privacy and self.trusted:
            updates, _ = self.decoded(up, base, cohort.exchange(question), cohort)
            return self.user_privacy.total(updates, cohort.secret) / cohort.expected
        updates, records = self.decoded(up, base, cohort.ask(question), cohort)
        cohort.require(len(updates), len(cohort))
        return self.aggregator(updates, records)

    def decoded(self, up: Codec, base: Tensor, answers: Answers, cohort: Cohort) -> tuple[Tensor, Tensor]:
        """Updates [m, d] decoded at the weights the clients had, and the records behind them [m]; what does not decode
        is refused by name."""
        usable = decodable(up, answers, cohort)
        if not usable:
            return base.new_empty(0, len(base)), base.new_empty(0)
        if not self.trusted and (shown := up.exhibit(next(iter(usable.values())))):
            cohort.exhibit(*shown)
        decoded = up.decode(cohort.task, base.expand(len(usable), -1), list(usable.values()))
        finite = decoded.sum(1).isfinite()
        for client, fine in zip(usable, finite.tolist(), strict=True):
            if not fine:
                cohort.reject(client, Refused("not finite", "the decoded update holds a value that is not a number"))
        records = torch.tensor([p.records for p in usable.values()], device=decoded.device)
        return (decoded, records) if bool(finite.all()) else (decoded[finite], records[finite])

    def reply(self, question: Question) -> type[Answer]:
        if self.codes and isinstance(question, Train | TrainHere | TrainFrom):
            return Magnitude
        return self.up.payload if _brings_payload(question) else type(question).reply

    def schema(self, task: Task, question: Question, client: int) -> Mapping[str, Size]:
        sizes = self.up.for_client(client).sizes(task) if _brings_payload(question) else task.sizes
        return {**sizes, "records": 1} if self.unweighted else sizes

    def forecast_messages(self, task: Task, turn: Turn) -> list[Question]:
        if turn.rounds - turn.round < self.full_rounds:
            asked: list[Question] = [schema.blank(TrainFull, task.sizes)]
        else:
            asked = Down(self.down).forecast_messages(task, turn) + ([Send(0.0)] if self.codes else [])
        if (how := self.summing) and isinstance(asked[-1], tuple(self.summed)):
            asked[-1:] = how.forecast_messages(self, task, asked[-1], turn)
        return asked

    def forecast_compute(self, turn: Turn) -> Compute:
        trained = self.training(turn)
        return (
            trained
            if turn.rounds - turn.round < self.full_rounds
            else trained + self.up.for_client(turn.client).forecast_compute()
        )

    def training(self, turn: Turn) -> Compute:
        """What `update` takes."""
        if self.privacy:
            return self.local.forecast_private_compute(turn.records, turn.largest)
        return self.local.forecast_compute(turn.records)

    # ------------------------------------------------------------------------------------------------ the clients

    @property
    def handlers(self) -> Mapping[type[Question], Callable[[ClientStack, Any], Sequence[Answer]]]:
        down = Down(self.down)
        table: dict[type[Question], Callable[[ClientStack, Any], Sequence[Answer]]] = {
            Train: lambda stack, q: self.encoded(stack, q.weights.to(stack.task.device)),
            TrainFull: lambda stack, q: self.raw(stack, q.weights.to(stack.task.device)),
            CatchUp: down.steps.follow,
            TrainHere: lambda stack, q: self.encoded(stack, down.steps.held(stack, q.version)),
            TrainFrom: lambda stack, q: self.encoded(stack, down.drawn(stack, q)),
            Send: self.sent,
        }
        if how := self.summing:
            table |= how.stages({kind: table.pop(kind) for kind in self.summed})
        return table

    @property
    def summed(self) -> list[type[Question]]:
        """The questions whose answers are summed, with `secure`, and not given in the clear."""
        if self.codes:
            return [Send]
        return [Train, TrainHere, TrainFrom, TrainFull] if self.up.payload.additive else [TrainFull]

    def update(self, stack: ClientStack, w: Tensor) -> Tensor:
        """Each client's update after local training from `w` [d], [C, d]."""
        if self.privacy:
            return self.local.train_privately(stack, w, self.privacy, self.correction(w)) - w
        trained, _ = self.local.train(stack, w, self.correction(w))
        return trained - w

    def correction(self, w: Tensor) -> Callable[[Tensor], Tensor] | None:
        """What is added to each local gradient: nothing."""
        return None

    def raw(self, stack: ClientStack, w: Tensor) -> list[Update]:
        """The update as it is."""
        return self.counted(stack, Raw().encode(stack.task, w, self.released(stack, w), [], stack))

    def encoded(self, stack: ClientStack, w: Tensor) -> list[Any]:
        """Train, add what was lost last time, and encode, or in code space say first how large it is."""
        if isinstance(self.up, Raw):
            return self.raw(stack, w)
        true = self.released(stack, w)
        if self.codes:  # the mean of codes is unweighted, so weights come first
            true = true * self.shares(stack).to(true)
        if self.feedback:
            true = true + torch.stack([lost(m, w) for m in stack.memory])
        if self.codes:
            return [Magnitude(largest) for largest in noted(stack, true)]
        return self.counted(stack, self.coded(stack, self.up, w.expand(len(stack), -1), true))

    def sent(self, stack: ClientStack, question: Send) -> list[Any]:
        """The codes of what was trained in this round, at the scale that was agreed on."""
        up, true = tuned(self.up, stack, question), recalled(stack)
        payloads = self.coded(stack, up, true, true)
        return [replace(payload, share=row) for payload, row in zip(payloads, self.shares(stack), strict=True)]

    def coded(self, stack: ClientStack, up: Codec, base: Tensor, true: Tensor) -> list[Any]:
        """Encode, and remember what is lost this time."""
        task = stack.task
        payloads = up.encode(task, base, true, stack.seeds("encoding"), stack)
        decoded = up.decode(task, base, payloads)
        stack.measure(cosine=cosine(decoded, true))
        for layer in task.layout.layers:
            part = slice(layer.start, layer.stop)
            stack.measure(**{f"cosine/{layer.name}": cosine(decoded[:, part], true[:, part])})
        if self.feedback:
            kept = [m or ClientMemory() for m in stack.memory]
            stack.remember([replace(m, residual=r) for m, r in zip(kept, (true - decoded).cpu(), strict=True)])
        return payloads

    def counted(self, stack: ClientStack, payloads: Sequence[Any]) -> list[Any]:
        """Payloads with the number of records behind each, or 1 where that is private."""
        if self.unweighted:
            return list(payloads)
        return [replace(payload, records=int(n)) for payload, n in zip(payloads, stack.rows.counts, strict=True)]

    def shares(self, stack: ClientStack) -> Tensor:
        """λ_k, [C, 1]: how much each client counts in the mean of codes."""
        return torch.ones(len(stack), 1) if self.unweighted else shares(stack)


def _brings_payload(question: Question) -> bool:
    return isinstance(question, Train | TrainHere | TrainFrom | Send)


def lost(memory: ClientMemory | None, w: Tensor) -> Tensor:
    """What the codec has lost of a client's updates so far, [d]."""
    return torch.zeros_like(w) if memory is None or memory.residual is None else memory.residual.to(w.device)
