"""The frontier: who dominates whom, what a target costs, and what a budget buys."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from fedveil.core.ledger import Row
from fedveil.report.folder import read
from fedveil.report.frontier import frontier, picture, points
from fedveil.report.groups import grouped
from fedveil.runs.space import Budget
from shell import fv, good

Maker, Rower = Callable[..., Path], Callable[..., Row]


@pytest.fixture
def runs(make: Maker, row: Rower) -> list[Path]:
    """fedavg is best and dear, tofu is cheap, tiny is dominated by tofu, and the private one has an ε."""
    private = [row(1, 0.4, epsilon=1.0), row(2, 0.6, epsilon=2.0)]
    return [
        make("all/a/seed-0", [0.80, 0.90], sent=1000, extra="seed = 0"),
        make("all/a/seed-1", [0.90, 0.92], sent=1000, extra="seed = 1"),
        make("all/b/seed-0", [0.70, 0.85], sent=100, method="tofu", extra="seed = 0"),
        make("all/b/seed-1", [0.70, 0.87], sent=100, method="tofu", extra="seed = 1"),
        make("all/c", [0.50, 0.70], sent=200, method="tiny"),
        make("all/d", private, method="private", tables="[method.privacy]\ndelta = 1e-3\n"),
    ]


def test_only_what_nothing_beats_in_everything_is_on_the_frontier(runs: list[Path]) -> None:
    found = points(grouped(read(runs)), None)
    assert [point.name for point in found] == ["fedavg", "tofu", "tiny", "private + DP"]
    assert [point.name for point in frontier(found)] == ["fedavg", "tofu", "private + DP"]
    fedavg, tofu, tiny, _ = found
    assert fedavg.value.mean == pytest.approx(0.91)
    assert fedavg.costs["bytes_up"] == 4000
    assert tofu.dominates(tiny)
    assert not tofu.dominates(tofu)
    assert not tofu.dominates(fedavg)


def test_less_memory_keeps_a_recipe_on_the_frontier(make: Maker, row: Rower) -> None:
    much = make("m/much", [row(1, 0.9, memory=2000)], extra="seed = 0")
    less = make("m/less", [row(1, 0.8, memory=1000)], method="tofu", extra="seed = 0")
    old = make("m/old", [row(1, 0.7, memory=0)], method="tiny", extra="seed = 0")  # a ledger without this field
    found = points(grouped(read([much, less, old])), None)
    assert [point.costs["memory"] for point in found] == [2000, 1000, math.inf]
    assert [point.name for point in frontier(found)] == ["fedavg", "tofu"]


def test_a_metric_of_which_less_is_better(runs: list[Path]) -> None:
    found = points(grouped(read(runs)), "loss")
    assert [point.name for point in found] == ["fedavg", "tofu", "tiny", "private + DP"]
    assert [point.name for point in frontier(found)] == ["fedavg", "tofu", "private + DP"]
    with pytest.raises(ValueError, match="--metric is 'f1', but no run measured it; they measured accuracy, loss"):
        points(grouped(read(runs)), "f1")


def test_a_target_costs_what_it_took_the_seeds_that_reach_it(runs: list[Path]) -> None:
    fedavg, tofu, *_ = points(grouped(read(runs)), None)
    told = fedavg.cost_to(0.9)
    assert (told["reached"], told["bytes_up"], told["rounds"]) == (2, 3000, 1.5)  # in round 2 and in round 1
    assert tofu.cost_to(0.86)["reached"] == 1
    assert tofu.cost_to(0.86)["bytes_up"] == 400
    assert tofu.cost_to(0.99)["bytes_up"] is None


def test_a_budget_buys_what_was_measured_within_it(runs: list[Path]) -> None:
    fedavg, tofu, tiny, private = points(grouped(read(runs)), None)
    assert fedavg.within(Budget("bytes", 2000)).mean == pytest.approx(0.85)
    assert fedavg.within(Budget("bytes", 1999)) is None
    assert tofu.within(Budget("bytes", 2000)).mean == pytest.approx(0.86)
    assert private.within(Budget("epsilon", 1.5)).mean == pytest.approx(0.4)
    assert tiny.within(Budget("epsilon", 1.5)) is None
    assert tiny.within(Budget("rounds", 1)).mean == pytest.approx(0.5)


def test_the_picture_joins_what_nothing_beats_in_two(runs: list[Path]) -> None:
    found = points(grouped(read(runs)), None)
    drawn = picture(found)
    by = {axes.get_xlabel(): axes for axes in drawn.axes}
    assert set(by) == {"bytes up", "ε"}
    assert by["bytes up"].lines[0].get_xdata().tolist() == [400, 4000]
    assert by["ε"].lines[0].get_xdata().tolist() == [2]


def test_the_command_prints_three_tables_and_draws(runs: list[Path], tmp_path: Path) -> None:
    home = tmp_path / "all"
    shown = good("frontier", home, "--target", 0.85, "--at", "bytes=1kB", "--at", "epsilon=1")
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "fedavg * 91.00% ± 1.41 4 kB 8 kB – 0 2" in lines
    assert "tiny 70.00% 800 B 8 kB – 0 2" in lines
    assert "Cost until accuracy 85.00%, over the seeds that reach it:" in lines
    assert "tofu 2 of 2 400 B 8 kB 0 2" in lines
    assert "tofu 86.00% ± 1.41 –" in lines
    assert "private + DP – 40.00%" in lines
    assert (home / "frontier.svg").read_text().startswith("<svg")
    told = good("frontier", home, "--format", "json", "-o", tmp_path / "own.svg")
    assert [each["frontier"] for each in told["recipes"]] == [True, True, False, True]
    assert told["recipes"][0]["epsilon"] is None
    assert told["target"] == pytest.approx(0.9)
    assert told["picture"] == str(tmp_path / "own.svg")
    json.dumps(told, allow_nan=False)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--metric", "f1"], "--metric is 'f1', but no run measured it"),
        (["--at", "bytes=x"], "--at is 'bytes=x'; use for example"),
    ],
)
def test_a_mistake_is_one_sentence(runs: list[Path], tmp_path: Path, args: list[str], told: str) -> None:
    result = fv("frontier", tmp_path / "all", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr.splitlines()[-1]
    assert "holds no recipe.toml" in fv("frontier", tmp_path / "nowhere").stderr
