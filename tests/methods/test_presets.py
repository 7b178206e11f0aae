"""FedSynth and TOFU on the digits: FedAvg's accuracy at an eighth of its upload, and at less in 8 bits."""

import dataclasses

import pytest

import fedveil as fv
from codec_tools import digits
from fedveil.runs import recipe

ROUNDS_8BIT = 6
ROUNDS_SOON = 2


def run(name: str, rounds: int | None = None) -> fv.Result:
    chosen = recipe.read(f"digits/{name}")
    return fv.run(digits(), chosen.method, rounds=rounds or chosen.rounds, cohort=chosen.cohort, seed=chosen.seed)


@pytest.fixture(scope="module")
def results():
    return {name: run(name) for name in ("fedavg", "tofu", "fedsynth")}


def up(result: fv.Result) -> float:
    return result.summary()["bytes_up_per_client_round"]


def after(result: fv.Result, rounds: int) -> float:
    """Accuracy over the three rounds before and including this one."""
    return fv.Ledger(result.ledger.rows[:rounds]).summary("")["accuracy_last3"]


@pytest.mark.parametrize("name", ["tofu", "fedsynth"])
def test_the_first_updates_are_matched_at_an_eighth_of_the_upload(name):
    plain, short = run("fedavg", ROUNDS_SOON), run(name, ROUNDS_SOON)
    assert up(short) <= up(plain) / 8
    assert all(row.metrics["cosine"] > 0.8 for row in short.ledger.rows)
    assert short.accuracy >= plain.accuracy - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tofu", "fedsynth"])
def test_fedavgs_accuracy_within_two_points_at_an_eighth_of_its_upload(results, name):
    assert after(results[name], 20) >= after(results["fedavg"], 20) - 0.02
    assert up(results[name]) <= up(results["fedavg"]) / 8
    assert all(row.metrics["cosine"] > 0.8 for row in results[name].ledger.rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tofu", "fedsynth"])
def test_eight_bits_cost_a_third_of_the_papers_floats_and_two_points_at_most(results, name):
    short = run(f"{name}-8bit", ROUNDS_8BIT)
    assert up(short) <= up(results[name]) / 3
    assert after(short, ROUNDS_8BIT) >= after(results[name], ROUNDS_8BIT) - 0.02


@pytest.mark.parametrize("name", ["tofu", "fedsynth"])
def test_the_8_bit_recipe_differs_in_its_bits_alone(name):
    floats, bits = (recipe.read(f"digits/{n}").method for n in (name, f"{name}-8bit"))
    assert dataclasses.replace(floats, up=dataclasses.replace(floats.up, precision="uint8")) == bits
