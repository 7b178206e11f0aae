"""Curves that stay readable, and SVG text that can be put into a page."""

import io
import re
import xml.etree.ElementTree as ET

import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread

from fedveil.core.ledger import Ledger, Row
from fedveil.report.figures import COLOURS, curves, look, points, size, strip, svg


def ledger(accuracies: list[float | None], sent: int = 1000) -> Ledger:
    rows = []
    for number, accuracy in enumerate(accuracies, 1):
        metrics = {} if accuracy is None else {"accuracy": accuracy}
        rows.append(Row(round=number, cohort=[0], up={"0": sent}, metrics=metrics))
    return Ledger(rows)


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (80_084, "80.08 kB"), (999_949, "999.9 kB"), (999_950, "1 MB")],
)
def test_bytes_have_human_units(count: int, words: str) -> None:
    assert size(count) == words.replace(" ", "\N{NO-BREAK SPACE}")


def test_very_many_bytes_stay_in_the_largest_unit() -> None:
    assert size(5e15) == "5\N{NO-BREAK SPACE}PB"


def test_twelve_runs_look_different_without_colour_and_without_markers() -> None:
    looks = [look(i) for i in range(12)]
    assert len({each["marker"] for each in looks}) == 12
    assert len({(each["color"], each["linestyle"]) for each in looks}) == 12


@pytest.mark.parametrize("colour", COLOURS)
def test_colours_stand_out_from_white(colour: str) -> None:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    assert 1.05 / (luminance + 0.05) >= 3


def test_bytes_add_up_over_rounds_that_were_not_measured() -> None:
    assert points(ledger([None, 0.5, None, 0.7]), "bytes") == [(2000, 0.5), (4000, 0.7)]


def private(accuracies: list[float | None], charged: list[float | None]) -> Ledger:
    found = ledger(accuracies)
    for row, epsilon in zip(found.rows, charged, strict=True):
        row.epsilon = epsilon
    return found


def test_what_was_charged_stays_charged_in_rounds_that_charge_nothing() -> None:
    found = private([0.1, 0.2, 0.3, 0.4, None], [None, 1.5, None, 2.5, 3.0])
    assert points(found, "epsilon") == [(1.5, 0.2), (1.5, 0.3), (2.5, 0.4)]
    assert points(found, "rounds", "epsilon") == [(2, 1.5), (4, 2.5), (5, 3.0)]


@pytest.mark.parametrize("charged", [[0.07, 0.09], [2.8, 5.7], [0.5, 800.0]])
def test_accuracy_against_epsilon_has_plain_ticks_and_names_private_runs_only(charged: list[float]) -> None:
    runs = {"plain": ledger([0.5, 0.9]), "private": private([0.3, 0.6], [*charged])}
    figure = curves(runs, ["epsilon"])
    drawn = svg(figure)
    (axes,), (legend,) = figure.axes, figure.legends
    assert axes.lines[1].get_xydata().tolist() == [[charged[0], 0.3], [charged[1], 0.6]]
    assert not len(axes.lines[0].get_xydata())
    assert [text.get_text() for text in legend.get_texts()] == ["private"]
    assert axes.get_xlabel() == "ε charged so far"
    left, right = axes.get_xlim()
    ticks = [t.get_text() for t in axes.get_xticklabels() if left <= t.get_position()[0] <= right]
    assert 2 <= len(ticks) <= 6
    assert all(re.fullmatch(r"\d+|0\.\d+", tick) for tick in ticks), ticks
    assert "B</text>" not in drawn


def test_panels_show_accuracy_against_rounds_and_against_bytes_on_a_log_axis() -> None:
    by_round, by_byte = curves({"a": ledger([0.2, 0.6, 0.8]), "b": ledger([0.1, 0.2], 10)}).axes
    assert by_round.lines[0].get_xydata().tolist() == [[1, 0.2], [2, 0.6], [3, 0.8]]
    assert by_byte.lines[0].get_xydata().tolist() == [[1000, 0.2], [2000, 0.6], [3000, 0.8]]
    assert by_byte.lines[1].get_xydata().tolist() == [[10, 0.1], [20, 0.2]]
    assert (by_round.get_xscale(), by_byte.get_xscale()) == ("linear", "log")


@pytest.mark.parametrize("spread", [1, 1.2, 3, 10, 90, 1e4, 1e8, 1e14])
@pytest.mark.parametrize("low", [1, 210, 4000])
def test_the_axis_of_bytes_has_two_to_six_ticks_in_human_units(low: int, spread: float) -> None:
    figure = curves({"a": ledger([0.1], low), "b": ledger([0.2], int(low * spread))}, ["bytes"])
    svg(figure)
    axis, (left, right) = figure.axes[0].xaxis, figure.axes[0].get_xlim()
    shown = [
        t.get_text() for t, x in zip(axis.get_ticklabels(), axis.get_ticklocs(), strict=True) if left <= x <= right
    ]
    assert 2 <= len(shown) <= 6
    assert all(re.fullmatch(r"(0.5|\d{1,3})\N{NO-BREAK SPACE}[kMGTP]?B", text) for text in shown)


@pytest.mark.parametrize("runs", [1, 5, 12])
def test_the_legend_names_every_run_inside_the_figure(runs: int) -> None:
    figure = curves({f"method-{i} (a rather long folder name)": ledger([0.1, 0.2]) for i in range(runs)})
    svg(figure)
    (legend,) = figure.legends
    assert len(legend.get_texts()) == runs
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert figure.axes[0].get_window_extent().height > 150


