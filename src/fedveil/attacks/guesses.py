"""Guesses about which canaries are in, made from what is overheard of them, and the ε that right ones rule out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedveil.attacks import tradeoff
from fedveil.attacks.roc import clopper_pearson, one_run
from fedveil.privacy.accountant import Noised

SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 1.0)  # of the canaries that are guessed to be in, or out


class Bound(NamedTuple):
    """An ε that guesses rule out, how many guesses there were, and how many were right."""

    epsilon: float
    guesses: int
    right: int


def bound(steps: np.ndarray, included: np.ndarray, delta: float) -> Bound:
    """The ε that guesses rule out by (ε, δ) alone (Steinke, Nasr and Jagielski 2023)."""
    guesses, right = guessing(steps, included)
    way = int(np.argmax(clopper_pearson(right[:, 0], guesses[:, 0])[0]))
    many, hits = int(guesses[way, 1]), int(right[way, 1])
    return Bound(one_run(len(included[1::2]), many, hits, delta), many, hits)


def curve_bound(steps: np.ndarray, included: np.ndarray, delta: float, charged: Noised) -> Bound:
    """The ε that guesses rule out by the trade-off curve of steps like those that are charged, with noise of any size
    (Mahloujifar, Melis and Chaudhuri 2024)."""
    guesses, right = guessing(steps, included)
    way, most = 0, 0.0
    for each in range(len(guesses)):
        mu = tradeoff.strength(len(included[0::2]), int(guesses[each, 0]), int(right[each, 0]), most)
        way, most = (each, mu) if mu > most else (way, most)
    many, hits = int(guesses[way, 1]), int(right[way, 1])
    return Bound(tradeoff.one_run(len(included[1::2]), many, hits, charged, delta), many, hits)


def guessing(steps: np.ndarray, included: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many guesses each way to guess makes, and how many are right: [ways, 2], a column for the canaries on which a
    way is chosen, and one for those on which it is measured.

    A canary's score is what is overheard of it [S, m], summed over the steps, or how much that changes from one step to
    the next, as it is drawn or not. The highest scores are guessed to be in and the lowest to be out.
    """
    jumps = np.square(np.diff(steps, axis=0)).clip(max=1)  # of 1 where a canary is drawn, of less where records are
    scores, half = (steps.sum(0), jumps.sum(0)), len(included) // 4
    sizes = sorted({max(1, round(half * share)) for share in SHARES})

    def guessed(by: np.ndarray, ins: int, outs: int, side: int) -> tuple[int, int]:
        known = included[side::2][by[side::2].argsort()]
        return ins + outs, int(known[len(known) - ins :].sum()) + int((~known[:outs]).sum())

    sides = [(ins, outs) for size in sizes for ins, outs in ((size, size), (size, 0), (0, size))]
    found = np.array([[guessed(by, *side, half) for half in (0, 1)] for by in scores for side in sides])
    return found[..., 0], found[..., 1]
