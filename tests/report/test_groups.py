"""Several seeds in a report: groups, bands, intervals, heat maps and the zoomed axis."""

import re
from collections.abc import Callable
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from fedveil.core.ledger import Ledger, Row
from fedveil.core.metrics import ACCURACY
from fedveil.report import write
from fedveil.report.figures import averaged, curves
from fedveil.report.folder import read
from fedveil.report.grid import heat_map, panels
from fedveil.report.groups import expand, grouped
from fedveil.report.tuning import parallel

Maker = Callable[..., Path]


def words(path: Path) -> str:
    text = re.sub(r"<style>.*?</style>|<svg.*?</svg>", " ", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", text)).split())


def ledger(*accuracies: float, sent: int = 1000) -> Ledger:
    rows = [Row(round=n, cohort=[0], up={"0": sent}, metrics={"accuracy": a}) for n, a in enumerate(accuracies, 1)]
    return Ledger(rows)


def repeat(make: Maker, name: str, ends: list[float], **more: object) -> list[Path]:
    return [make(f"{name}/seed-{s}", [0.5, end], extra=f"seed = {s}", **more) for s, end in enumerate(ends)]


def test_runs_that_differ_in_their_seeds_are_one_recipe(make: Maker) -> None:
    folders = repeat(make, "a", [0.9, 0.8]) + repeat(make, "b", [0.7, 0.6], method="tofu")
    folders.append(make("a/other", [0.5], extra="seed = 7", tables="feedback = true"))
    folders.append(make("a/again", [0.5, 0.5], extra="seed = 1"))
    groups = grouped(read(folders))
    assert [len(group.runs) for group in groups] == [2, 2, 1, 1]
    assert groups[0].repeats().values() == {0: 0.9, 1: 0.8}
    held = (
        make("c/seed-0", [0.5], extra="seed = 0", method="x"),
        make("c/seed-1", [0.5], extra="seed = 1\nsplit.seed = 0\ncohort.seed = 0", method="x"),
    )
    assert [len(group.runs) for group in grouped(read(held))] == [2]


def test_groups_of_one_method_are_named_by_what_sets_them_apart(make: Maker) -> None:
    slow = repeat(make, "a", [0.9, 0.8], tables="[method.local]\nlr = 0.1")
    fast = repeat(make, "b", [0.9, 0.8], tables="[method.local]\nlr = 1.0")
    same = repeat(make, "c", [0.9, 0.8], tables="[method.local]\nlr = 1")
    names = [group.name for group in grouped(read(slow + fast))]
    assert names == ["fedavg (local.lr=0.1)", "fedavg (local.lr=1)"]
    assert [group.name for group in grouped(read(fast + same))] == ["fedavg (b)", "fedavg (c)"]


def test_a_folder_without_a_run_stands_for_those_below_it(make: Maker, tmp_path: Path) -> None:
    folders = repeat(make, "all/a", [0.9, 0.8]) + repeat(make, "all/b", [0.7], method="tofu")
    trial = make("all/trials/0000/seed-0", [0.5])
    assert expand([tmp_path / "all"]) == folders
    assert expand([trial, tmp_path / "nowhere"]) == [trial, tmp_path / "nowhere"]


def test_a_report_of_seeds_has_means_intervals_and_words(make: Maker, tmp_path: Path) -> None:
    repeat(make, "all/a", [0.90, 0.91, 0.92])
    repeat(make, "all/b", [0.80, 0.80, 0.83], method="tofu")
    repeat(make, "all/c", [0.91, 0.90, 0.92], method="tiny")
    text = words(write([tmp_path / "all"], tmp_path / "r.html"))
    assert "3 recipes compared, 9 runs" in text
    assert "fedavg has the best mean test accuracy, 91.00% ± 1.00 over 3 seeds." in text
    assert "tofu against it: -10.00 points [-12.48, -7.52]." in text
    assert "tiny against it: no difference seen: +0.00 points" in text
    assert "tofu 3 81.00% ± 1.73 -10.00 [-12.48, -7.52]" in text
    assert "differences to the first recipe are paired by seed" in text
    assert "fedavg (a/seed-1) 2 91.00%" in text  # every run, below


def test_many_recipes_are_compared_in_two_sentences(make: Maker, tmp_path: Path) -> None:
    repeat(make, "all/a", [0.90, 0.91, 0.92])
    for name, accuracy in (("b", 0.8), ("c", 0.7)):
        repeat(make, f"all/{name}", [accuracy, accuracy + 0.01, accuracy + 0.02], method=f"low-{name}")
    for name in "de":
        repeat(make, f"all/{name}", [0.91, 0.90, 0.92], method=f"alike-{name}")
    text = words(write([tmp_path / "all"], tmp_path / "r.html"))
    assert "Worse than it, with 95% confidence each: low-b, low-c. No difference seen: alike-d, alike-e." in text
    assert "against it" not in text


def test_a_recipe_is_a_mean_and_a_band(make: Maker) -> None:
    seeds = [ledger(0.5, 0.7, 0.9, sent=1000), ledger(0.6, 0.9, sent=3000)]
    line, band = averaged(seeds, "bytes", "accuracy")
    assert line == [(2000, pytest.approx(0.55)), (4000, pytest.approx(0.8))]
    assert band[1] == pytest.approx((0.8 - 0.2 / np.sqrt(2), 0.8 + 0.2 / np.sqrt(2)))
    (axes, _) = curves({"a": seeds, "b": ledger(0.1, 0.2)}).axes
    assert len(axes.collections) == 1
    assert axes.lines[0].get_xydata().tolist() == [[1, pytest.approx(0.55)], [2, pytest.approx(0.8)]]
    assert averaged([ledger(0.5), Ledger()], "rounds", "accuracy") == ([], [])


def test_the_axis_begins_at_90_percent_where_all_curves_end_above() -> None:
    high, low = ledger(0.2, 0.93, 0.95, 0.96), ledger(0.2, 0.5, 0.95, 0.89)
    (axes,) = curves({"a": high}, ["rounds"]).axes
    assert axes.get_ylim()[0] == 0.9
    assert "axis from 90%" in axes.get_ylabel()
    (axes,) = curves({"a": high, "b": low}, ["rounds"]).axes
    assert axes.get_ylim()[0] < 0.3
    assert "axis from" not in axes.get_ylabel()


def test_two_settings_make_a_heat_map(make: Maker, tmp_path: Path) -> None:
    tables = "[method.local]\nlr = {}\nepochs = {}"
    ends = {(0.1, 1): 0.5, (0.1, 2): 0.6, (1.0, 1): 0.7, (1.0, 2): 0.8}
    folders = [
        make(f"g/{lr}-{n}", [end], tables=tables.format(lr, n), extra="seed = 0") for (lr, n), end in ends.items()
    ]
    drawn = heat_map(grouped(read(folders)))
    assert drawn
    (axes, _) = drawn.axes
    assert axes.images[0].get_array().tolist() == [[0.5, 0.6], [0.7, 0.8]]
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("method.local.lr", "method.local.epochs")
    assert heat_map(grouped(read(folders[:3]))) is None
    assert heat_map(grouped(read(folders[:2]))) is None
    assert "by two settings" in words(write([tmp_path / "g"], tmp_path / "r.html"))


def test_a_sweep_has_a_panel_for_each_value(make: Maker, tmp_path: Path) -> None:
    folders = [
        make(f"lr={lr}/seed-{seed}", [0.5, 0.5 + lr], extra=f"seed = {seed}", tables=f"[method.local]\nlr = {lr}\n")
        for lr in (0.1, 0.2, 0.3)
        for seed in (0, 1)
    ]
    drawn = panels(grouped(read(folders)))
    assert drawn is not None
    assert [axes.get_title(loc="left") for axes in drawn.axes] == [f"local.lr = {lr}" for lr in (0.1, 0.2, 0.3)]
    grey, own = drawn.axes[1].lines[0], drawn.axes[1].lines[-1]
    assert list(own.get_ydata()) == pytest.approx([0.5, 0.7])
    assert own.get_linewidth() > grey.get_linewidth()
    assert len(drawn.axes[1].lines) == 4
    assert panels(grouped(read(folders[:4]))) is None  # two values
    other = make("other/seed-0", [0.5, 0.6], method="scaffold")
    assert panels(grouped(read([*folders, other]))) is None  # another method
    page = write(folders, tmp_path / "sweep.html").read_text(encoding="utf-8")
    assert "<h2>Sweep</h2>" in page


def test_of_equal_trials_the_first_stands_out() -> None:
    drawn = parallel([({"lr": 0.1}, 0.9), ({"lr": 0.2}, 0.9), ({"lr": 0.3}, 0.5)], [], ACCURACY)
    bold = max(drawn.axes[0].lines, key=lambda line: line.get_linewidth())
    assert next(iter(bold.get_ydata())) == pytest.approx(0.0)  # the lowest rate
