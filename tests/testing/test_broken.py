"""A method or codec that breaks a rule fails its check with the sentence that says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import pytest
import torch
from torch import Tensor

import fedveil as fv
from fedveil.codecs.raw import Update
from fedveil.core import message
from fedveil.core.forecast import Compute, Turn
from fedveil.core.message import Answer, Count, Question, Record, Shape, Size, Weights
from fedveil.testing import check_codec, check_method
from fedveil.train.vectors import Vectors

ABOUT = fv.FedAvg.about


@pytest.fixture(autouse=True)
def no_traces() -> Iterator[None]:
    """`fedveil list` shows no toys."""
    tables: list[dict[str, Any]] = [fv.METHODS, fv.Codec.registry]
    before = [dict(table) for table in tables]
    yield
    for table, was in zip(tables, before, strict=True):
        table.clear()
        table.update(was)


def enter(thing: fv.Method | fv.Codec) -> Any:
    """Register the class of a toy for one test."""
    thing.registry[thing.name] = type(thing)  # type: ignore[assignment]
    return thing


# ---------------------------------------------------------------------------------------------------- methods


@dataclass(frozen=True)
class Nameless(fv.FedAvg):
    """States no name, so it goes by that of FedAvg."""


@dataclass(frozen=True)
class Unsure(fv.FedAvg):
    name: ClassVar[str] = "toy-unsure"
    about: ClassVar[fv.About] = replace(ABOUT, claims=(("certain", "nobody sees anything."),))


@dataclass(frozen=True)
class Terse(fv.FedAvg):
    name: ClassVar[str] = "toy-terse"
    about: ClassVar[fv.About] = replace(ABOUT, server_sees=" ")


@dataclass(frozen=True)
class Tuned(fv.FedAvg):
    """A recipe holds no sets."""

    name: ClassVar[str] = "toy-tuned"
    layers: Any = frozenset({1})


@dataclass(frozen=True)
class Idle(fv.FedAvg):
    name: ClassVar[str] = "toy-idle"

    def step(self, state: fv.State, total: Any, cohort: fv.Cohort) -> fv.State:
        return state


@dataclass(frozen=True)
class Failing(fv.FedAvg):
    name: ClassVar[str] = "toy-failing"

    def trained(self, stack: fv.ClientStack, question: Any, w: Tensor, trained: Any) -> Vectors:
        if 3 in stack.clients:
            raise ArithmeticError("client 3 divides by zero")
        return super().trained(stack, question, w, trained)


@dataclass(frozen=True)
class Moody(fv.FedAvg):
    """Draws from torch's global generator."""

    name: ClassVar[str] = "toy-moody"

    def trained(self, stack: fv.ClientStack, question: Any, w: Tensor, trained: Any) -> Vectors:
        return Vectors({"update": trained.update + 1e-3 * torch.randn(trained.update.shape)})


@dataclass(frozen=True)
class Scribbling(fv.FedAvg):
    """Writes into the question, which in one process is the server's."""

    name: ClassVar[str] = "toy-scribbling"

    def trained(self, stack: fv.ClientStack, question: Any, w: Tensor, trained: Any) -> Vectors:
        vectors = super().trained(stack, question, w, trained)
        question.weights.mul_(0.5)
        return vectors


@dataclass(frozen=True)
class Gossiping(fv.FedAvg):
    """A client's update depends on its stack."""

    name: ClassVar[str] = "toy-gossiping"

    def trained(self, stack: fv.ClientStack, question: Any, w: Tensor, trained: Any) -> Vectors:
        return Vectors({"update": trained.update.mean(0, keepdim=True).expand_as(trained.update)})


@message.kind
class Diary(Record, frozen=True):
    """Says nothing of `common`."""

    last: Weights


class Scrap(Record, frozen=True):
    """Is no kind of message."""

    common = ()
    last: Weights


@dataclass(frozen=True)
class Remembering(fv.FedAvg):
    name: ClassVar[str] = "toy-remembering"
    registered: bool = True

    def trained(self, stack: fv.ClientStack, question: Any, w: Tensor, trained: Any) -> Vectors:
        kind = Diary if self.registered else Scrap
        stack.remember("diary", [kind(row) for row in trained.update])
        return super().trained(stack, question, w, trained)


