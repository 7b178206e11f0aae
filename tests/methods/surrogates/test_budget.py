"""FedLAP-DP beside DP-FedAvg, at the same ε."""

import pytest

import fedveil as fv
from fedveil.runs import recipe


@pytest.mark.parametrize(("rounds", "epsilon"), [(1, 3.121), pytest.param(3, 5.848, marks=pytest.mark.slow)])
def test_fedlap_beats_dp_fedavg_at_equal_epsilon_and_rounds(rounds, epsilon):
    """The same split, steps, noise and rounds; DP-FedAvg with the best of its learning rates. Of fewer steps in more
    rounds, at the same ε, DP-FedAvg makes more."""
    results = []
    for name in ("digits/dp-fedavg", "digits/fedlap-dp"):
        plan = recipe.read(name)
        results.append(
            fv.run(
                plan.build(), plan.method, rounds=rounds, cohort=plan.cohort, evaluate_every=3, insecure_test_noise=0
            )
        )
    average, surrogate = results
    assert average.summary()["epsilon"] == surrogate.summary()["epsilon"] == pytest.approx(epsilon, abs=1e-3)
    assert surrogate.accuracy >= average.accuracy + 0.03
