"""Noise that is found from a budget, and the tighter ε that is shown beside the one that is charged."""

import dataclasses
import math
import re
from pathlib import Path

import pytest

import fedveil as fv
from fedveil.cli.jobs import Job
from fedveil.privacy.account import Account, Tally
from fedveil.privacy.accountant import Noised, Skellam, epsilon
from fedveil.report.folder import read
from fedveil.runs import recipe
from fedveil.runs.checkpoint import RunError
from fedveil.runs.cost import cost
from shell import fv as shell
from shell import good
from toys import linear_task

LOCAL = fv.LocalTraining(lr=0.1, steps=3, batch=6)  # of 6 records: each is in every batch
ALL = fv.CohortSampler(size=4)
POISSON = fv.CohortSampler(size=2, kind="poisson")
RECORDS = fv.FedAvg(LOCAL, privacy=fv.DpSgd(noise="auto", delta=1e-3, budget=2.0))
USERS = fv.FedAvg(LOCAL, user_privacy=fv.UserLevel(noise="auto", delta=1e-3, budget=2.0))


def users(secure: fv.SecureSum | None = None, **changes) -> fv.FedAvg:
    return dataclasses.replace(USERS, user_privacy=dataclasses.replace(USERS.user_privacy, **changes), secure=secure)


def records(**changes) -> fv.FedAvg:
    return dataclasses.replace(RECORDS, privacy=dataclasses.replace(RECORDS.privacy, **changes))


# ---------------------------------------------------------------------------------------------------- noise


@pytest.mark.parametrize(
    ("method", "cohort"),
    [
        (RECORDS, ALL),
        (records(accountant="pld"), ALL),
        (records(mechanism="skellam"), ALL),
        (dataclasses.replace(RECORDS, local=fv.LocalTraining(lr=0.1, steps=3, batch=2)), ALL),
        (USERS, ALL),
        (users(where="client", relation="zero-out"), ALL),
        (users(relation="zero-out"), POISSON),
        (users(fv.SecureSum(bits=24)), ALL),
    ],
    ids=["records", "pld", "skellam", "sampled", "replacement", "client", "poisson", "secure"],
)
def test_the_noise_that_is_found_is_the_least_for_all_rounds(method, cohort):
    task, rounds = linear_task(), 5
    found = fv.settle(task, method, cohort, rounds)
    account = found.account(task, cohort)
    assert 0.99 * 2 < account.spent(rounds) <= 2
    less = {account.promise.key: dataclasses.replace(account.promise, noise=account.promise.sigma * 0.99)}
    assert dataclasses.replace(found, **less).account(task, cohort).exceeded(rounds)
    assert fv.settle(task, found, cohort, rounds) is found


@pytest.mark.parametrize(("relation", "budget"), [("zero-out", 6.24), ("replacement", 15.46)])
def test_golden_values_of_the_noise(relation, budget):
    """Noise 2 costs so much in 10 rounds."""
    found = fv.settle(linear_task(), users(relation=relation, budget=budget + 0.005), ALL, 10)
    assert found.user_privacy.noise == pytest.approx(2, rel=3e-3)


def test_the_noise_is_for_the_client_that_is_asked_most_often():
    task, rounds = linear_task(), 6
    some = fv.settle(task, RECORDS, 2, rounds, seed=7)
    assert some.privacy.noise < fv.settle(task, RECORDS, ALL, rounds, seed=7).privacy.noise
    result = fv.run(task, RECORDS, rounds=rounds, cohort=2, seed=7)
    assert (result.stopped, len(result.ledger.rows)) == ("rounds", rounds)
    assert 0.99 * 2 < result.summary()["epsilon"] <= 2
    assert result.summary()["noise"] == result.ledger.rows[0].noise == some.privacy.noise


def test_a_run_that_is_resumed_has_the_same_noise(tmp_path):
    whole = fv.run(linear_task(), RECORDS, rounds=3, cohort=4, folder=tmp_path / "a", insecure_test_noise=1)
    options = {"rounds": 3, "cohort": 4, "folder": tmp_path / "b", "insecure_test_noise": 1}
    fv.run(linear_task(), RECORDS, **options, stop=lambda: True)
    again = fv.run(linear_task(), RECORDS, **options)
    assert again.weights.equal(whole.weights)
    assert [row.noise for row in again.ledger.rows] == [row.noise for row in whole.ledger.rows]
    with pytest.raises(RunError, match="holds a run of another method"):
        fv.run(linear_task(), RECORDS, **options | {"rounds": 4})