class Hidden:
    """What a method keeps beside its state."""

    moved: ClassVar[Any] = 0.0


@dataclass(frozen=True)
class Secretive(fv.FedAvg):
    """Keeps a momentum where no checkpoint finds it. A resumed run begins with round 2 in another process."""

    name: ClassVar[str] = "toy-secretive"

    def init_state(self, task: fv.Task) -> fv.State:
        Hidden.moved = 0.0
        return super().init_state(task)

    def step(self, state: fv.State, total: Any, cohort: fv.Cohort) -> fv.State:
        after = super().step(state, total, cohort)
        Hidden.moved = Hidden.moved + after.weights - state.weights
        return fv.State(state.weights + Hidden.moved)


@message.kind
class Bare(Answer, frozen=True):
    """A tensor that may hold anything."""

    update: Annotated[Tensor, Shape(("weights",), low=-float("inf"), high=float("inf"))]


@message.kind
class AskBare(Question, frozen=True):
    reply = Bare
    weights: Weights


@dataclass(frozen=True)
class Trusting(fv.Method):
    """A mean of whatever comes."""

    name: ClassVar[str] = "toy-trusting"
    about: ClassVar[fv.About] = ABOUT
    counts: bool = True
    foretells: bool = True
    talks: bool = True

    def init_state(self, task: fv.Task) -> fv.State:
        return fv.State(task.initial)

    def round(self, state: fv.State, cohort: fv.Cohort) -> fv.State:
        return fv.State(state.weights + cohort.ask(AskBare(state.weights)).stack("update").mean(0))

    @property
    def handlers(self) -> Mapping[type[Question], Any]:
        return {AskBare: self.answer}

    def answer(self, stack: fv.ClientStack, question: AskBare) -> list[Bare]:
        local = fv.LocalTraining()
        weights, _ = local.train(stack, question.weights)
        if not self.counts:
            stack.passes = 0
        return [Bare(row) for row in weights - question.weights]

    def forecast_messages(self, task: fv.Task, turn: Turn) -> list[Question]:
        return super().forecast_messages(task, turn) if self.talks else []

    def forecast_compute(self, turn: Turn) -> Compute:
        return fv.LocalTraining().forecast_compute(turn.records) if self.foretells else Compute()


@message.kind
class Bounded(Answer, frozen=True):
    update: Weights


@message.kind
class AskBounded(Question, frozen=True):
    reply = Bounded
    weights: Weights


@dataclass(frozen=True)
class Careful(Trusting):
    """The same with a range; whether it keeps its own accounts is an option."""

    name: ClassVar[str] = "toy-careful"

    def round(self, state: fv.State, cohort: fv.Cohort) -> fv.State:
        return fv.State(state.weights + cohort.ask(AskBounded(state.weights)).stack("update").mean(0))

    @property
    def handlers(self) -> Mapping[type[Question], Any]:
        return {AskBounded: lambda stack, q: [Bounded(bare.update) for bare in self.answer(stack, q)]}


@dataclass(frozen=True)
class Dividing(fv.FedAvg):
    """With `secure` it sums what it does not sum in the clear."""

    name: ClassVar[str] = "toy-dividing"

    def combine(self, total: Any) -> Tensor:
        return super().combine(total) * (0.5 if self.secure else 1.0)


@message.kind
class AskAgain(Question, frozen=True):
    reply = Bounded


@dataclass(frozen=True)
class Noting(Careful):
    """Trains at the first question and sends at the second. Its note cannot be written down in between."""

    name: ClassVar[str] = "toy-noting"

    def round(self, state: fv.State, cohort: fv.Cohort) -> fv.State:
        there = cohort.only(cohort.ask(AskBounded(state.weights)))
        return fv.State(state.weights + there.ask(AskAgain()).stack("update").mean(0))

    @property
    def handlers(self) -> Mapping[type[Question], Any]:
        return {AskBounded: self.first, AskAgain: lambda stack, _: [note() for note in stack.recall("mine")]}

    def first(self, stack: fv.ClientStack, question: Any) -> list[Bounded]:
        answers = [Bounded(bare.update) for bare in self.answer(stack, question)]
        for note, answer in zip(stack.notes, answers, strict=True):
            note["mine"] = lambda answer=answer: answer
        return answers


