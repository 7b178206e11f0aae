"""Two secure sums in one round: their order, one question for each, and what binds the second to the first."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.core import message
from fedveil.core.clients import Clients, Letter
from fedveil.core.message import Answer, Question, Refused, Weights
from fedveil.core.stack import ClientStack, hashed
from fedveil.engines import LocalEngine, kept
from fedveil.privacy import SecureSum
from fedveil.privacy.secagg import server as summing
from fedveil.privacy.secagg.client import Summand, stages
from fedveil.privacy.secagg.context import Context
from fedveil.privacy.secagg.kept import OVER
from fedveil.privacy.secagg.masks import FixedPoint
from fedveil.privacy.secagg.records import Mask, tensor
from fedveil.privacy.secagg.server import ask_sum
from privacy.secagg.sums import Driven, Give, Only, Transport, given, rounding, unpacked
from privacy.secagg.sums import Summand as Given
from toys import Plain, linear_task

N, SIZE = 4, 8
TASK = linear_task(N)
RUN = bytes(8)


@message.kind
class Part(Answer, frozen=True):
    additive = True
    part: Weights


@message.kind
class Refine(Question, frozen=True):
    """Multiply what you gave in the first sum."""

    reply = Part
    factor: float


@dataclass(frozen=True)
class Twofold(fv.Method):
    """A sum of what clients give, then one of the same times the factor that the server chose."""

    name: ClassVar[str] = "toy-twofold"

    secure: SecureSum = field(default_factory=SecureSum)

    def init_state(self, task: fv.Task) -> fv.State:
        return Plain(task.initial)

    def round(self, state: Any, cohort: fv.Cohort) -> fv.State:
        first = ask_sum(cohort, Give(state.weights), self.secure)
        second = ask_sum(cohort.only(first.clients), Refine(0.5), self.secure, number=1)
        SUMS[:] = [first, second]
        return Plain(state.weights + second.mean("part"))

    @property
    def handlers(self) -> Mapping[type[Question], Callable[..., Sequence[Answer]]]:
        return {**stages(self.secure, ({Give: self.give}, Given), ({Refine: self.refine}, Part))}

    def give(self, stack: fv.ClientStack, question: Give) -> list[Given]:
        for note, client in zip(stack.notes, stack.clients, strict=True):
            note["vector"] = given(client) * float(question.weights[-1] + 1)
        return [Given(note["vector"], int(n)) for note, n in zip(stack.notes, stack.rows.counts, strict=True)]

    def refine(self, stack: fv.ClientStack, question: Refine) -> list[Part]:
        return [Part(vector * question.factor) for vector in stack.recall("vector")]


del fv.METHODS[Twofold.name]
SUMS: list[Any] = []  # of the last round


def clients() -> Clients:
    return Clients(Twofold(), TASK, RUN, fv.Seed.root(0))


def driven(here: Clients) -> Driven:
    """The cohort once it has dealt its shares."""
    return Driven(dict.fromkeys(range(N), here), here.run).deal()


def unmasked(here: Clients, question: Question) -> None:
    """A whole sum of the answers to a question."""
    stages = driven(here).mask(question)
    for k in range(N):
        stages.unmask(k)


# ---------------------------------------------------------------------------------------------------- a round


def first_mean(task: fv.Task, weights: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """The mean of what these clients, of as many records each, give at some weights."""
    return torch.stack([given(k) for k in ids]).mean(0) * float(weights[-1] + 1)


@pytest.mark.parametrize("server", ["curious", "malicious"])
@pytest.mark.parametrize("stack", [None, 1])
def test_both_sums_of_a_round_come_out(server, stack):
    method, engine = Twofold(SecureSum(server=server)), LocalEngine(stack=stack)
    result = fv.run(TASK, method, rounds=2, cohort=Only(size=N), engine=engine)
    before = TASK.initial + first_mean(TASK, TASK.initial, range(N)) / 2  # the weights of the second round
    mean, (first, second) = first_mean(TASK, before, range(N)), SUMS
    torch.testing.assert_close(first.mean("update"), mean, atol=2 * first.error, rtol=1e-5)
    torch.testing.assert_close(second.mean("part"), mean / 2, atol=2 * second.error, rtol=1e-5)
    for row in result.ledger.rows:
        assert not row.missing
        stages = [each.stage for each in row.secure]
        assert stages[: len(stages) // 2] == stages[len(stages) // 2 :]
        assert stages.count("unmask") == 2


class Losing(Transport):
    """Loses the question of the second sum on its way to client 3."""

    def deliver(self, letters, deadline):
        return super().deliver([x for x in letters if x.client != 3 or not _asks(x, Refine)], deadline)


def _asks(sent: Letter, kind: type[Question]) -> bool:
    return sent.kind == Mask.kind and unpacked(sent).asked == kind.kind


def test_a_client_that_is_lost_between_the_sums_is_in_the_first_one_only():
    task = linear_task(5, 30)
    fv.run(task, Twofold(), rounds=1, cohort=Only(size=5), engine=Losing())
    assert [each.clients for each in SUMS] == [(0, 1, 2, 3, 4), (0, 1, 2, 4)]
    mean = first_mean(task, task.initial, (0, 1, 2, 4))
    torch.testing.assert_close(SUMS[1].mean("part"), mean / 2, atol=2 * SUMS[1].error, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------- order


def test_the_second_question_is_answered_after_the_first_sum_was_unmasked_only():
    here = clients()
    with pytest.raises(Refused, match=f"wrong stage: questions of kind {Refine.kind} belong to another sum"):
        driven(here).mask(Refine(0.5))
    stages = driven(here).mask(Give(TASK.initial))
    for k in range(N):
        with pytest.raises(Refused, match="wrong stage"):
            stages.ask(asking(Refine(0.5)), k)  # masked, and not yet unmasked
        stages.unmask(k)
    driven(here).mask(Refine(0.5))


def test_clients_at_different_sums_do_not_accept_each_others_keys():
    """Keys are signed for one sum of the round, so a server cannot show those of the first sum in the second."""
    here = clients()
    first = driven(here).mask(Give(TASK.initial))
    for k in range(1, N):
        first.unmask(k)
    with pytest.raises(Refused, match="bad signature"):
        driven(here)  # client 0 begins the first sum anew, the others the second


def test_clients_at_different_sums_do_not_answer_as_one_stack():
    """Or the one that has unmasked the first sum would mask its question once more."""
    stack = SimpleNamespace(clients=(0, 1), notes=[{OVER: 1}, {}])
    with pytest.raises(Refused, match=r"wrong stage: clients \[0, 1\] are not at the same sum"):
        Summand(SecureSum(), [({}, Answer)] * 2)._sum(stack)


@pytest.mark.parametrize("weights", [TASK.initial, TASK.initial + 1], ids=["same", "other"])
def test_the_first_sums_question_is_refused_after_it_was_unmasked(weights):
    here = clients()
    unmasked(here, Give(TASK.initial))
    with pytest.raises(Refused, match=f"wrong stage: questions of kind {Give.kind} belong to another sum of round 1"):
        driven(here).mask(Give(weights))


def test_after_a_restart_it_is_refused_too():
    first, second = clients(), clients()
    unmasked(first, Give(TASK.initial))
    for k in range(N):
        kept.unpack(kept.pack(first, k, b"k" * 32), second, k, b"x" * 32)  # a key that is lost
    driven(second).mask(Refine(0.5))
    with pytest.raises(Refused, match=f"wrong stage: questions of kind {Give.kind} belong to another sum"):
        driven(second).mask(Give(TASK.initial))


def test_a_round_has_no_third_sum():
    here = clients()
    unmasked(here, Give(TASK.initial))
    unmasked(here, Refine(0.5))
    with pytest.raises(Refused, match="wrong stage: client 0 has unmasked a sum in round 1"):
        driven(here)


def test_a_server_that_comes_back_after_the_first_sum_goes_on_with_the_next_round():
    """Its clients are ahead of it: they do not answer the first sum's question again."""
    engine, method = Transport(), Twofold()
    federation = fv.Federation(TASK, method, engine, Only(size=N), fv.Seed.root(0))
    state = method.init_state(TASK)
    unmasked(federation.clients, Give(TASK.initial))
    after, row = federation.step(state, 1, 9)
    assert torch.equal(after.weights, state.weights)
    assert all(why.startswith("refused: wrong stage") for why in row.missing.values())
    assert len(row.missing) == N
    _, row = federation.step(state, 2, 9)
    assert not row.missing


