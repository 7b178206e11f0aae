"""User-level differential privacy: what is released hardly depends on what one client, with all its records, sends.

where = "sum":    each update is clipped to norm C and the sum of a round gets noise of deviation σC. The sum is divided
                  by the public number of clients a round is meant to have, and unweighted. Without the secure sum the
                  server adds the noise, Gaussian, and is trusted with the updates. Under it the clients add a share
                  each, integers inside the sum (`skellam.py`), and the server sees the noised sum only.
where = "client": each client's own update gets all of the noise, Gaussian, before it leaves.

Neighbours differ in what one client sends; that it takes part is not hidden.

relation = "replacement": it sends any other update, which moves the sum by 2C: noise σC is worth σ/2.
relation = "zero-out":    it sends an update of zero, which moves the sum by C.

Where cohorts are Poisson draws, a sum is charged with the rate of being drawn: this holds against those who see the
model and not who took part. The server does, so with "client" and under the secure sum, which protect from it, the rate
is 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedveil.core.seeds import Seed
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.privacy.account import Account, Promise
from fedveil.privacy.accountant import Noised, Skellam, epsilon
from fedveil.privacy.dpsgd import clipped, normal
from fedveil.privacy.secagg.settings import SecureSum
from fedveil.privacy.skellam import SumNoise, rounded

TAIL = 8.0  # deviations of a client's noise that fixed point has room for; beyond is one number in 10^15
RELATIONS = {"replacement": 2, "zero-out": 1}  # clips that neighbours lie apart
COARSE = 1.1  # times the ε of noise that is not rounded, at most
FINEST = 52  # bits of fixed point, whose rounding costs nothing


@dataclass(frozen=True)
class UserLevel(Promise):
    """Differential privacy for each client, with all its records.

    clip:      C, the norm to which each client's update is clipped
    delta:     δ, below 1 / the number of clients
    where:     noise is added to the "sum" of a round, or by each "client" to its own update
    relation:  ε holds for "replacement" of a client's update by any other, or for "zero-out" of it
    colluders: clients of a secure sum that may tell the server their noise; the others' noise alone keeps ε
    """

    key: ClassVar[str] = "user_privacy"

    where: str = "sum"
    relation: str = "replacement"
    colluders: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.where not in ("sum", "client"):
            raise ValueError(f"user_privacy.where is '{self.where}'; use sum or client")
        if self.relation not in RELATIONS:
            raise ValueError(f"user_privacy.relation is '{self.relation}'; use {' or '.join(RELATIONS)}")
        if self.colluders < 0:
            raise ValueError(f"user_privacy.colluders is {self.colluders}; it is 0 or more")

    def account(
        self, task: Task, rate: float = 1.0, secure: SecureSum | None = None, size: int | None = None
    ) -> Account:
        """The price of a round at a rate of being drawn.

        secure: the secure sum in which clients add the noise together
        size:   how many numbers of a client are summed; None: as many as there are weights
        """
        if self.delta >= 1 / len(task.clients):
            raise ValueError(
                f"user_privacy.delta is {self.delta:g}, but there are {len(task.clients)} clients; set it below "
                f"{1 / len(task.clients):.2g}"
            )
        if secure:
            size = task.layout.size if size is None else size
            step = self.step(secure.bits, size)
            self._validate_precision(step, secure.bits, size)
            return Account(step, self, colluders=self.colluders)
        if rate < 1 and self.relation != "zero-out":
            raise ValueError(
                f"user_privacy.relation is {self.relation}, but cohorts are hidden Poisson draws, which are accounted "
                'for zero-out only; set user_privacy.relation = "zero-out"'
            )
        return Account(Noised(self.sigma / RELATIONS[self.relation], rate, 1), self, everyone=rate < 1)

    def step(self, bits: int, size: int) -> Skellam:
        """One noised sum of vectors of `size` values in fixed point of so many bits, in units of that fixed point."""
        half, apart = (1 << bits - 1) - 1, RELATIONS[self.relation]
        norm = rounded(half, size)
        return Skellam((self.sigma * half) ** 2, apart * norm, apart * norm * min(math.sqrt(size), norm), 1)

    def _validate_precision(self, step: Skellam, bits: int, size: int) -> None:
        """Raise a ValueError if rounding to fixed point makes a round cost much more."""

        def cost(step: Skellam) -> float:
            return epsilon([step], self.delta)

        here, least = cost(step), cost(self.step(FINEST, size))
        if here > COARSE * least:
            enough = next(n for n in range(bits + 1, FINEST + 1) if cost(self.step(n, size)) <= COARSE * least)
            raise ValueError(
                f"method.secure.bits is {bits}, too coarse for user_privacy with {size:,} numbers: one round would "
                f"cost ε {here:.4g} ({self.relation}) instead of the {least:.4g} of noise without rounding; set it to "
                f"{enough} or more"
            )

    def clipped_sum(self, updates: Tensor) -> Tensor:
        """The sum of updates [m, d], each clipped, in float64: [d]."""
        return clipped(updates.double(), self.clip).sum(0)

    def noised_sum(self, total: Tensor, secret: Seed) -> Tensor:
        """A sum of clipped updates [d] with noise. Rounded to float32 after the noise."""
        noise = normal(secret.child("noise"), len(total), total.device) * (self.sigma * self.clip)
        return (total + noise).float()

    def noised(self, stack: ClientStack, updates: Tensor) -> Tensor:
        """Each client's update [C, d], clipped, with noise of its own."""
        size, device = updates.shape[1], updates.device
        drawn = [normal(secret.child("noise"), size, device) for secret in stack.secrets("user privacy")]
        noise = torch.stack(drawn) * (self.sigma * self.clip)
        return (clipped(updates.double(), self.clip) + noise).to(updates.dtype)

    @property
    def reach(self) -> float:
        """The largest magnitude in what a client sends that noises its own update."""
        return self.clip * (1 + TAIL * self.sigma)

    @property
    def sum_noise(self) -> SumNoise:
        """What clients add inside a secure sum."""
        return SumNoise(self.sigma, self.colluders)