BROKEN: list[tuple[fv.Method, str]] = [
    (Nameless(), "Nameless is not the method that is registered as 'fedavg'; state a name of its own"),
    (Unsure(), "is labelled 'certain'; label it proved, measured or heuristic"),
    (Terse(), "about.server_sees is ' '; say it in a sentence"),
    (Tuned(), "a recipe with it cannot be written and read again"),
    (Idle(), "2 rounds left the weights as they were"),
    (Failing(), "client 3 gave no answer in round 1 .*client 3 divides by zero.*; fix its handler"),
    (Moody(), "two runs with one seed differ; draw from stack.seeds"),
    (Scribbling(), "without bytes between server and clients the weights differ .* change no tensor of a message"),
    (Gossiping(), "weights differ by .* if clients answer in one stack .* depend on client k alone"),
    (Remembering(), "a Diary in 'diary' that does not state `common`"),
    (Remembering(registered=False), "a Scrap, which is not registered; put @message.kind above Scrap"),
    (Trusting(), r"1e\+30 in update, sent by client 2 in answer 1 of round 1, is not refused; state shape"),
    (Careful(counts=False), "counts no passes; add the records .* and override forecast_compute"),
    (Careful(foretells=False), "passes in round 1, but 0 are forecast; override forecast_compute"),
    (Careful(talks=False), "forecasts no message; override forecast_messages"),
    (Secretive(), "after a resume from round 1 the weights differ by .*; keep what a round needs in the state's slots"),
    (Noting(), "on Flower clients give no answer .* keep what a later question needs in stack.notes"),
    (Dividing(), "with `secure` the weights differ by .* from those in the clear"),
]


@pytest.mark.parametrize(("method", "sentence"), BROKEN, ids=lambda it: getattr(it, "name", ""))
def test_a_broken_method_is_told(method: fv.Method, sentence: str) -> None:
    if not isinstance(method, Nameless):
        enter(method)
    with pytest.raises(AssertionError, match=sentence) as found:
        check_method(method)
    assert "\n" not in str(found.value)


def test_a_method_that_keeps_its_promises_passes() -> None:
    check_method(enter(Careful()))


def test_what_is_no_method_or_codec_is_told() -> None:
    with pytest.raises(AssertionError, match="takes a method, not the class FedAvg; give it an instance"):
        check_method(fv.FedAvg)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="takes a codec, not a FedAvg; give it an instance"):
        check_codec(fv.FedAvg())  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- codecs


@message.kind
class Pair(Answer, frozen=True):
    """An update, in two tensors."""

    first: Weights
    second: Annotated[Tensor, Shape(("pieces",), low=-float("inf"), high=float("inf"))]
    records: Count = 1


@dataclass(frozen=True)
class Doubled(fv.Codec):
    """The update and something beside it; each option breaks one rule."""

    name: ClassVar[str] = "toy-doubled"
    payload: ClassVar[type[Answer]] = Pair

    breaks: str = ""

    @property
    def lossy(self) -> bool:  # type: ignore[override]
        return self.breaks != "lossless"

    def sizes(self, task: fv.Task) -> Mapping[str, Size]:
        return {**task.sizes, "pieces": 3 if self.breaks == "sizes" else 2}

    def encode(
        self,
        task: fv.Task,
        w: Tensor,
        updates: Tensor,
        seeds: Sequence[fv.Seed],
        stack: fv.ClientStack | None,
    ) -> list[Any]:
        rows = updates.clone()
        match self.breaks:
            case "random":
                rows += 1e-3 * torch.randn(rows.shape)
            case "stack":
                rows += rows.mean(0)
            case "zero":
                rows += 1
            case "feedback":
                rows *= -2
            case "lossless":
                rows *= 0.99
            case "server":
                assert stack is not None
            case "in place":
                updates.zero_()
            case "kind":
                return [Update(row) for row in rows]
            case "fewer":
                rows = rows[:1]
        return [Pair(row, torch.ones(2)) for row in rows]

    def decode(self, task: fv.Task, w: Tensor, payloads: Sequence[Any]) -> Tensor:
        if self.breaks == "double":
            return torch.stack([p.first.double() for p in payloads])
        if self.breaks == "hostile":
            return torch.stack([p.first * p.second.square().mean() for p in payloads])
        if self.breaks == "fragile":
            return torch.stack([p.first + 0 * [0.0, 0.0][int(p.second[0].clamp(0, 1e9)) - 1] for p in payloads])
        return torch.stack([p.first for p in payloads])


