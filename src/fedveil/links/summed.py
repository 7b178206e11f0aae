"""The uplink through the secure sum: the server learns the sum of the clients' vectors and nothing else of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from fedveil.codecs.base import Codec
from fedveil.core import schema
from fedveil.core.cohort import Cohort
from fedveil.core.forecast import Compute, Turn
from fedveil.core.message import Answer, Question, Size
from fedveil.core.method import Method, State
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.links.decoded import encoded
from fedveil.links.payloads import Payloads
from fedveil.links.up import Answering, Given, Total, Uplink
from fedveil.privacy.secagg.server import ask_sum
from fedveil.privacy.secagg.settings import SecureSum
from fedveil.train.transforms import Transform


@dataclass(frozen=True)
class Summed(Uplink):
    """Payloads that add up, summed under masks; their mean is decoded.

    counted: whether clients weigh by their records
    noised:  whether clients add noise inside the sum, which is then divided by a public number of clients
    release: transforms of a linear codec's codes, after which they may leave a client
    """

    codec: Codec
    how: SecureSum
    payloads: Payloads
    counted: bool = True
    noised: bool = False
    transforms: tuple[Transform, ...] = ()
    release: tuple[Transform, ...] = ()

    def validate(self, task: Task) -> None:
        self.codec.validate(task)
        self.how.validate(task, self.payloads.record)

    def collect(self, state: State, cohort: Cohort, question: Question, at: Tensor) -> Total:
        total = ask_sum(cohort, question, self.how)
        count, shared = cohort.expected if self.noised else len(total.clients), self.codec.shared(cohort.seed)

        def mean(name: str) -> Tensor:
            fields = {f: self.payloads.field(name, f) for f in schema.fields(self.codec.payload)}
            values = {f: (total.totals[g] / count).float() if self.noised else total.mean(g) for f, g in fields.items()}
            return self.codec.decode(cohort.task, at[None], [self.codec.payload(**values, **shared)])[0]

        return Total(mean, lambda name: mean(name) * count, count)

    def answering(self, given: Mapping[type[Question], Given]) -> Answering:
        table = {kind: partial(self._answer, vectors) for kind, vectors in given.items()}
        return Answering(summed=[(table, self.payloads.record)])

    def _answer(self, given: Given, stack: ClientStack, question: Any) -> list[Any]:
        w, x = given(stack, question)
        parts = encoded(self.codec, stack, w, x, self.transforms, self.release)
        return self.payloads.join(parts, {}, stack.rows.counts.tolist() if self.counted else None)

    def reply(self, question: type[Question]) -> type[Answer]:
        return self.payloads.record

    def sizes(self, task: Task, question: type[Question], client: int) -> Mapping[str, Size]:
        return self.codec.sizes(task)

    def forecast_messages(self, method: Method, task: Task, question: Question, turn: Turn) -> list[Question]:
        return self.how.forecast_messages(method, task, question, turn)

    def forecast_compute(self, turn: Turn) -> Compute:
        return self.codec.forecast_compute(turn.records)
