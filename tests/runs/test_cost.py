"""What a run will cost is what it then costs, byte for byte and pass for pass."""

import dataclasses

import pytest
import torch

import fedveil as fv
from fedveil.codecs.raw import Update
from fedveil.core import message, schema
from fedveil.core.forecast import Compute, Turn
from fedveil.core.message import Envelope
from fedveil.data import from_tensors
from fedveil.engines import LocalEngine
from fedveil.runs import recipe
from fedveil.runs.cost import cost
from toys import Twice, linear_task

DIGITS = [name for name in recipe.names() if name.startswith("digits/")]
QUICK = ["rounds=2", "evaluate_every=9", "method.local.epochs=1", "cohort.drop=0.0"]
ALL = "cohort.size=10"
DOWN = {
    "steps, all clients": ["rounds=4", ALL, "method.down.name=qsgd"],
    "steps, some clients": ["rounds=9", "cohort.size=2", "method.down.name=top-k", "method.down.share=0.1"],
    "steps, any number": ["rounds=6", "cohort.kind=poisson", "cohort.size=2", "method.down.name=half"],
    "steps larger than weights": ["rounds=3", ALL, "method.down.name=raw"],
    "from the start": ["method.down.name=fedsynth", "method.down.fits=2", "method.down.batches=1"],
    "full rounds": ["rounds=4", ALL, "method.up.name=qsgd", "method.down.name=qsgd", "method.full_rounds=2"],
    "uneven clients, some steps": ["split.kind=dirichlet", "split.alpha=0.3", "method.local.steps=3"],
}


@pytest.fixture(scope="module")
def digits() -> fv.Data:
    return fv.load("digits")


def spent(plan: fv.Recipe, task: fv.Task) -> fv.Ledger:
    engine = LocalEngine(workers=1)
    ledger = fv.run(
        task, plan.method, rounds=plan.rounds, cohort=plan.cohort, seed=plan.seed, engine=engine, evaluate_every=99
    ).ledger
    assert not any(row.missing for row in ledger.rows)
    return ledger


def agree(plan: fv.Recipe, digits: fv.Data) -> None:
    task = plan.on(digits)
    told, rows = cost(task, plan), spent(plan, task).rows
    for way in ("up", "down"):
        each = [size for row in rows for size in getattr(row, way).values()]
        found = told[way]
        assert (found["total"], found["least"], found["most"]) == (sum(each), min(each), max(each)), way
    assert told["passes"]["total"] == sum(row.passes for row in rows)
    largest = max(row.memory for row in rows)  # of a client with the most records that any may have
    assert largest >= sum(told["memory_estimate"].values()) > 0.9 * largest


@pytest.mark.parametrize("name", DIGITS)
def test_every_digits_recipe_costs_what_was_foretold(name: str, digits: fv.Data) -> None:
    fits = {
        "fedsynth": "method.up.fits=2",
        "tofu": "method.up.steps=2",
        "fedlap": "method.batches=2",
        "feddm": "method.draws=2",
    }
    method = recipe.read(name).method
    local = getattr(method, "local", None)
    quick = [change for change in QUICK if local or "local" not in change]
    quick += ["method.local.steps=4"] if local and local.steps else []
    quick += ["split.clients=40", "cohort.size=40"] if name == "digits/dp-fedavg-users" else []  # of 287
    agree(recipe.read(name, [*quick, *([fits[method.name]] if method.name in fits else [])]), digits)


@pytest.mark.parametrize("changes", DOWN.values(), ids=DOWN)
def test_every_way_down_costs_what_was_foretold(changes: list[str], digits: fv.Data) -> None:
    agree(recipe.read("digits/fedavg", [*QUICK, *changes]), digits)


def test_fedavg_costs_as_much_as_fedavg(digits: fv.Data) -> None:
    plan = recipe.read("digits/fedavg")
    told = cost(plan.on(digits), plan)
    assert told["up"]["ratio"] == told["down"]["ratio"] == 1
    assert told["up"]["total"] == told["up"]["fedavg"] == 20 * 5 * told["up"]["mean"]
    assert told["notes"] == []


@pytest.fixture(scope="module")
def blank_mnist() -> fv.Data:
    """As many records as 100 clients with 2 shards need, of MNIST's shape."""
    x, y = torch.zeros(400, 1, 28, 28), torch.arange(400) % 10
    return from_tensors(x, y, x[:10], y[:10], classes=10)


@pytest.mark.parametrize(
    ("name", "against", "least", "most"),
    [
        *((f"{codec}{split}", f"fedsynth{split or '-iid'}", 0.8, 1.0)
          for codec in ("fedavg-top-k", "fedavg-powersgd") for split in ("", "-shards")),
        ("fedavg-qsgd", "fedsynth-iid", 2.5, 3.0),  # 2 bits a weight are its least
        ("fedavg-qsgd-shards", "fedsynth-shards", 2.5, 3.0),
        ("fedavg-top-k-lenet5", "tofu", 0.8, 1.0),
        ("fedavg-powersgd-lenet5", "tofu", 0.8, 1.0),
        ("fedavg-qsgd-lenet5", "tofu", 0.3, 0.4),  # 8 bits a weight are its most
        ("fedsynth-iid-paper", "fedsynth-iid", 1.0, 1.0),
        ("fedsynth-shards-paper", "fedsynth-shards", 1.0, 1.0),
        ("fedsynth-both-paper", "fedsynth-both", 1.0, 1.0),
    ],
)  # fmt: skip
def test_plain_compression_sends_the_bytes_that_synthetic_points_take(
    name: str, against: str, least: float, most: float, blank_mnist: fv.Data
) -> None:
    plans = [recipe.read(f"mnist/{each}", ["rounds=1", "method.full_rounds=0"]) for each in (name, against)]
    plain, synthetic = (cost(plan.on(blank_mnist), plan)["up"]["mean"] for plan in plans)
    assert least <= plain / synthetic <= most