RULES = {
    "double": r"decode gives torch.float64 of shape \[5, 243\], not \[C, d\]",
    "fewer": "encode makes 1 payloads of 5 updates; return one a row",
    "kind": "encode returns a Update, but `payload` is Pair",
    "sizes": r"an honest Pair is refused \(wrong shape.*; state each dimension in `sizes`",
    "in place": "encode changes the updates that it is given; copy them",
    "random": "encode makes other payloads of the same updates and seeds; draw from `seeds` only",
    "zero": "an update of zeros is decoded as 1; let it be below 0.001",
    "lossless": "states lossy = False, but decoded updates are off by",
    "stack": "if clients are encoded in one stack .* let payload k depend on row k alone",
    "hostile": "in second is decoded to values that are not finite; bound its fields",
    "fragile": "makes the server fail with IndexError.*; let `check` raise Refused",
    "server": "encode failed without a stack, as the server calls it .* server_can_encode = False",
    "feedback": "in round 1 of error feedback 3 updates are lost, more than were encoded",
}


@pytest.mark.parametrize("breaks", RULES)
def test_a_broken_codec_is_told(breaks: str) -> None:
    with pytest.raises(AssertionError, match=RULES[breaks]) as found:
        check_codec(enter(Doubled(breaks)))
    assert "\n" not in str(found.value)


def test_a_codec_that_keeps_its_promises_passes() -> None:
    check_codec(enter(Doubled()))


@message.kind
class Scaled(Answer, frozen=True):
    """Says that it adds up."""

    additive: ClassVar[bool] = True
    update: Weights
    records: Count = 1


@dataclass(frozen=True)
class Cubed(fv.Codec):
    """The cube of an update, although the mean of cubes is not the cube of the mean."""

    name: ClassVar[str] = "toy-cubed"
    payload: ClassVar[type[Answer]] = Scaled

    def encode(self, task: fv.Task, w: Tensor, updates: Tensor, seeds: Any, stack: Any) -> list[Any]:
        return [Scaled(row**3) for row in updates]

    def decode(self, task: fv.Task, w: Tensor, payloads: Sequence[Any]) -> Tensor:
        cubes = torch.stack([payload.update for payload in payloads])
        return cubes.sign() * cubes.abs() ** (1 / 3)


def test_a_codec_whose_payloads_do_not_add_up_is_told() -> None:
    with pytest.raises(AssertionError, match=r"with `secure` the weights differ by .* from those in the clear"):
        check_codec(enter(Cubed()))


@dataclass(frozen=True)
class Halved(Cubed):
    """Half of an update, on the wire."""

    name: ClassVar[str] = "toy-halved"

    def encode(self, task: fv.Task, w: Tensor, updates: Tensor, seeds: Any, stack: Any) -> list[Any]:
        return [Scaled(row / 2) for row in updates]

    def decode(self, task: fv.Task, w: Tensor, payloads: Sequence[Any]) -> Tensor:
        return 2 * torch.stack([payload.update for payload in payloads])


def test_a_codec_of_ones_own_whose_payloads_add_up_is_summed_securely() -> None:
    check_codec(enter(Halved()))


@dataclass(frozen=True)
class Wordless(fv.Half):
    name: ClassVar[str] = "toy-wordless"


def test_a_codec_without_words_is_told() -> None:
    with pytest.raises(AssertionError, match="Wordless has no docstring; say in its first line what it sends"):
        check_codec(enter(Wordless()))


@dataclass(frozen=True)
class Unregistered(fv.Qsgd):
    """Goes by the name of another codec."""


def test_a_codec_without_a_name_is_told() -> None:
    with pytest.raises(AssertionError, match="Unregistered is not registered under a name of its own"):
        check_codec(Unregistered())
