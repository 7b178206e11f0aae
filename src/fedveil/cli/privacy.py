"""`fedveil privacy`: what noise is worth."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from fedveil.cli import show
from fedveil.cli.options import Format, Shown, option
from fedveil.cli.shell import err

Accountant = StrEnum("Accountant", ["rdp", "pld"])


def privacy(
    delta: Annotated[float, option("--delta", "D", "δ, below 1 / the number of records; by default 1e-5.")] = 1e-5,
    noise: Annotated[float | None, option("--noise", "Z", "Deviation of the noise / clipping norm.")] = None,
    sample_rate: Annotated[float | None, option("--sample-rate", "Q", "Probability of a record, each step.")] = None,
    steps: Annotated[int | None, option("--steps", "T", "Steps in all.")] = None,
    epsilon: Annotated[float | None, option("--epsilon", "E", "ε not to exceed.")] = None,
    accountant: Annotated[Accountant, option("--accountant", "rdp|pld", "Quick, the default, or tighter.")] = (
        Accountant.rdp
    ),
    format: Shown = Format.table,
) -> None:
    """Of noise, sample rate, steps and ε give three, get the fourth.

    For steps that sample each record by itself and add Gaussian noise once to a sum of clipped gradients. Neighbours
    differ in one record that is there or not; of updates, where one client's is zero. If one may be replaced by any
    other, and the sample rate is 1, half of the noise counts.

    Example: fedveil privacy --noise 1 --sample-rate 0.0256 --steps 200
    """
    from fedveil.privacy.account import ADD_REMOVE
    from fedveil.privacy.accountant import TIGHTENED, solve
    from fedveil.privacy.accountant import epsilon as spent

    with err.status("", spinner="dots") as line:
        found, reached = solve(delta, noise, sample_rate, steps, epsilon, accountant, line.update)
        tight = spent([found], delta, "pld") if accountant is Accountant.rdp and reached <= TIGHTENED else None
    figures = {
        "epsilon": reached,
        "epsilon_pld": tight,
        "delta": delta,
        "relation": ADD_REMOVE,
        "noise": found.noise,
        "sample_rate": found.sample_rate,
        "steps": found.steps,
        "accountant": str(accountant),
        "kind": "proved, if records are sampled so and noise is private",
    }
    show.summary(figures, format)