# ---------------------------------------------------------------------------------------------------- one question each


def asking(question: Question) -> Mask:
    return Mask(list(range(N)), SIZE + 2, False, question.kind, tensor(message.pack(question)))


def test_a_client_masks_one_question_for_each_sum():
    here = clients()
    questions = (Give(TASK.initial), Give(TASK.initial + 1)), (Refine(0.5), Refine(0.25))
    for asked, other in questions:
        driven(here).mask(asked)
        with pytest.raises(Refused, match="has masked the answer to another question in round 1"):
            driven(here).mask(other)
        unmasked(here, asked)  # the same one may be asked again: the server was killed


def test_control_without_the_note_of_what_was_masked_it_masks_two(monkeypatch):
    monkeypatch.setattr(ClientStack, "basis", lambda self, *question: [b""] * len(self))
    here = clients()
    unmasked(here, Give(TASK.initial))
    driven(here).mask(Refine(0.5))
    driven(here).mask(Refine(0.25))


# ---------------------------------------------------------------------------------------------------- binding


@pytest.fixture
def totals(monkeypatch) -> list[np.ndarray]:
    """The second sums, as they come out for a server that leaves out its own checks."""
    found: list[np.ndarray] = []
    monkeypatch.setattr(FixedPoint, "check", lambda self, total, clients: found.append(total.copy()))
    monkeypatch.setattr(summing._Scene, "alike", lambda self, masked: dict(masked))
    return found


