"""FedLAP and FedLAP-DP: clients send synthetic sets that imitate their loss, and the server trains on these."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor

from fedveil import message
from fedveil.clients import Crowd
from fedveil.cost import Turn, Work
from fedveil.federation import About, Answers, Cohort, Method, State
from fedveil.graphs import repeat
from fedveil.local import GRADIENT_CHUNK
from fedveil.message import Answer, Count, Question, Record, Refused, Shape, Size, Weights
from fedveil.privacy.dpsgd import DpSgd
from fedveil.surrogates.matching import distance
from fedveil.task import Task

WIDEST = 1e3  # the range of synthetic inputs, either way
AGAIN = 10  # times that a round may have been asked, on average, in what a client says it has charged
Images = Annotated[Tensor, Shape(("points", "input"), low=-WIDEST, high=WIDEST)]
Spent = Annotated[int, Meta(ge=0, le=10**9)]


@message.kind(57)
class Classes(Answer, frozen=True):
    """1 for each class of which the client has records."""

    held: Annotated[Tensor, Shape(("classes",), torch.uint8, 0, 1)]


@message.kind(58)
class WhichClasses(Question, frozen=True):
    """Which classes do you have records of?"""

    reply = Classes


@message.kind(59)
class Surrogate(Answer, frozen=True):
    """A synthetic set, how far from the weights it stands in for the client's data, and the records behind it.

    With differential privacy `spent` are the private steps that the client has charged so far, this answer's among
    them, and `records` is 1 whatever it has.
    """

    images: Images
    labels: Annotated[Tensor, Shape(("points",), torch.int16, 0, 2**15 - 1)]
    radius: Annotated[float, Meta(ge=0, le=1e6)]
    spent: Spent = 0
    records: Count = 1


@message.kind(60)
class Distil(Question, frozen=True):
    """Fit a synthetic set of so many points to your gradients around these weights."""

    reply = Surrogate
    weights: Weights
    points: Annotated[int, Meta(ge=1, le=10**6)]

    def sizes(self) -> dict[str, Size]:
        return {"points": self.points}


@message.kind(61)
class Last(Record, frozen=True):
    """What a client remembers: the images it sent last, and the private steps it has charged."""

    images: Images
    spent: Spent


@message.kind(62)
class LapState(State, frozen=True):
    """The global weights, and the most private steps that any client has charged."""

    spent: Spent = 0


@dataclass(frozen=True)
class FedLap(Method):
    """Local approximation of each client's loss by a synthetic set (FedLAP-DP, algorithms 1 and 2; 3 with `privacy`).

    images:       points a class; labels are fixed, equally many of each class that the client holds
    init:         what images start from: "noise"; "previous", the client's last ones; "real", some of its records
    trajectories: R_i, how often the weights start again from the server's
    passes:       the most passes of a trajectory, each of `batches` real batches of `batch` records
    image_steps:  R_b, steps of the images on a real batch
    model_steps:  R_l, steps of the weights on the synthetic set after a pass
    radius:       r, how far from the server's weights a trajectory goes
    mse:          λ, the weight of the squared difference beside the cosine distance
    region:       how far the server goes: the "min", "max" or "median" of the radii that clients measure; "constant":
                  as far as `radius`; "fixed": as far as all its steps lead
    steps:        the most steps of the server, and of a client that measures its radius
    lr, model_lr: of the server's steps and of a trajectory's, falling to 0 along half a cosine
    image_lr, momentum: of images
    weighting:    a client counts by its "records" or "equal"
    privacy:      real gradients are differentially private for each record, and charged
    """

    name: ClassVar[str] = "fedlap"
    about: ClassVar[About] = About(
        "Clients fit small synthetic sets to their gradients; the server trains on all of them within a trust region.",
        sends="synthetic images, equally many of each class that it holds, a radius and the record count n_k",
        server_sees="which classes each client holds; a distillate of its records: images whose gradients imitate "
        "theirs at the weights sent, from which an approximation of its update can be computed",
        network_sees="the same bytes, unless the transport encrypts them",
        claims=(
            ("heuristic", "the images look unlike records. They are fitted to the records' gradients, and with "
            'init "real" they start from records, so this hides nothing for certain.'),
            ("proved", "with privacy: what a client sends is (ε, δ)-differentially private for each of its records, "
            "at the ε that it has charged; which classes it holds is not hidden."),
        ),
        paper="Wang et al., FedLAP-DP: Federated Learning by Sharing Differentially Private Loss Approximations, 2024",
    )  # fmt: skip

    images: int = 50
    init: str = "previous"
    trajectories: int = 1
    passes: int = 5
    batches: int = 40
    batch: int = 256
    image_steps: int = 5
    model_steps: int = 0
    radius: float = 10.0
    mse: float = 0.1
    region: str = "min"
    steps: int = 100
    lr: float = 0.1
    model_lr: float = 0.1
    image_lr: float = 100.0
    momentum: float = 0.5
    weighting: str = "records"
    privacy: DpSgd | None = None

    def __post_init__(self) -> None:
        for name, known in (
            ("init", ("noise", "previous", "real")),
            ("region", ("min", "max", "median", "constant", "fixed")),
            ("weighting", ("records", "equal")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"method.{name} is '{getattr(self, name)}'; use {', '.join(known)}")
        for name in ("images", "trajectories", "passes", "batches", "batch", "image_steps", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"method.{name} is {getattr(self, name)}; it is at least 1")
        if min(self.radius, self.lr, self.model_lr, self.image_lr) <= 0:
            raise ValueError("method.radius, method.lr, method.model_lr and method.image_lr are above 0")
        if self.model_steps < 0 or self.mse < 0 or not 0 <= self.momentum < 1:
            raise ValueError("method.model_steps and method.mse are 0 or more, and method.momentum is 0 to below 1")
        if self.privacy:
            self.refuse_private()

    def refuse_private(self) -> None:
        """Say which settings would let something of the records past the noise."""
        if self.init == "real":
            raise ValueError(
                'method.init is "real", which sends records without noise; '
                'with method.privacy use "noise" or "previous"'
            )
        if self.measures:
            raise ValueError(
                f'method.region is "{self.region}" of radii that clients measure on their records without noise; '
                'with method.privacy use "constant" or "fixed"'
            )
        if self.weighting == "records":
            raise ValueError(
                'method.weighting is "records", which tells how many records a client has; '
                'with method.privacy use "equal"'
            )

    @property
    def measures(self) -> bool:
        """Whether clients measure r_k."""
        return self.region in ("min", "max", "median")

    @property
    def charged(self) -> int:
        """The private steps of one answer: as many as there can be, whether or not a trajectory ends earlier."""
        return self.trajectories * self.passes * self.batches if self.privacy else 0

    def begin(self, task: Task) -> LapState:
        if not task.data.x.is_floating_point():
            raise ValueError("fedlap fits its inputs by gradient, and tokens have none; use fedavg")
        if task.data.y.dim() != 1:
            raise ValueError("fedlap gives each point one label, and these records have several; use fedavg")
        if self.privacy:
            self.privacy.refuse(task, self.privacy.rate(task, self.batch), self.charged)
        return LapState(task.initial)

    # ------------------------------------------------------------------------------------------------ the server

    def round(self, state: LapState, cohort: Cohort) -> LapState:
        held = cohort.ask(WhichClasses())
        points = {k: self.images * int(answer.held.sum()) for k, answer in held.items()}
        if none := [k for k, count in points.items() if not count]:
            for client in none:
                cohort.refuse(client, Refused("out of range", "held has no class at all"))
            cohort.require(len(points) - len(none), len(cohort))
        made = {count: Distil(state.weights, count) for count in set(points.values()) - {0}}
        asked = cohort.only(set(points) - set(none))
        sent = asked.exchange({k: made[points[k]] for k in asked.ids})
        said = [answer.spent for answer in sent.values() if self.plausible(answer.spent, cohort.round)]
        spent = max([state.spent, *said])
        if self.privacy:  # also where too few answered: what they sent is out
            cohort.charge(self.privacy.spent(self.privacy.rate(cohort.task, self.batch), spent))
        answers = self.checked(held, sent, cohort)
        weights, figures = self.optimise(cohort.task, state.weights, list(answers.values()))
        cohort.note(**figures)
        first = [(each.images[:: self.images], each.labels[:: self.images]) for each in answers.values()]
        images, labels = (torch.cat(parts) for parts in zip(*first, strict=True))
        cohort.exhibit("synthetic images", images, F.one_hot(labels.long(), cohort.task.data.classes))
        return LapState(weights, spent)

    def checked(self, held: Answers, answers: Answers, cohort: Cohort) -> dict[int, Surrogate]:
        """The answers that are what their client's classes and the recipe make of them; others are refused by name."""
        usable = {}
        for client, answer in answers.items():
            if not torch.equal(answer.labels, self.labels(held[client].held)):
                problem = f"labels are not {self.images} of each class that the client holds"
            elif answer.radius > self.radius:
                problem = f"radius is {answer.radius:g}, the recipe's is {self.radius:g}"
            elif not self.plausible(answer.spent, cohort.round):
                problem = f"spent is {answer.spent} steps, and an answer takes {self.charged}"
            else:
                usable[client] = answer
                continue
            cohort.refuse(client, Refused("out of range", problem))
        cohort.require(len(usable), len(answers) + len(answers.missing))
        return usable

    def plausible(self, spent: int, round_: int) -> bool:
        """Whether a client can have charged so much by this round."""
        if not self.privacy:
            return spent == 0
        return spent % self.charged == 0 and self.charged <= spent <= AGAIN * round_ * self.charged

    def optimise(self, task: Task, w: Tensor, sets: Sequence[Surrogate]) -> tuple[Tensor, dict[str, float]]:
        """Algorithm 2: gradient descent from `w` [d] on the union of the sets, until it leaves the trust region."""
        device = task.device
        images = torch.cat([each.images for each in sets]).to(device)
        labels = torch.cat([each.labels for each in sets]).to(device, torch.int64)
        counts = [each.records if self.weighting == "records" else 1 for each in sets]
        share = torch.cat([torch.full((len(s.labels),), n / len(s.labels)) for s, n in zip(sets, counts, strict=True)])
        share = (share / share.sum()).to(device)
        reach = self.reach([each.radius for each in sets])
        weights, start = w.to(device)[None].clone(), w.to(device)
        parts = [t[None].split(GRADIENT_CHUNK, 1) for t in (images, labels, share)]

        def gradient() -> Tensor:
            pieces = [task.gradient(weights, x, y, part)[0] for x, y, part in zip(*parts, strict=True)]
            return torch.stack(pieces).sum(0)

        taken = self.descend(weights, start, reach, self.rates(self.lr, self.steps), gradient)
        moved: Tensor = torch.linalg.vector_norm(weights[0] - start)
        figures = {"moved": float(moved), "server_steps": float(taken)}
        return weights[0], figures | ({} if self.region == "fixed" else {"radius": reach})

    def reach(self, radii: Sequence[float]) -> float:
        """The radius of the server's trust region."""
        match self.region:
            case "min":
                return min(radii)
            case "max":
                return max(radii)
            case "median":
                return float(np.median(radii))
        return self.radius if self.region == "constant" else math.inf

    @staticmethod
    def rates(lr: float, steps: int) -> Tensor:
        """A learning rate for each step, falling from `lr` to 0 along half a cosine: [steps]."""
        return lr * (1 + torch.cos(torch.arange(steps) * (math.pi / steps))) / 2

    def descend(
        self,
        weights: Tensor,
        start: Tensor,
        reach: float,
        rates: Tensor,
        gradient: Callable[[], Tensor],
        watch: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """A step of each of `rates` by `weights` [C, d], in place; who is `reach` away from `start` [d] stays there.

        `watch` gets the distances [C] after each step. Returns the steps taken, [C].
        """
        rates = rates.to(weights)
        cursor = torch.zeros(1, dtype=torch.int64, device=weights.device)
        away: Tensor = torch.linalg.vector_norm(weights - start, dim=1)
        taken = torch.zeros_like(away)

        def step() -> None:
            within = (away < reach).to(weights.dtype)
            weights.sub_(rates.index_select(0, cursor) * within[:, None] * gradient())
            away.copy_(torch.linalg.vector_norm(weights - start, dim=1))
            taken.add_(within)
            cursor.add_(1)
            if watch:
                watch(away)

        repeat(step, len(rates), weights.device)
        return taken

    # ------------------------------------------------------------------------------------------------ the clients

    @property
    def answer(self) -> Mapping[type[Question], Callable[[Crowd, Any], Sequence[Answer]]]:
        return {WhichClasses: self.which, Distil: self.distil}

    def which(self, crowd: Crowd, question: WhichClasses) -> list[Classes]:
        return [Classes(held(crowd.task, client)) for client in crowd.clients]

    def labels(self, held: Tensor) -> Tensor:
        """The labels of a set, class by class: [points]."""
        return held.nonzero()[:, 0].repeat_interleave(self.images).to(torch.int16)

    def distil(self, crowd: Crowd, question: Distil) -> list[Surrogate]:
        """Algorithm 1 for all clients of a stack; they hold equally many classes."""
        task = crowd.task
        own = [self.labels(held(task, client)) for client in crowd.clients]
        for each in own:
            if len(each) != question.points:
                raise Refused("out of range", f"{question.points} points are asked for, {len(each)} belong to it")
        spent = self.spending(crowd)
        w, labels = question.weights.to(task.device), torch.stack(own).to(task.device, torch.int64)
        images = self.start(crowd, labels)
        matched = self.fit(crowd, w, images, labels)
        radii = [self.radius] * len(crowd)
        if self.measures:
            radii = [min(r, self.radius) for r in self.calibrated(crowd, w, images, labels).tolist()]
        crowd.measure(matching=matched)
        for note in crowd.notes:
            note["charged"] = note.get("charged", 0) + self.charged
        sent, records = images.cpu(), [1] * len(crowd) if self.privacy else crowd.rows.counts.tolist()
        crowd.remember([Last(each, steps) for each, steps in zip(sent, spent, strict=True)])
        return [Surrogate(*fields) for fields in zip(sent, own, radii, spent, records, strict=True)]

    def spending(self, crowd: Crowd) -> list[int]:
        """The private steps of each client with those of this answer; refused if that is beyond the budget.

        A round that is asked again is charged again: what was charged in it before is a note, which stays while the
        memory of a round is replaced.
        """
        if not self.privacy:
            return [0] * len(crowd)
        before = [0 if last is None else last.spent for last in crowd.memory]
        spent = [b + note.get("charged", 0) + self.charged for b, note in zip(before, crowd.notes, strict=True)]
        for steps in set(spent):
            self.privacy.allow(self.privacy.rate(crowd.task, self.batch), steps)
        return spent

    def start(self, crowd: Crowd, labels: Tensor) -> Tensor:
        """The images before they are fitted, [C, points, *input]."""
        task, images = crowd.task, []
        for k, seed in enumerate(crowd.seeds("images")):
            if self.init == "previous" and crowd.memory[k] is not None:
                images.append(crowd.memory[k].images)
            elif self.init == "real":
                rng, own = seed.numpy(), crowd.rows.indices[k]
                of = {c: rng.permutation(own[task.data.y[own].numpy() == c]) for c in labels[k].unique().tolist()}
                chosen = np.concatenate([np.resize(of[c], self.images) for c in sorted(of)])
                images.append(task.data.x[chosen])
            else:
                shape = (labels.shape[1], *task.data.input)
                images.append(torch.randn(shape, generator=seed.torch()))
        return torch.stack(images).to(task.device, torch.float32).clone()

    def fit(self, crowd: Crowd, w: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """Follow trajectories from `w` [d] and fit `images` [C, points, …] in place along them (eqs. 11 and 12).

        Returns the distance between the gradients at the last step, [C].
        """
        task, clients = crowd.task, len(crowd)
        velocity, apart = torch.zeros_like(images), torch.zeros(clients, device=task.device)
        ones = torch.ones_like(labels, dtype=torch.float32)
        rates = self.rates(self.model_lr, max(1, self.passes * self.model_steps))
        for trajectory in range(self.trajectories):
            weights = w.expand(clients, -1).clone()
            for number in range(self.passes):
                away: Tensor = torch.linalg.vector_norm(weights - w, dim=1)
                within = (away < self.radius).view(-1, *[1] * (images.dim() - 1))
                if not within.any():
                    break
                real = self.real(crowd, weights, trajectory, number)

                def step(weights: Tensor = weights, within: Tensor = within, real: Callable[[], Tensor] = real) -> None:
                    goal = real()
                    for _ in range(self.image_steps):
                        slope = self.slope(task, weights, images, labels, goal, apart)
                        velocity.copy_(torch.where(within, self.momentum * velocity + slope, velocity))
                        images.sub_(velocity * within, alpha=self.image_lr)

                repeat(step, self.batches, task.device)
                ahead = rates[number * self.model_steps : (number + 1) * self.model_steps]
                self.descend(
                    weights,
                    w,
                    self.radius,
                    ahead,
                    lambda weights=weights: task.gradient(weights, images, labels, ones)[0],  # type: ignore[misc]
                )
        return apart

    def slope(self, task: Task, weights: Tensor, images: Tensor, labels: Tensor, goal: Tensor, apart: Tensor) -> Tensor:
        """The gradient with respect to the images of their distance to `goal` [C, d]; that distance goes to `apart`."""
        here, points = weights.detach().requires_grad_(), images.detach().requires_grad_()
        mean = task.stacked_losses(here, points, labels).mean(1)
        (gradient,) = torch.autograd.grad(mean.sum(), here, create_graph=True)
        found = distance(task.layout, gradient, goal, self.mse)
        (slope,) = torch.autograd.grad(found.sum(), points)
        apart.copy_(found.detach())
        return slope

    def real(self, crowd: Crowd, weights: Tensor, *where: int) -> Callable[[], Tensor]:
        """The gradients of real batches at `weights` [C, d], [C, d], one after the other for a pass; `where` names it.

        With `privacy` this is all that the images and everything after them learn of the records.
        """
        task = crowd.task
        if self.privacy:
            secrets = [secret.child(*where) for secret in crowd.secrets("gradients")]
            return self.privacy.gradients(crowd, weights, self.batch, self.batches, secrets)
        rngs = [seed.child(*where).numpy() for seed in crowd.seeds("batches")]
        width = min(self.batch, int(crowd.rows.counts.max()))
        index = np.zeros((self.batches, len(crowd), width), np.int64)
        mask = np.zeros((len(crowd), width), np.float32)
        for k, (own, rng) in enumerate(zip(crowd.rows.indices, rngs, strict=True)):
            size = min(self.batch, len(own))
            mask[k, :size] = 1
            for t in range(self.batches):
                index[t, k, :size] = rng.choice(own, size, replace=False)
        crowd.passes += int(mask.sum()) * self.batches
        index_, mask_ = torch.from_numpy(index).to(task.device), torch.from_numpy(mask).to(task.device)
        cursor = torch.zeros(1, dtype=torch.int64, device=task.device)

        def gradient() -> Tensor:
            rows = index_.index_select(0, cursor)[0]
            cursor.add_(1)
            return task.gradient(weights, task.x[rows], task.y[rows], mask_)[0]

        return gradient

    def calibrated(self, crowd: Crowd, w: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """r_k, [C]: how far from `w` [d] the real loss is lowest while training on the synthetic set (figure 2)."""
        task = crowd.task
        index, mask = (torch.from_numpy(a).to(task.device) for a in crowd.rows.padded())
        parts = list(zip(index.split(GRADIENT_CHUNK, 1), mask.split(GRADIENT_CHUNK, 1), strict=True))
        weights, ones = w.expand(len(crowd), -1).clone(), torch.ones_like(labels, dtype=torch.float32)
        lowest = torch.full((len(crowd),), math.inf, device=task.device)
        radii = torch.zeros_like(lowest)

        @torch.no_grad()
        def watch(away: Tensor) -> None:
            sums = [(task.stacked_losses(weights, task.x[r], task.y[r]) * m).sum(1) for r, m in parts]
            loss = torch.stack(sums).sum(0) / mask.sum(1)
            radii.copy_(torch.where(loss < lowest, away, radii))
            lowest.copy_(torch.minimum(lowest, loss))

        def gradient() -> Tensor:
            return task.gradient(weights, images, labels, ones)[0]

        self.descend(weights, w, self.radius, self.rates(self.lr, self.steps), gradient, watch)
        crowd.passes += self.steps * int(mask.sum())
        return radii

    # ------------------------------------------------------------------------------------------------ the cost

    def questions(self, task: Task, turn: Turn) -> list[Question]:
        points = self.images * int(held(task, turn.client).sum())
        return [WhichClasses(), Distil(message.blank(LapState, task.sizes).weights, points)]

    def work(self, turn: Turn) -> Work:
        """Real records only: how many points there are depends on a client's classes."""
        batches, size = self.trajectories * self.passes * self.batches, min(self.batch, turn.records)
        measured = self.steps * turn.records if self.measures else 0
        return Work(batches * size + measured, vectors=8, held=min(GRADIENT_CHUNK, turn.records))


def held(task: Task, client: int) -> Tensor:
    """1 for each class of which the client has records, [classes]."""
    own = torch.from_numpy(task.clients[client])
    return torch.bincount(task.data.y[own], minlength=task.data.classes).clamp(max=1).to(torch.uint8)
