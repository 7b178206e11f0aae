"""Rounds on Flower's simulation against the local engine: the same task, the same method, the same clients."""

from __future__ import annotations

import statistics
import time
from itertools import chain

import torch

import fedveil as fv
from fedveil.core.cohort import Engine
from fedveil.engines import LocalEngine
from fedveil.runs import recipe

TURNS, ROUNDS = 4, 5  # of the rounds of a turn the first warms up and the last is evaluated


def ten() -> dict[str, float]:
    """FedAvg on digits, 10 of 10 clients a round: Flower's simulation against the local engine."""
    return _race(10)


def hundred() -> dict[str, float]:
    """FedAvg on digits, 100 of 100 clients a round: Flower's simulation against the local engine."""
    return _race(100)


def _race(clients: int) -> dict[str, float]:
    from fedveil.engines.flower import FromRecipe, client_app, simulate  # the others need no extra

    torch.set_num_threads(1)
    plan = recipe.read("digits/fedavg", [f"split.clients={clients}", f"cohort.size={clients}", "method.local.epochs=1"])
    task, began = plan.build(), time.perf_counter()

    def turn(engine: Engine) -> list[float]:
        """Seconds of each round."""
        result = fv.run(
            task, plan.method, rounds=ROUNDS, cohort=plan.cohort, seed=plan.seed, engine=engine, evaluate_every=ROUNDS
        )
        return [row.seconds for row in result.ledger.rows[1:-1]]

    with simulate(client_app(FromRecipe(plan.toml())), clients) as flower:
        turn(flower)
        start = time.perf_counter() - began
        turns = [(turn(flower), turn(LocalEngine()), turn(LocalEngine(stack=1, workers=1))) for _ in range(TURNS)]
    on_flower, stacked, single = (statistics.median(chain(*side)) for side in zip(*turns, strict=True))
    return {
        "until Flower has done five rounds, seconds": start,
        "rounds per second, Flower": 1 / on_flower,
        "rounds per second, local": 1 / stacked,
        "rounds per second, local, one by one": 1 / single,
        "Flower / local": on_flower / stacked,
        "Flower / local, one by one": on_flower / single,
    }
