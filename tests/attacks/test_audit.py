"""Verdicts: found before inconclusive before not found, and never "not found" where a control failed."""

import msgspec
import pytest

from fedveil.attacks.audit import Audit, above_chance, verdicts
from fedveil.attacks.exposure import FOUND, INCONCLUSIVE, NOT_FOUND, Exposure
from fedveil.attacks.mechanism import Mechanism
from fedveil.attacks.roc import Figures
from fedveil.attacks.scores import Range

NOTHING = Audit(1, 0, 1e-5, None, {}, None, None, None, [])
GUESS = Figures(0.5, 0.45, 0.55, [], 0.5, 0.0, [0.0, 1.0], [0.0, 1.0])
SURE = msgspec.structs.replace(GUESS, auc=0.95, low=0.9, high=1.0)
COSINE = Range(1.0, 1.0, 1.0)
CANARIES = {"canaries": 400, "answers": 1, "steps": 40, "delta": 1e-6, "epsilon": 4.0, "lower": 1.0, "guesses": 50}
CANARIES |= {"right": 40, "noise": 2.0, "found": 2.0, "most": 2.1, "reused": False, "control": 6.0}


def exposed(verdict: str, kind: str = "raw") -> Exposure:
    return Exposure(kind, [1], 3, 1, COSINE, None, None, {}, None, verdict, "a reason")


def told(**parts) -> dict[str, str]:
    return {each.part: each.verdict for each in verdicts(msgspec.structs.replace(NOTHING, **parts))}


def test_nothing_attacked_is_no_verdict():
    assert verdicts(NOTHING) == []


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([NOT_FOUND], NOT_FOUND),
        ([NOT_FOUND, INCONCLUSIVE], INCONCLUSIVE),
        ([NOT_FOUND, INCONCLUSIVE, FOUND], FOUND),
    ],
)
def test_the_worst_kind_of_message_decides(rows, verdict):
    assert told(messages=[exposed(each) for each in rows]) == {"inversion": verdict}


@pytest.mark.parametrize(
    ("attack", "control", "baseline", "verdict"),
    [
        (SURE, SURE, GUESS, FOUND),
        (GUESS, SURE, GUESS, NOT_FOUND),
        (GUESS, GUESS, GUESS, INCONCLUSIVE),
        (SURE, SURE, SURE, INCONCLUSIVE),  # members differ in themselves
    ],
)
def test_membership_needs_a_control_that_works_and_a_baseline_that_does_not(attack, control, baseline, verdict):
    assert told(attacks={"loss": attack}, control=control, baseline=baseline) == {"membership": verdict}


@pytest.mark.parametrize(
    ("more", "broken", "verdict"),
    [({}, [], NOT_FOUND), ({"control": 3.0}, [], INCONCLUSIVE), ({}, ["ε is too low"], FOUND)],
)
def test_a_promise_is_contradicted_or_not_or_the_audit_is_too_weak(more, broken, verdict):
    assert told(mechanism=Mechanism(**(CANARIES | more)), broken=broken) == {"dp": verdict}


def test_what_is_found_comes_first():
    found = msgspec.structs.replace(
        NOTHING, messages=[exposed(FOUND)], attacks={"loss": GUESS}, control=SURE, baseline=GUESS
    )
    assert [each.verdict for each in verdicts(found)] == [FOUND, NOT_FOUND]
    assert "records of clients can be rebuilt" in verdicts(found)[0].sentence


def test_the_best_of_several_attacks_needs_more_than_its_own_interval():
    near = msgspec.structs.replace(GUESS, auc=0.54, low=0.505, high=0.575)
    assert above_chance([near])
    assert not above_chance([near, GUESS, GUESS, GUESS])
    assert above_chance([SURE, GUESS, GUESS, GUESS])
