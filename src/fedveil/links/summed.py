"""The uplink through the secure sum: the server learns the sum of the clients' vectors and nothing else of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from fedveil.codecs.raw import Raw
from fedveil.core.cohort import Cohort
from fedveil.core.forecast import Compute, Turn
from fedveil.core.message import Answer, Question, Size
from fedveil.core.method import Method, State
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.links.payloads import Payloads
from fedveil.links.up import Answering, Given, Total
from fedveil.privacy.secagg.server import ask_sum
from fedveil.privacy.secagg.settings import SecureSum


@dataclass(frozen=True)
class Summed:
    """Raw vectors, summed under masks.

    counted: whether clients weigh by their records
    noised:  whether clients add noise inside the sum, which is then divided by a public number of clients
    """

    how: SecureSum
    payloads: Payloads
    counted: bool = True
    noised: bool = False

    @property
    def questions(self) -> tuple[type[Question], ...]:
        return ()

    def validate(self, task: Task) -> None:
        self.how.validate(task, self.payloads.record)

    def broadcast(self, task: Task, state: State) -> dict[str, Tensor]:
        return {}

    def collect(self, state: State, cohort: Cohort, question: Question, at: Tensor) -> Total:
        total = ask_sum(cohort, question, self.how)
        count = cohort.expected if self.noised else len(total.clients)

        def mean(name: str) -> Tensor:
            field = self.payloads.field(name, "update")
            if self.noised:
                return (total.totals[field] / count).float().to(at.device)
            return total.mean(field).to(at.device)

        return Total(mean, lambda name: mean(name) * count, count)

    def answering(self, given: Mapping[type[Question], Given]) -> Answering:
        table = {kind: partial(self._answer, vectors) for kind, vectors in given.items()}
        return Answering(summed=[(table, self.payloads.record)])

    def _answer(self, given: Given, stack: ClientStack, question: Any) -> list[Any]:
        w, x = given(stack, question)
        parts = {name: Raw().encode(stack.task, w, rows, [], stack) for name, rows in x.named.items()}
        return self.payloads.join(parts, {}, stack.rows.counts.tolist() if self.counted else None)

    def reply(self, question: type[Question]) -> type[Answer]:
        return self.payloads.record

    def sizes(self, task: Task, question: type[Question], client: int) -> Mapping[str, Size]:
        return task.sizes

    def forecast_messages(self, method: Method, task: Task, question: Question, turn: Turn) -> list[Question]:
        return self.how.forecast_messages(method, task, question, turn)

    def forecast_compute(self, client: int) -> Compute:
        return Compute()
