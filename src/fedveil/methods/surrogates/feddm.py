"""FedDM: clients send synthetic sets whose features are those of their records, class by class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedveil.core.forecast import Compute, Turn
from fedveil.core.method import About, State
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.gpu.graphs import repeat
from fedveil.methods.surrogates.augment import Siamese
from fedveil.methods.surrogates.base import Surrogates


@dataclass(frozen=True)
class FedDm(Surrogates):
    """Iterative distribution matching (Xiong et al. 2023, algorithm 1): at weights near the server's, the mean features
    and logits of each class are to be those of the client's records of that class.

    draws:   weights drawn within `radius` of the server's, the same for all clients
    batches: steps of the images at each of them, with a real batch each
    batch:   records of a real batch, equally many of each class that the client holds
    region:  how far the server goes, by default as far as `radius`

    All else is as in FedLAP. Real batches are only run forward.
    """

    name: ClassVar[str] = "feddm"
    about: ClassVar[About] = About(
        "Clients fit small synthetic sets to the mean features of each of their classes; the server trains on all.",
        sends="synthetic images, equally many of each class that it holds, a radius and the record count n_k",
        server_sees="which classes each client holds; images whose mean features are those of its records, class by "
        "class, at weights near those sent",
        network_sees="the same bytes, unless the transport encrypts them",
        claims=(
            ("heuristic", "the images look unlike records. They are fitted to means over the records of a class, and "
            'with init "real" they start from records, so this hides nothing for certain.'),
        ),
        paper="Xiong et al., FedDM: Iterative Distribution Matching for Communication-Efficient Federated Learning, "
        "2023",
    )  # fmt: skip

    unsupported: ClassVar[Mapping[str, str]] = {
        "privacy": "means of features are matched without clip or noise, and fedlap matches gradients that have both"
    }

    images: int = 10
    batches: int = 5
    batch: int = 512
    radius: float = 5.0
    region: str = "constant"
    image_lr: float = 1.0
    draws: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draws < 1:
            raise ValueError(f"method.draws is {self.draws}; it is at least 1")

    def init_state(self, task: Task) -> State:
        state = super().init_state(task)
        embedding(task, task.initial, task.test_x[:1])  # says what of the model does not suit
        return state

    def fit(self, stack: ClientStack, w: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """Fit `images` [C, points, …] in place; returns the distance of the means at the last step, [C] (eq. 5)."""
        task, steps = stack.task, self.draws * self.batches
        near, rows = self.near(stack, w), self.rows(stack, labels, steps)
        change = Siamese(self.augment, task, stack.seeds("augment"), steps)
        velocity, apart = torch.zeros_like(images), torch.zeros(len(stack), device=task.device)
        cursor = torch.zeros(1, dtype=torch.int64, device=task.device)

        def means(w: Tensor, x: Tensor, classes: int) -> Tensor:
            """Of points [C, n, …], class by class -> [C, classes, features + logits]."""
            found = embedding(task, w, change(x).flatten(0, 1))
            return found.view(len(x), classes, -1, found.shape[1]).mean(2)

        def step() -> None:
            here, batch = near.index_select(0, cursor // self.batches)[0], rows.index_select(0, cursor)[0]
            with torch.no_grad():
                goal = means(here, task.x[batch.flatten(1)], batch.shape[1])
            points = images.detach().requires_grad_()
            found = (means(here, points, batch.shape[1]) - goal).square().sum((1, 2))
            (slope,) = torch.autograd.grad(found.sum(), points)
            velocity.mul_(self.momentum).add_(slope)
            images.sub_(velocity, alpha=self.image_lr)
            apart.copy_(found.detach())
            change.advance()
            cursor.add_(1)

        repeat(step, steps, task.device)
        return apart

    def near(self, stack: ClientStack, w: Tensor) -> Tensor:
        """Weights around `w` [d], normally distributed and cut to a distance of `radius`: [draws, d]."""
        away = torch.randn(self.draws, len(w), generator=stack.seed.child("near").torch())
        norms: Tensor = torch.linalg.vector_norm(away, dim=1, keepdim=True)
        return w + (away * (self.radius / norms.clamp(min=self.radius))).to(w)

    def rows(self, stack: ClientStack, labels: Tensor, steps: int) -> Tensor:
        """The records of each step's batch, class by class: [steps, C, classes, records]. A class with fewer has them
        several times."""
        task = stack.task
        classes = labels[:, :: self.images].tolist()
        each = max(1, self.batch // len(classes[0]))
        index = np.empty((steps, len(stack), len(classes[0]), each), np.int64)
        for k, (own, seed) in enumerate(zip(stack.rows.indices, stack.seeds("batches"), strict=True)):
            rng = seed.numpy()
            for c, label in enumerate(classes[k]):
                of = own[task.data.y[own].numpy() == label]
                for t in range(steps):
                    index[t, k, c] = np.resize(rng.permutation(of), each)
        stack.passes += index.size
        return torch.from_numpy(index).to(task.device)

    def forecast_compute(self, turn: Turn) -> Compute:
        """Real records only; where the classes that a client holds do not divide `batch` there are a few less, and
        where there are more classes than that one of each."""
        return Compute(self.draws * self.batches * self.batch + self.measuring(turn), vectors=8, held=self.batch)


# ---------------------------------------------------------------------------------------------------- features


class _Linear(TorchFunctionMode):
    """Notes what the last linear layer was given."""

    given: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            self.given = args[0]
        return func(*args, **(kwargs or {}))


def embedding(task: Task, w: Tensor, x: Tensor) -> Tensor:
    """What the model's last linear layer is given and what the model returns: [d], [B, *input] -> [B, features + K]."""
    with _Linear() as last:
        logits = task.f(w, x)
    if last.given is None or last.given.dim() != 2:
        raise ValueError("feddm compares what a model's last linear layer is given, and this one has none; use fedlap")
    return torch.cat([last.given, logits], 1)