def test_noise_that_cannot_be_found_is_said():
    with pytest.raises(ValueError, match=r"privacy.noise is auto, which is the least .*; set privacy.budget"):
        fv.DpSgd(noise="auto")
    with pytest.raises(ValueError, match=r"privacy.noise is auto, .* must be a number: fedveil cost says which"):
        RECORDS.account(linear_task(), ALL)
    with pytest.raises(ValueError, match=r"'method.privacy.noise' is 'much'; it must be a number or .auto."):
        recipe.read("digits/dp-fedavg", ["method.privacy.noise=much"])
    with pytest.raises(ValueError, match=r"user_privacy.noise and user_privacy.clip are above 0"):
        fv.UserLevel(noise="much")


@pytest.mark.parametrize("method", [records(noise=1.0, budget=1.0), users(noise=1.0, budget=1.0)])
def test_a_budget_below_one_answer_names_the_noise_that_would_do(method):
    task = linear_task()
    with pytest.raises(ValueError, match=r'budget is 1, but one answer already costs .*; raise it, .*"auto"') as caught:
        fv.run(task, method, rounds=3, cohort=4)
    key, number = re.search(r"set (\w+)\.noise to ([\d.]+)", str(caught.value)).groups()
    named = {key: dataclasses.replace(getattr(method, key), noise=float(number))}
    account = dataclasses.replace(method, **named).account(task, ALL)
    assert 0.99 < account.spent(1) <= 1


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_recipe_with_noise_to_be_found_keeps_the_number(here):
    """digits/dp-fedavg with a budget: every round is done, and ends just below it."""
    changes = ["noise=auto", "budget=3"], ["method.local.steps=3", "evaluate_every=9"]
    chosen = [word for each in (*(f"method.privacy.{c}" for c in changes[0]), *changes[1]) for word in ("--set", each)]
    told = good("cost", "digits/dp-fedavg", *chosen, "--format", "json")
    figures = good("run", "digits/dp-fedavg", *chosen, "--out", "c/digits-dp-fedavg", "--format", "json")
    assert (figures["stopped"], figures["rounds"]) == ("rounds", 3)
    assert 0.99 * 3 < figures["epsilon"] <= 3
    assert figures["epsilon_pld"] < figures["epsilon"]
    assert {key: told[key] for key in ("epsilon", "epsilon_pld", "noise")} == {
        key: figures[key] for key in ("epsilon", "epsilon_pld", "noise")
    }
    assert any(f'Noise "auto" is {told["noise"]:g}, the least' in note for note in told["notes"])
    folder = Path("c/digits-dp-fedavg")
    held = Job.held(folder)
    assert held.recipe.method.privacy.noise == pytest.approx(figures["noise"])
    assert held.summary()["epsilon_pld"] == pytest.approx(figures["epsilon_pld"], rel=1e-5)
    compared = ["compare", "digits/dp-fedavg", "--out", "c", *chosen]
    assert "is finished already and used as it is" in shell(*compared).stderr
    assert "another recipe" in shell(*compared, "--set", "method.privacy.budget=4").stderr
    assert good("resume", folder, "--format", "json")["noise"] == figures["noise"]


# ---------------------------------------------------------------------------------------------------- words


def test_what_is_said_of_several_records_of_one_person():
    """kε, and δ of the chain of k neighbours: δ + e^ε (δ + e^ε (…))."""
    lines = (Path(__file__).parents[2] / "docs/how-to/privacy-budget.md").read_text().splitlines()
    head = next(k for k, line in enumerate(lines) if line.startswith("| ε of one record |"))
    assert len(lines[head + 2 : head + 6]) == 4
    for line in lines[head + 2 : head + 6]:
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for k, cell in zip((2, 5, 10), cells, strict=True):
            delta = 0.0
            for _ in range(k):
                delta = 1e-5 + math.exp(float(first)) * delta
            assert delta <= k * math.exp((k - 1) * float(first)) * 1e-5
            assert cell == "vacuous" if delta >= 1 else cell.startswith(f"ε {k * float(first):g}, δ ")
            assert delta >= 1 or float(cell.split()[-1]) == pytest.approx(delta, rel=0.03)


# ---------------------------------------------------------------------------------------------------- PLD