def other_first(client: int, question: Any) -> Any:
    """Client 2 is asked something else than the others in the first sum; in the second all are asked the same."""
    if client == 2 and isinstance(question, Mask) and question.asked == Give.kind:
        return asking(Give(TASK.initial + 1))
    return question


def encoded_second() -> np.ndarray:
    """What the clients encode in the second sum, added up."""
    factors = {k: (2.0 if k == 2 else 1.0) for k in range(N)}
    vectors = [given(k) * (float(TASK.initial[-1]) + factors[k]) * 0.5 for k in range(N)]
    fixed = FixedPoint(N, 1.0, 20, 1)
    encoded = [fixed.encode(v.numpy(), 1, rounding(k)) for k, v in enumerate(vectors)]
    return np.sum(encoded, axis=0, dtype=np.uint32)


def test_masks_of_the_second_sum_are_bound_to_the_first_question(totals):
    fv.run(TASK, Twofold(), rounds=1, cohort=Only(size=N), engine=Transport(ask=other_first))
    assert not np.array_equal(totals[1][:-2], encoded_second()[:-2])


def test_control_masks_that_depend_on_no_question_cancel(totals, monkeypatch):
    monkeypatch.setattr(Context, "asked", lambda self, basis, question: bytes(32))
    fv.run(TASK, Twofold(), rounds=1, cohort=Only(size=N), engine=Transport(ask=other_first))
    assert np.array_equal(totals[1][:-2], encoded_second()[:-2])


def test_control_masks_that_depend_on_the_second_question_alone_cancel(totals, monkeypatch):
    monkeypatch.setattr(
        ClientStack, "basis", lambda self, kind, payload: [hashed(kind.to_bytes(3, "little"), payload)] * len(self)
    )
    fv.run(TASK, Twofold(), rounds=1, cohort=Only(size=N), engine=Transport(ask=other_first))
    assert np.array_equal(totals[1][:-2], encoded_second()[:-2])
