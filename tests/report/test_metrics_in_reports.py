"""Reports of runs whose primary metric is not accuracy: their words and numbers fit."""

import pytest

from fedveil.core.ledger import Ledger, Row
from fedveil.core.metrics import Primary
from fedveil.report import curves, svg, write

RMSE = Primary("rmse", maximise=False)


def row(number: int, primary: Primary, value: float, sent: int = 1000, **more: float) -> Row:
    metrics = {primary.name: value, "loss": value**2, **more}
    return Row(round=number, cohort=[0], up={"0": sent}, down={"0": 10}, metrics=metrics, primary=primary)


def rows(primary: Primary, *values: float, sent: int = 1000, **more: float) -> list[Row]:
    return [row(number, primary, value, sent, **more) for number, value in enumerate(values, 1)]


def text(folders, tmp_path) -> str:
    return write(folders, tmp_path / "report.html").read_text()


def test_a_regression_is_told_in_its_own_words(make, tmp_path):
    folder = make("a", rows(RMSE, 3.0, 2.0, 0.51234, r2=0.75, validation_rmse=0.7))
    page = text([folder], tmp_path)
    assert "fedavg reached a test RMSE of 0.5123 in 3 rounds." in page
    assert "<h2>RMSE</h2>" in page
    assert "Test RMSE after each round." in page
    assert "test RMSE (less is better)" in page
    assert "validation RMSE (less is better)" in page
    assert '<th scope="col">RMSE</th><th scope="col">R²</th><th scope="col">loss</th>' in page
    assert "<td>0.75</td>" in page
    assert "ccuracy" not in page


def test_of_several_regressions_the_least_error_is_best(make, tmp_path):
    good = make("good", rows(RMSE, 3.0, 0.5), method="scaffold")
    cheap = make("cheap", rows(RMSE, 3.0, 0.504, sent=10), method="fedprox")
    bad = make("bad", rows(RMSE, 3.0, 0.9, sent=10))
    page = text([bad, cheap, good], tmp_path)
    assert "scaffold has the best test RMSE, 0.5 after 2 rounds." in page
    assert "Of the 2 runs that end within 1% of it, fedprox got that far with the fewest bytes" in page
    assert '<td class="best">0.5</td>' in page


@pytest.mark.parametrize(
    ("primary", "words", "shown"),
    [
        (Primary("auroc", share=True), "AUROC", "0.9123"),
        (Primary("balanced_accuracy", share=True), "balanced accuracy", "91.23%"),
        (Primary("perplexity", maximise=False), "perplexity", "0.9123"),
        (Primary("<b>own</b> $x"), "&lt;b&gt;own&lt;/b&gt; $x", "0.9123"),
    ],
)
def test_words_and_units_are_those_of_the_metric(make, tmp_path, primary, words, shown):
    page = text([make("a", rows(primary, 0.5, 0.9123))], tmp_path)
    assert f"fedavg reached a test {words} of {shown} in 2 rounds." in page
    assert "<b>own" not in page


def test_a_run_that_reached_its_target_or_stopped_early_is_not_unfinished(make, tmp_path):
    done = make("a", rows(RMSE, 3.0, 0.5), extra="target = 0.6", planned=9)
    early = make(
        "b", [row(n, RMSE, 1.0, validation_rmse=1.0) for n in range(1, 4)], extra="early_stopping = 2", planned=9
    )
    left = make("c", rows(RMSE, 3.0, 0.5), extra="target = 0.4\nearly_stopping = 2", planned=9)
    page = text([done, early], tmp_path)
    assert "unfinished" not in page
    assert "stopped early: the best RMSE of the validation records, 1, was in round 1." in page
    assert text([done, early, left], tmp_path).count("is unfinished") == 1


def test_the_curve_of_a_perplexity_that_falls_far_is_logarithmic():
    figure = curves({"a": Ledger(rows(Primary("perplexity", maximise=False), 5000.0, 40.0))}, ["rounds"])
    assert figure.axes[0].get_yscale() == "log"
    assert figure.axes[0].get_ylabel() == "test perplexity (less is better)"
    assert "no RMSE measured yet" in svg(curves({"a": Ledger([Row(round=1, cohort=[], primary=RMSE)])}, ["rounds"]))
