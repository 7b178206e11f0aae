"""FedSGD: one gradient a client and round (McMahan et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedveil.core.method import About
from fedveil.methods.about import raw_about
from fedveil.methods.averaging import Averaging
from fedveil.train.trainers import FullGradient, PrivateFullGradient, Trainer


@dataclass(frozen=True)
class FedSGD(Averaging):
    """One gradient over all of a client's records; `server.lr` is the step (McMahan et al. 2017, section 2)."""

    name: ClassVar[str] = "fedsgd"
    about: ClassVar[About] = raw_about(
        "Clients send the gradient over all their records; the server takes one step.",
        "the negative gradient (d floats) and the record count n_k",
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017",
    )

    @property
    def trainer(self) -> Trainer:
        return PrivateFullGradient(self.privacy) if self.privacy else FullGradient()