def test_another_metric_keeps_each_runs_look_and_names_only_runs_that_have_it() -> None:
    coded = Ledger([Row(round=n, cohort=[0], metrics={"cosine": n / 4}) for n in (1, 2)])
    figure = curves({"plain": ledger([0.2, 0.4]), "coded": coded}, ["rounds"], "cosine")
    (axes,), (legend,) = figure.axes, figure.legends
    assert axes.lines[1].get_xydata().tolist() == [[1, 0.25], [2, 0.5]]
    assert axes.lines[1].get_color() == look(1)["color"]
    assert [text.get_text() for text in legend.get_texts()] == ["coded"]
    assert axes.get_ylabel() == "cosine, clients to server"


@pytest.mark.parametrize(
    ("metric", "values", "scale", "bottom"),
    [
        ("radius", [5.1, 5.2], "linear", 0),
        ("matching", [0.1, 2.1], "log", None),
        ("matching", [0, 2.1], "linear", 0),
        ("cosine", [0.04, 0.9], "linear", None),
        ("epsilon", [0.04, 0.9], "linear", 0),
    ],
)
def test_distances_are_drawn_from_zero_unless_they_are_far_apart(
    metric: str, values: list[float], scale: str, bottom: float | None
) -> None:
    found = Ledger([Row(round=n, cohort=[0], metrics={metric: y}, epsilon=y) for n, y in enumerate(values, 1)])
    axes = curves({"a": found}, ["rounds"], metric).axes[0]
    assert axes.get_yscale() == scale
    assert bottom is None or axes.get_ylim()[0] == bottom
    assert axes.get_ylim()[1] > 1.03 * max(values)


def test_radii_that_clients_measured_are_shaded_and_all_of_it_is_in_sight() -> None:
    radii = {1: (1.0, 2.0, 9.0), 2: (0.5, 0.6, 3.0)}
    names = ("radius_least", "radius", "radius_most")
    found = Ledger([Row(round=n, cohort=[0], metrics=dict(zip(names, r, strict=True))) for n, r in radii.items()])
    axes = curves({"a": found, "b": ledger([0.2])}, ["rounds"], "radius").axes[0]
    shaded = [tuple(point) for point in axes.collections[0].get_paths()[0].vertices.tolist()]
    assert {(1, 1.0), (1, 9.0), (2, 0.5), (2, 3.0)} <= set(shaded)
    assert axes.get_ylim()[1] > 9


@pytest.mark.parametrize(("channels", "side", "seen"), [(1, 8, 48), (3, 32, 32), (4, 100, 100)])
def test_a_strip_is_a_png_of_images_side_by_side(channels: int, side: int, seen: int) -> None:
    images = torch.zeros(5, channels, side, side)
    images[1, 0, 0, 0] = -7
    image = imread(io.BytesIO(strip(images)))
    assert image.shape[:2] == (seen, 5 * (seen + 2))
    assert image[:, seen + 1 :: seen + 2, :3].min() == 1  # white lines between them
    second = image[:, seen + 3 : 2 * seen + 3, :3]
    assert second[0, 0, 0] == 0
    assert second[-1, -1].tolist() == [1, 1, 1]


@pytest.mark.parametrize("accuracies", [[], [None, None]])
def test_without_a_measurement_the_figure_says_so(accuracies: list[float | None]) -> None:
    assert svg(curves({"a": ledger(accuracies)})).count("no accuracy measured yet") == 2


def test_rounds_in_which_nothing_was_sent_are_no_trouble_to_the_log_axis() -> None:
    figure = curves({"a": Ledger([*ledger([0.1], 0).rows, *ledger([0.3], 50).rows])})
    assert figure.axes[1].lines[0].get_xydata().tolist() == [[50, 0.3]]
    svg(figure)


@pytest.mark.parametrize("name", ["_hidden", "$x^2", "$a$", r"\frac", "联邦", '<b id="x">', "", "a\\$b"])
def test_any_name_is_shown_as_it_is(name: str) -> None:
    root = ET.fromstring(svg(curves({name: ledger([0.1, 0.2])})))
    assert name in {(text.text or "").strip() for text in root.iter("{http://www.w3.org/2000/svg}text")} | {""}


def test_svg_is_the_same_each_time_and_refers_to_nothing_outside() -> None:
    first, second = (svg(curves({"a": ledger([0.1, 0.2])})) for _ in range(2))
    assert first == second
    assert first.startswith("<svg")
    assert first.endswith("</svg>")
    assert "metadata" not in first
    addresses = set(re.findall(r"https?://[^\"]*", first))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_svgs_share_no_ids_and_their_references_lead_somewhere() -> None:
    ids = []
    for text in (svg(curves({"a": ledger([0.1, 0.2])})), svg(curves({"b": ledger([0.1, 0.2])}))):
        mine = re.findall(r' id="([^"]+)"', text)
        used = set(re.findall(r'href="#([^"]+)"', text)) | set(re.findall(r"url\(#([^)]+)\)", text))
        assert len(mine) == len(set(mine))
        assert used
        assert used <= set(mine)
        ids.append(set(mine))
    assert not ids[0] & ids[1]


def test_figures_leave_no_global_state() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    assert type(curves({"a": ledger([0.1])})) is Figure
    svg(curves({"a": ledger([0.1])}))
    assert dict(matplotlib.rcParams) == before