def test_golden_values_beside_each_other():
    """FedLAP's 15 rounds."""
    tally = Tally(Account(Noised(1, 0.0256, 200), fv.DpSgd(delta=1e-5)))
    for _ in range(15):
        charged = tally.ask([0, 1])
    assert charged == pytest.approx(10.18, abs=0.005)
    assert tally.tightened(charged) == pytest.approx(9.38, abs=0.005)
    assert tally.tightened(charged * 1.01) is None, "of another ε than was charged nothing is known"


def test_who_was_asked_less_often_does_not_count():
    price = Noised(2.0, 0.5, 3)
    tally = Tally(Account(price, fv.DpSgd(delta=1e-3)))
    charged = [tally.ask(cohort) for cohort in ([0, 1], [2], [0])][-1]
    assert tally.tightened(charged) == epsilon([dataclasses.replace(price, steps=6)], 1e-3, "pld") < charged
    everyone = Tally(Account(price, fv.DpSgd(delta=1e-3), everyone=True))
    charged = [everyone.ask(cohort) for cohort in ([0, 1], [], [0])][-1]
    assert everyone.tightened(charged) == epsilon([dataclasses.replace(price, steps=9)], 1e-3, "pld") < charged


def test_where_there_is_nothing_tighter():
    assert Tally(Account(Noised(1, 1, 1), fv.DpSgd())).tightened(0.0) is None
    integers = Tally(Account(Skellam(100.0, 5.0, 5.0, 1), fv.DpSgd(delta=1e-3)))
    assert integers.tightened(integers.ask([0])) is None
    lost = Tally(Account(Noised(0.1, 1, 1), fv.DpSgd(delta=1e-3)))
    assert lost.tightened(lost.ask([0])) is None
    already = Tally(Account(Noised(1, 1, 1), fv.DpSgd(delta=1e-3, accountant="pld")))
    assert already.tightened(already.ask([0])) is None


def test_the_tighter_one_is_in_every_summary_and_changes_nothing_that_is_charged(tmp_path):
    method = records(noise=2.0, budget=None)
    task, expected = linear_task(), [epsilon([Noised(2.0, 1.0, 6)], 1e-3, by) for by in ("rdp", "pld")]
    result = fv.run(task, method, rounds=2, cohort=4, folder=tmp_path / "a")
    plan = fv.Recipe(method=method, rounds=2, cohort=ALL)
    (tmp_path / "a" / "recipe.toml").write_text(plan.toml())
    (run,) = read([tmp_path / "a"])
    for figures in (result.summary(), run.summary, cost(task, plan)):
        assert [figures["epsilon"], figures["epsilon_pld"]] == expected
    assert re.search(rf"^epsilon pld +{expected[1]:.6g}$", result.table(), re.M)
    assert (
        fv.run(task, records(noise=2.0, mechanism="skellam", budget=None), rounds=1, cohort=4).summary()["epsilon_pld"]
        is None
    )


def test_the_report_and_the_command_name_both(tmp_path):
    from fedveil.report.words import private, verdict

    method = records(noise=2.0, budget=None)
    fv.run(linear_task(), method, rounds=1, cohort=4, folder=tmp_path / "a")
    (tmp_path / "a" / "recipe.toml").write_text(fv.Recipe(method=method, rounds=1).toml())
    (run,) = read([tmp_path / "a"])
    charged, tight = (f"{run.summary[key]:.4g}" for key in ("epsilon", "epsilon_pld"))
    assert f"ε = {charged} at δ = 0.001 for each record" in private(run)
    assert f"; by the tighter PLD accountant it is {tight}." in private(run)
    assert f"charged ε = {charged} (by PLD {tight})" in verdict([run])
    (tmp_path / "a" / "asked.jsonl").write_text("damaged\n")
    (run,) = read([tmp_path / "a"])
    assert run.summary["epsilon_pld"] is None
    assert "PLD" not in private(run) + verdict([run])
    shown = good("privacy", "--noise", 1, "--sample-rate", 0.0256, "--steps", 3000, "--format", "json")
    assert (shown["epsilon"], shown["epsilon_pld"]) == (pytest.approx(10.18, abs=0.005), pytest.approx(9.38, abs=0.005))
    by_pld = good("privacy", "--noise", 1, "--sample-rate", 0.0256, "--steps", 3000, "--accountant", "pld")
    assert "epsilon pld" not in by_pld
