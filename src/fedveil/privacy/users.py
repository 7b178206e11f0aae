"""User-level differential privacy: what is released hardly depends on whether a client, with all its records, is there.

where = "sum":    each update is cut to norm C and the sum of a round gets Gaussian noise of deviation σC. One client
                  more or less moves the sum by C. Whoever adds the noise is trusted with the updates: the server, or
                  under the secure sum the clients themselves, a share each, so that nobody ever holds less than the
                  noise beside more than one update. The sum is divided by the public number of clients a round is meant
                  to have, and unweighted.
where = "client": each client's own update gets all of the noise before it leaves. That it took part is seen, so a
                  neighbour is any other update in its place, which moves it by 2C: noise σC is worth σ/2.

Where cohorts are Poisson draws, a sum is charged with the rate of being drawn: this holds against whoever sees the
model and not who took part. The server does, so with "client" and under the secure sum, which protect from it, the rate
is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedveil.clients import Crowd
from fedveil.privacy.account import Account, Promise
from fedveil.privacy.accountant import Noised
from fedveil.privacy.dpsgd import clipped, normal
from fedveil.privacy.skellam import SumNoise
from fedveil.seeds import Seed
from fedveil.task import Task

TAIL = 8.0  # deviations of a client's noise that fixed point has room for; beyond is one number in 10^15


@dataclass(frozen=True)
class UserLevel(Promise):
    """Differential privacy for each client, with all its records.

    clip:  C, the norm to which each client's update is cut
    delta: δ, below 1 / the number of clients
    where: noise is added to the "sum" of a round, or by each "client" to its own update
    """

    key: ClassVar[str] = "user_privacy"

    where: str = "sum"
    colluders: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.where not in ("sum", "client"):
            raise ValueError(f"user_privacy.where is '{self.where}'; use sum or client")

    def account(self, task: Task, rate: float = 1.0) -> Account:
        """The price of a round at a rate of being drawn."""
        if self.delta >= 1 / len(task.clients):
            raise ValueError(
                f"user_privacy.delta is {self.delta:g}, but there are {len(task.clients)} clients; set it below "
                f"{1 / len(task.clients):.2g}"
            )
        noise = self.noise / 2 if self.where == "client" else self.noise
        return Account(Noised(noise, rate, 1), self, everyone=rate < 1)

    def total(self, updates: Tensor, secret: Seed) -> Tensor:
        """The sum of updates [m, d], each cut, with noise: [d]."""
        noise = normal(secret.child("noise"), updates.shape[1]) * (self.noise * self.clip)
        return clipped(updates, self.clip).sum(0) + noise.to(updates)

    def noised(self, crowd: Crowd, updates: Tensor) -> Tensor:
        """Each client's update [C, d], clipped, with noise of its own."""
        drawn = [normal(secret.child("noise"), updates.shape[1]) for secret in crowd.secrets("user privacy")]
        return clipped(updates, self.clip) + (torch.stack(drawn) * (self.noise * self.clip)).to(updates)

    @property
    def reach(self) -> float:
        """The largest magnitude in what a client sends that noises its own update."""
        return self.clip * (1 + TAIL * self.noise)

    @property
    def sum_noise(self) -> SumNoise:
        """What clients add inside a secure sum."""
        return SumNoise(self.noise, self.colluders)
