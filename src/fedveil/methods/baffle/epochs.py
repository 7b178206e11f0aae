"""BAFFLE's epoch level: FedAvg whose local gradients are estimated by forward passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar

from fedveil.core.method import SUMMED, About, State
from fedveil.core.task import Task
from fedveil.methods.about import PRIVATE
from fedveil.methods.averaging import Averaging
from fedveil.methods.baffle.baffle import PAPER
from fedveil.methods.baffle.estimate import Estimate, ForwardTraining
from fedveil.train.local import LocalTraining
from fedveil.train.optimizers import ServerOptimizer
from fedveil.train.trainers import Trainer


@dataclass(frozen=True)
class BaffleEpochs(Estimate, Averaging):
    """Local steps along estimated gradients; updates are averaged (BAFFLE, section 3.2, "epoch level")."""

    name: ClassVar[str] = "baffle-epochs"
    about: ClassVar[About] = About(
        "Clients train without backpropagation, by forward passes only, and send their update.",
        sends="the weight update w_k - w (d floats) and the record count n_k",
        server_sees="every client's update, or with secure their sum",
        network_sees="the same bytes, unless the transport encrypts them",
        claims=(
            ("heuristic", "the better the estimated gradients, the more exposed is the update to inversion."),
            SUMMED,
            PRIVATE[1],
        ),
        paper=PAPER,
    )
    limited: ClassVar[bool] = True
    unsupported: ClassVar[Mapping[str, str]] = {
        "privacy": "it measures the loss of a whole batch, in which no record's part is clipped or covered by noise; "
        "use fedavg",
    }

    local: LocalTraining = field(default_factory=lambda: LocalTraining("adam", 0.01, beta2=0.99, weight_decay=5e-4))
    server: ServerOptimizer = field(default_factory=lambda: ServerOptimizer("adam", 0.01, tau=1e-8))

    def __post_init__(self) -> None:
        Estimate.__post_init__(self)
        Averaging.__post_init__(self)
        if self.local.precision != "float32":
            raise ValueError(
                f"local.precision is {self.local.precision}, which is of gradients, and baffle-epochs estimates them; "
                'set method.precision="float16" instead'
            )
        if self.local.optimizer == "adamw" and self.layers:
            raise ValueError(
                "local.optimizer is adamw, which shrinks every layer, also those not in method.layers; use adam"
            )

    @property
    def trainer(self) -> Trainer:
        return ForwardTraining(self.local, Estimate(**{f.name: getattr(self, f.name) for f in fields(Estimate)}))

    def init_state(self, task: Task) -> State:
        self.validate(task)
        return super().init_state(task)
