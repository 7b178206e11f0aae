"""`fv.run_many`: recipes and functions with several seeds, in folders that can be continued."""

from pathlib import Path

import pytest
import torch

import fedveil as fv
from fedveil.runs import recipe

TINY = ["split.clients=4", "cohort.size=2", "method.local.epochs=1", "rounds=2"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_recipes_run_with_the_same_seeds_and_are_compared_in_pairs():
    plans = {
        "slow": recipe.read("digits/fedavg", [*TINY, "method.local.lr=0.01"]),
        "fast": recipe.read("digits/fedavg", TINY),
    }
    found = fv.run_many(plans, 2)
    assert {name: list(by_seed) for name, by_seed in found.results.items()} == {"slow": [0, 1], "fast": [0, 1]}
    gains = [found.results["fast"][seed].value - found.results["slow"][seed].value for seed in (0, 1)]
    assert found.difference("fast").mean == pytest.approx(sum(gains) / 2)
    assert found.difference("slow", "fast").mean == pytest.approx(-sum(gains) / 2)
    assert found.spread("fast").count == 2
    assert found.table().splitlines()[0].startswith("recipe  seeds  accuracy")
    assert "fast    2" in found.table()
    alone = fv.run(plans["fast"].build(), plans["fast"].method, rounds=2, cohort=plans["fast"].cohort)
    assert torch.equal(alone.weights, found.results["fast"][0].weights)


def test_a_stopped_queue_goes_on_from_its_folders():
    plan, asked = recipe.read("digits/fedavg", TINY), []
    stopped = fv.run_many(plan, 2, folder="a", stop=lambda: asked.append(0) or len(asked) > 1)
    assert {seed: len(r.ledger.rows) for seed, r in stopped.results[""].items()} == {0: 1}
    again = fv.run_many(plan, 2, folder="a")
    straight = fv.run_many(plan, "0-1")
    for seed in (0, 1):
        assert torch.equal(again.results[""][seed].weights, straight.results[""][seed].weights)
    assert Path("a/seed-1/ledger.jsonl").is_file()


def test_a_function_trains_what_no_recipe_says():
    plan, seen = recipe.read("digits/fedavg", TINY), []

    def train(seed: int, folder: Path | None) -> fv.Result:
        seen.append((seed, folder))
        return fv.run(plan.build(), plan.method, rounds=1, cohort=2, seed=seed, folder=folder)

    found = fv.run_many({"own": train}, (3, 5), folder="b")
    assert seen == [(3, Path("b/own/seed-3")), (5, Path("b/own/seed-5"))]
    assert found.spread("own").count == 2
    with pytest.raises(ValueError, match="hold is split, which is for recipes"):
        fv.run_many(train, 2, hold=["split"])
    with pytest.raises(ValueError, match="no seeds or no runs"):
        fv.run_many({}, 2)
