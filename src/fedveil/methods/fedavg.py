"""FedAvg: the mean of the clients' updates (McMahan et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedveil.core.method import About
from fedveil.methods.about import raw_about
from fedveil.methods.averaging import Averaging


@dataclass(frozen=True)
class FedAvg(Averaging):
    """Local training, then the mean of the updates, weighted by records (McMahan et al. 2017, algorithm 1)."""

    name: ClassVar[str] = "fedavg"
    about: ClassVar[About] = raw_about(
        "Clients train locally; the server averages what changed.",
        "the weight update w_k - w (d floats) and the record count n_k",
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017",
    )
