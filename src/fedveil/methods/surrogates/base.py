"""What all surrogate methods share: clients send synthetic sets, and the server trains on their union."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor

from fedveil.core import schema
from fedveil.core.capability import FORWARD_PASSES, GRADIENTS, RECORD_GRADIENTS
from fedveil.core.cohort import Answers, Cohort
from fedveil.core.data import Rows
from fedveil.core.forecast import Turn
from fedveil.core.message import Answer, Question, Refused
from fedveil.core.method import Method, State
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.methods.surrogates.augment import strategies, validate
from fedveil.methods.surrogates.descent import DESCENTS, descend, rates
from fedveil.methods.surrogates.sets import SLOT, Classes, Distil, Last, Surrogate, WhichClasses, declared, held
from fedveil.train.aggregators import clamped
from fedveil.train.local import GRADIENT_CHUNK

_log = logging.getLogger("fedveil")
MEASURED = 256  # the most records on which a client measures its radius, at every step, and how alike its set is


@dataclass(frozen=True)
class Surrogates(Method):
    """Clients fit sets (`fit`, which a method states), the server descends on the union within a trust region."""

    images: int = 50
    init: str = "previous"
    batches: int = 40
    batch: int = 256
    radius: float = 10.0
    region: str = "min"
    steps: int = 100
    descent: str = "monotone"
    lr: float = 0.1
    image_lr: float = 5.0
    momentum: float = 0.5
    weighting: str = "records"
    augment: str = ""

    def __post_init__(self) -> None:
        for name, known in (
            ("init", ("noise", "previous", "real")),
            ("region", ("min", "max", "median", "constant", "fixed")),
            ("descent", DESCENTS),
            ("weighting", ("records", "equal")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"method.{name} is '{getattr(self, name)}'; use {', '.join(known)}")
        for name in ("images", "batches", "batch", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"method.{name} is {getattr(self, name)}; it is at least 1")
        if min(self.radius, self.lr, self.image_lr) <= 0 or not 0 <= self.momentum < 1:
            raise ValueError(
                "method.radius, method.lr and method.image_lr are above 0, and method.momentum is 0 to below 1"
            )
        strategies(self.augment)

    def fit(self, stack: ClientStack, w: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """Fit `images` [C, points, *input] of fixed `labels` [C, points] to the clients' records around `w` [d], in
        place. Returns how far they are from matching, [C]."""
        raise NotImplementedError

    @property
    def measures(self) -> bool:
        """Whether clients measure r_k."""
        return self.region in ("min", "max", "median")

    @property
    def needs(self) -> tuple[str, ...]:
        own = (RECORD_GRADIENTS,) if self.promise else (GRADIENTS,)
        return (*own, FORWARD_PASSES) if self.measures else own

    def init_state(self, task: Task) -> State:
        if not task.data.x.is_floating_point():
            raise ValueError(f"{self.name} fits its inputs by gradient, and tokens have none; use fedavg")
        if not task.data.labelled:
            held = "real targets" if task.data.y.is_floating_point() else "several"
            raise ValueError(f"{self.name} gives each point one label, and these records have {held}; use fedavg")
        validate(self.augment, task)
        if self.client_cost(task):
            self._validate_public(task)
        return State(task.initial)

    def _validate_public(self, task: Task) -> None:
        """Raise a ValueError unless the classes of each client are public: a set shows them, and no noise covers it."""
        if task.clients.held is None:
            raise ValueError(
                f"{self.name} with method.privacy sends images of each class that a client holds, so these classes "
                "must not depend on its records; set split.held to a list of classes for each client, or split.kind to "
                '"classes"'
            )
        if wrong := [c for each in task.clients.held for c in each if not 0 <= c < task.data.classes]:
            raise ValueError(f"split.held names class {wrong[0]}; there are {task.data.classes}, from 0")
        if not all(task.clients.held):
            raise ValueError("split.held leaves a client without a class; give each client at least one")

    # ------------------------------------------------------------------------------------------------ the server

    def round(self, state: State, cohort: Cohort) -> State:
        held = cohort.ask(WhichClasses())
        points = {k: self.images * int(answer.held.sum()) for k, answer in held.items()}
        if none := [k for k, count in points.items() if not count]:
            for client in none:
                cohort.reject(client, Refused("out of range", "held has no class at all"))
            cohort.require(len(points) - len(none), len(cohort))
        made = {count: Distil(state.weights, count) for count in set(points.values()) - {0}}
        asked = cohort.only(set(points) - set(none))
        answers = self.checked(state.weights, held, asked.exchange({k: made[points[k]] for k in asked.ids}), cohort)
        weights, figures = self.optimise(cohort.task, state.weights, list(answers.values()))
        cohort.note(**figures)
        first = [(each.images[:: self.images], each.labels[:: self.images]) for each in answers.values()]
        images, labels = (torch.cat(parts) for parts in zip(*first, strict=True))
        cohort.exhibit("synthetic images", images, F.one_hot(labels.long(), cohort.task.data.classes))
        return State(weights)

    def checked(self, w: Tensor, held: Answers, answers: Answers, cohort: Cohort) -> dict[int, Surrogate]:
        """The answers that are what their client's classes and the recipe make of them, and have a gradient at `w` [d];
        others are refused by name. Radii that are measured are clamped."""
        usable: dict[int, Surrogate] = {}
        for client, answer in answers.items():
            if not torch.equal(answer.labels, self.labels(held[client].held)):
                problem = f"labels are not {self.images} of each class that the client holds"
            elif answer.radius > self.radius:
                problem = f"radius is {answer.radius:g}, the recipe's is {self.radius:g}"
            else:
                usable[client] = answer
                continue
            cohort.reject(client, Refused("out of range", problem))
        for client in [k for k, answer in usable.items() if not finite(cohort.task, w, answer)]:
            del usable[client]
            cohort.reject(client, Refused("not finite", "the set's gradient holds a value that is not a number"))
        cohort.require(len(usable), len(answers) + len(answers.missing))
        if not self.measures:
            return usable
        radii = clamped(cohort, "radius", {k: answer.radius for k, answer in usable.items()})
        return {k: replace(answer, radius=radii[k]) for k, answer in usable.items()}

    def optimise(self, task: Task, w: Tensor, sets: Sequence[Surrogate]) -> tuple[Tensor, dict[str, float]]:
        """FedLAP-DP, algorithm 2: descend from `w` [d] on the union of the sets, until that leaves the trust region."""
        device = task.device
        images = torch.cat([each.images for each in sets]).to(device)
        labels = torch.cat([each.labels for each in sets]).to(device, torch.int64)
        counts = self.counts(sets)
        share = torch.cat([torch.full((len(s.labels),), n / len(s.labels)) for s, n in zip(sets, counts, strict=True)])
        share = (share / share.sum()).to(device)
        reach = self.reach([each.radius for each in sets])
        weights, start = w.to(device)[None].clone(), w.to(device)
        parts = list(zip(*(t[None].split(GRADIENT_CHUNK, 1) for t in (images, labels, share)), strict=True))

        def gradient(weights: Tensor) -> tuple[Tensor, Tensor]:
            slopes, losses = zip(*(task.fast_gradient(weights, *part) for part in parts), strict=True)
            return torch.stack(slopes).sum(0), torch.stack(losses).sum(0)

        steps = rates(self.lr, self.steps, self.descent)
        taken, _ = descend(weights, start, reach, steps, gradient, descent=self.descent)
        moved: Tensor = torch.linalg.vector_norm(weights[0] - start)
        figures = {"moved": float(moved), "server_steps": float(taken)}
        if self.region != "fixed":
            figures["radius"] = reach
        if self.measures:
            radii = [each.radius for each in sets]
            figures |= {"radius_least": min(radii), "radius_most": max(radii)}
        return weights[0], figures

    def counts(self, sets: Sequence[Surrogate]) -> list[int]:
        """Return the weight of each client."""
        return [each.records if self.weighting == "records" else 1 for each in sets]

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

    # ------------------------------------------------------------------------------------------------ the clients

    @property
    def handlers(self) -> Mapping[type[Question], Callable[[ClientStack, Any], Sequence[Answer]]]:
        return {WhichClasses: self.which, Distil: self.distil}

    def which(self, stack: ClientStack, question: WhichClasses) -> list[Classes]:
        return [Classes(self.held(stack.task, client)) for client in stack.clients]

    def held(self, task: Task, client: int) -> Tensor:
        """1 for each class of a client's set, [classes]: those of its records, or where records are private those that
        are publicly said to be its own."""
        if not self.client_cost(task):
            return held(task, client)
        self._validate_public(task)
        return declared(task, client)

    def labels(self, held: Tensor) -> Tensor:
        """The labels of a set, class by class: [points]."""
        return held.nonzero()[:, 0].repeat_interleave(self.images).to(torch.int16)

    def distil(self, stack: ClientStack, question: Distil) -> list[Surrogate]:
        """Fit the sets of all clients of a stack; they hold equally many classes."""
        task = stack.task
        own = [self.labels(self.held(task, client)) for client in stack.clients]
        for each in own:
            if len(each) != question.points:
                raise Refused("out of range", f"{question.points} points are asked for, {len(each)} belong to it")
        if price := self.client_cost(task):
            stack.charge(price)
            stack.rows = within(stack, own)
        w, labels = question.weights.to(task.device), torch.stack(own).to(task.device, torch.int64)
        images = self.start(stack, labels)
        matched = self.fit(stack, w, images, labels)
        radii = [self.radius] * len(stack)
        if self.measures:
            radii = [min(r, self.radius) for r in self.calibrated(stack, w, images, labels).tolist()]
        stack.measure(matching=matched)
        if not price:  # what is private looks at records through noise only, in its figures too
            stack.measure(cosine_real=self.likeness(stack, w, images, labels))
        sent, records = images.cpu(), [1] * len(stack) if price else stack.rows.counts.tolist()
        stack.remember(SLOT, [Last(each) for each in sent])
        return [Surrogate(*fields) for fields in zip(sent, own, radii, records, strict=True)]

    def start(self, stack: ClientStack, labels: Tensor) -> Tensor:
        """The images before they are fitted, [C, points, *input]."""
        task, images = stack.task, []
        last = stack.slot(SLOT)
        for k, seed in enumerate(stack.seeds("images")):
            if self.init == "previous" and last[k] is not None:
                images.append(last[k].images)
            elif self.init == "real":
                rng, own = seed.numpy(), stack.rows.indices[k]
                of = {c: rng.permutation(own[task.data.y[own].numpy() == c]) for c in labels[k].unique().tolist()}
                chosen = np.concatenate([np.resize(of[c], self.images) for c in sorted(of)])
                images.append(task.data.x[chosen])
            else:
                shape = (labels.shape[1], *task.data.input)
                images.append(torch.randn(shape, generator=seed.torch()))
        return torch.stack(images).to(task.device, torch.float32).clone()

    def calibrated(self, stack: ClientStack, w: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """r_k, [C]: how far from `w` [d] the real loss is lowest while training on the synthetic set (FedLAP-DP,
        figure 2), 0 where no step lowers it. The loss is that of at most `MEASURED` records, the same at every step."""
        task = stack.task
        index, mask = measured(stack)
        weights, ones = w.expand(len(stack), -1).clone(), torch.ones_like(labels, dtype=torch.float32)
        losses = task.fused("losses", lambda *given: (task.stacked_losses(*given),))

        @torch.no_grad()
        def real() -> Tensor:
            loss: Tensor = (losses(weights, task.x[index], task.y[index])[0] * mask).sum(1) / mask.sum(1)
            return loss

        lowest = real().clone()
        radii = torch.zeros_like(lowest)

        def watch(away: Tensor) -> None:
            loss = real()
            radii.copy_(torch.where(loss < lowest, away, radii))
            lowest.copy_(torch.minimum(lowest, loss))

        def gradient(weights: Tensor) -> tuple[Tensor, ...]:
            return task.fast_gradient(weights, images, labels, ones)

        steps = rates(self.lr, self.steps, self.descent)
        _, tried = descend(weights, w, self.radius, steps, gradient, watch, self.descent)
        stack.passes += int((1 + tried) @ mask.sum(1))
        return radii

    def likeness(self, stack: ClientStack, w: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """The cosine, [C], between the gradients at `w` [d] of the sets and of at most `MEASURED` records."""
        task, weights = stack.task, w.expand(len(stack), -1)
        index, mask = measured(stack)
        made = task.gradient(weights, images, labels, torch.ones_like(labels, dtype=torch.float32))[0]
        return F.cosine_similarity(made, task.gradient(weights, task.x[index], task.y[index], mask)[0], dim=1)

    # ------------------------------------------------------------------------------------------------ the cost

    def forecast_messages(self, task: Task, turn: Turn) -> list[Question]:
        points = self.images * int(self.held(task, turn.client).sum())
        return [WhichClasses(), Distil(schema.blank(State, task.sizes).weights, points)]

    def measuring(self, turn: Turn) -> int:
        """The passes that `calibrated` takes, if it takes all its steps."""
        return (1 + self.steps) * min(MEASURED, turn.records) if self.measures else 0


def within(stack: ClientStack, labels: Sequence[Tensor]) -> Rows:
    """The clients' records of the classes among each one's `labels` [points]. Others are left out, which only the
    client's own log tells."""
    y, rows = stack.task.data.y.numpy(), []
    for client, own, kept in zip(stack.clients, stack.rows.indices, labels, strict=True):
        rows.append(own[np.isin(y[own], kept.numpy())])
        if left := len(own) - len(rows[-1]):
            _log.warning("client %s leaves out %s records of classes that are not said to be its own", client, left)
    return Rows(rows)


def finite(task: Task, w: Tensor, each: Surrogate) -> bool:
    """Whether a set's gradient at `w` [d] is a number: one that is none would stop the training on all of them."""
    here, images, labels = (t.to(task.device)[None] for t in (w, each.images, each.labels.long()))
    parts = zip(images.split(GRADIENT_CHUNK, 1), labels.split(GRADIENT_CHUNK, 1), strict=True)
    slopes = [task.gradient(here, x, y, torch.ones_like(y, dtype=torch.float32))[0].sum() for x, y in parts]
    return bool(torch.stack(slopes).isfinite().all())


def measured(stack: ClientStack) -> tuple[Tensor, Tensor]:
    """Up to `MEASURED` records of each client, as indices [C, n] and mask [C, n]."""
    rngs = [seed.numpy() for seed in stack.seeds("measure")]
    chosen = [own[rng.permutation(len(own))[:MEASURED]] for own, rng in zip(stack.rows.indices, rngs, strict=True)]
    index, mask = (torch.from_numpy(a).to(stack.task.device) for a in Rows(chosen).padded())
    return index, mask
