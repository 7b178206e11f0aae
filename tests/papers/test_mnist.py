"""Paper settings on real MNIST, at a size a CPU manages in minutes: `FEDVEIL_DATA=… make test-slow`."""

import os

import pytest
import torch

import fedveil as fv
from fedveil.runs import recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("FEDVEIL_DATA" not in os.environ, reason="set FEDVEIL_DATA to a folder with mnist/"),
]


def reached(name, *changes):
    chosen = recipe.read(name, changes)
    result = fv.run(chosen.build(), chosen.method, rounds=chosen.rounds, cohort=chosen.cohort)
    return result.ledger.rows[-1], result


def test_fedavg_reaches_mcmahans_first_rounds():
    row, _ = reached("mnist/fedavg", "rounds=2")
    assert row.metrics["accuracy"] > 0.94  # 95.7 on a GPU


def test_tofu_stays_in_step_and_learns_both_ways():
    fits = [f"method.{way}.{key}" for way in ("up", "down") for key in ("steps=150", "decay=late")]
    row, result = reached("mnist/tofu", "rounds=7", "method.full_rounds=1", *fits)
    assert row.metrics["accuracy"] > 0.85  # 92.6 on a GPU after 6 rounds with 1,000 steps
    assert not any(r.metrics.get("resynced") for r in result.ledger.rows)


def test_fedsynth_encodes_the_update_of_the_mcmahan_cnn():
    fewer = ("rounds=1", "cohort.size=1", "method.up.fits=20", "method.up.epochs=1")
    row, result = reached("mnist/fedsynth-iid", *fewer)
    assert row.metrics["cosine"] > 0.4
    assert torch.isfinite(result.weights).all()
    assert result.summary()["bytes_up_per_client_round"] < 4 * 1_663_370 / 40
