"""FedLAP-DP beside DP-FedAvg, at the same ε."""

import pytest

import fedveil as fv
from fedveil import recipe


@pytest.mark.slow
def test_fedlap_beats_dp_fedavg_at_equal_epsilon():
    """The same split, steps, noise and rounds; DP-FedAvg with the best of its learning rates."""
    results = {}
    for name in ("digits/dp-fedavg", "digits/fedlap-dp"):
        plan = recipe.read(name)
        results[name] = fv.run(
            plan.build(), plan.method, rounds=plan.rounds, cohort=plan.cohort, evaluate_every=3, insecure_test_noise=0
        )
    average, surrogate = results.values()
    assert average.summary()["epsilon"] == surrogate.summary()["epsilon"] == pytest.approx(5.753, abs=1e-3)
    assert surrogate.accuracy >= average.accuracy + 0.03
