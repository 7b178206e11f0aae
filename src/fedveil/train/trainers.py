"""Trainers: turn a client's records and the server's weights into an update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fedveil.core.capability import GRADIENTS, RECORD_GRADIENTS
from fedveil.core.forecast import Compute, Turn
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.privacy.account import Account
from fedveil.privacy.dpsgd import DpSgd
from fedveil.train.local import LocalTraining, full_gradient, full_gradient_compute

Correction = Callable[[Tensor], Tensor]  # weights [C, d] -> what is added to each gradient, [C, d]


@dataclass(frozen=True)
class Trained:
    """Updates [C, d] and the steps that led to them [C]."""

    update: Tensor
    steps: Tensor


class Trainer(Protocol):
    """Turn records into updates.

    needs:    operations that the model must support, by the names in `capability.WAYS_OUT`
    no_norms: why batch norm layers cannot be trained; empty if they can
    """

    needs: ClassVar[tuple[str, ...]]
    no_norms: ClassVar[str]

    def train(self, stack: ClientStack, w: Tensor, correction: Correction | None) -> Trained:
        """Train each client of a stack from `w` [d]."""

    def client_cost(self, task: Task) -> Account | None:
        """Return the privacy cost of an answer for each record; None without differential privacy."""

    def forecast_compute(self, turn: Turn) -> Compute:
        """Return the compute that training takes of a client."""


@dataclass(frozen=True)
class Minibatches:
    """Minibatch training, `LocalTraining`."""

    needs: ClassVar[tuple[str, ...]] = (GRADIENTS,)
    no_norms: ClassVar[str] = ""

    local: LocalTraining

    def train(self, stack: ClientStack, w: Tensor, correction: Correction | None) -> Trained:
        weights, steps = self.local.train(stack, w, correction)
        return Trained(weights - w, steps)

    def client_cost(self, task: Task) -> Account | None:
        return None

    def forecast_compute(self, turn: Turn) -> Compute:
        return self.local.forecast_compute(turn.records)


@dataclass(frozen=True)
class Untrained:
    """No training: the codec makes the updates itself."""

    needs: ClassVar[tuple[str, ...]] = ()
    no_norms: ClassVar[str] = "clients do not train"

    def train(self, stack: ClientStack, w: Tensor, correction: Correction | None) -> Trained:
        return Trained(w.new_zeros(len(stack), len(w)), w.new_zeros(len(stack)))

    def client_cost(self, task: Task) -> Account | None:
        return None

    def forecast_compute(self, turn: Turn) -> Compute:
        return Compute()


@dataclass(frozen=True)
class PrivateMinibatches:
    """DP-SGD. Every client takes the same number of steps. Corrections are added after the noise."""

    needs: ClassVar[tuple[str, ...]] = (RECORD_GRADIENTS,)
    no_norms: ClassVar[str] = "it mixes the records of a batch, so that no record's gradient can be clipped by itself"

    local: LocalTraining
    privacy: DpSgd

    def train(self, stack: ClientStack, w: Tensor, correction: Correction | None) -> Trained:
        weights = self.local.train_privately(stack, w, self.privacy, correction)
        steps = self.local.private_steps(stack.task.largest)
        return Trained(weights - w, torch.full((len(stack),), steps, device=w.device))

    def client_cost(self, task: Task) -> Account | None:
        return self.privacy.account(task, self.local.batch, self.local.private_steps(task.largest))

    def forecast_compute(self, turn: Turn) -> Compute:
        return self.local.forecast_private_compute(turn.records, turn.largest)


@dataclass(frozen=True)
class FullGradient:
    """One gradient over all records; the update is its negative."""

    needs: ClassVar[tuple[str, ...]] = (GRADIENTS,)
    no_norms: ClassVar[str] = "it takes one gradient over all records, and no batches"

    def train(self, stack: ClientStack, w: Tensor, correction: Correction | None) -> Trained:
        return Trained(-full_gradient(stack, w)[0], torch.ones(len(stack), device=w.device))

    def client_cost(self, task: Task) -> Account | None:
        return None

    def forecast_compute(self, turn: Turn) -> Compute:
        return full_gradient_compute(turn.records)


@dataclass(frozen=True)
class PrivateFullGradient:
    """One step of DP-SGD over all records: clip each record's gradient and add noise to the sum."""

    needs: ClassVar[tuple[str, ...]] = (RECORD_GRADIENTS,)
    no_norms: ClassVar[str] = "it mixes the records of a batch, so that no record's gradient can be clipped by itself"

    privacy: DpSgd

    def train(self, stack: ClientStack, w: Tensor, correction: Correction | None) -> Trained:
        weights, draws = w.expand(len(stack), -1), [(1, stack.secrets("gradients"))]
        gradient = self.privacy.gradients(stack, weights, stack.task.largest, draws)
        stack.passes += gradient.records
        return Trained(-gradient(), torch.ones(len(stack), device=w.device))

    def client_cost(self, task: Task) -> Account | None:
        return self.privacy.account(task, task.largest, 1)

    def forecast_compute(self, turn: Turn) -> Compute:
        return full_gradient_compute(turn.records)