def test_catching_up_has_a_bound(digits: fv.Data) -> None:
    plan = recipe.read("digits/fedavg", ["cohort.size=1", "rounds=30", "method.down.name=qsgd", "cohort.drop=0.1"])
    task = plan.on(digits)
    dropping, away = cost(task, plan)["notes"]
    assert "for all of them answering" in dropping
    bound = int(away.rpartition(" ")[2].replace(",", "").rstrip("."))
    assert cost(task, plan)["down"]["most"] <= bound < 4 * task.layout.size + 200
    assert cost(task, recipe.read("digits/fedavg", ["cohort.size=1", "rounds=30"]))["notes"] == []


def test_a_method_of_ones_own_is_counted_by_its_questions() -> None:
    task, plan = linear_task(), fv.Recipe(rounds=3, cohort=fv.CohortSampler(size=4), method=Twice())
    told, ledger = cost(task, plan), spent(plan, task)
    assert told["up"]["total"] == sum(row.bytes_up for row in ledger.rows)
    assert told["down"]["total"] == sum(row.bytes_down for row in ledger.rows)


@pytest.mark.parametrize("inner", [fv.Qsgd(8), fv.FedSynthCodec(batches=1, batch=2, epochs=1, fits=3)])
def test_compressed_messages_are_bounded_from_above_and_closely(inner: fv.Codec) -> None:
    pytest.importorskip("zstandard")
    task = recipe.read("digits/fedavg").build()
    plan = fv.Recipe(
        rounds=2, cohort=fv.CohortSampler(size=10), method=fv.FedAvg(up=fv.Zstd(inner), down=fv.Zstd(inner))
    )
    told, ledger = cost(task, plan), spent(plan, task)
    plain = cost(task, dataclasses.replace(plan, method=fv.FedAvg(up=inner, down=inner)))
    for way in ("up", "down"):
        assert sum(getattr(row, f"bytes_{way}") for row in ledger.rows) <= told[way]["total"]
        assert plain[way]["total"] < told[way]["total"] < 1.2 * plain[way]["total"]
    assert "What is compressed has no fixed size; its bytes are the most that they can be." in told["notes"]
    assert not any("compressed" in note for note in plain["notes"])
    assert told["passes"] == plain["passes"]
    assert told["passes"]["total"] == sum(row.passes for row in ledger.rows)


def test_nobody_is_a_sentence() -> None:
    plan = fv.Recipe(rounds=1, seed=3, cohort=fv.CohortSampler(size=1, kind="poisson"))
    task = linear_task(40, 400)
    seed = next(s for s in range(50) if not plan.cohort.draw(task, fv.Seed.root(s).child("round", 1, "cohort")))
    with pytest.raises(ValueError, match=r"choose nobody in any round; raise cohort\.size"):
        cost(task, fv.Recipe(rounds=1, seed=seed, cohort=plan.cohort))


def test_a_cohort_too_small_for_a_secure_sum_is_a_sentence() -> None:
    task, secure = linear_task(), fv.FedAvg(secure=fv.SecureSum())
    with pytest.raises(
        ValueError, match="fedavg with these settings needs at least 3 clients per round, but a round has at most 2"
    ):
        cost(task, fv.Recipe(cohort=fv.CohortSampler(size=2), method=secure))
    few = fv.CohortSampler(size=1, kind="poisson")
    seed = next(s for s in range(50) if len(few.draw(task, fv.Seed.root(s).child("round", 1, "cohort"))) == 1)
    with pytest.raises(ValueError, match=r"too few clients for a secure sum in every round; raise cohort\.size"):
        cost(task, fv.Recipe(rounds=1, seed=seed, cohort=few, method=secure))


def test_the_memory_estimate_grows_with_what_is_held() -> None:
    assert fv.LocalTraining(optimizer="adam", batch=8).forecast_compute(100) == Compute(100, 5, 8)
    assert (
        fv.FedSynthCodec(batches=1, epochs=2).forecast_compute(0).held
        < fv.FedSynthCodec(batches=2, epochs=2).forecast_compute(0).held
    )
    both = fv.FedAvg(up=fv.TofuCodec(points=4, steps=10)).forecast_compute(Turn(0, 100, 1, 1, 0))
    assert (both.passes, both.held) == (140, 32)


def test_the_size_of_a_record_is_the_length_of_its_frame() -> None:
    for record in (Update(torch.ones(3), 300), Update(torch.ones(4), 1)):
        assert message.size(record) == len(message.frame(record, Envelope()))
    blank = schema.blank(Update, {"weights": 5})
    assert (blank.update.shape, blank.update.device.type, blank.records) == ((5,), "meta", 1)
