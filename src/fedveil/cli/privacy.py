"""`fedveil privacy`: privacy accounting without a run."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from fedveil.cli import show
from fedveil.cli.options import Format, Shown, option
from fedveil.cli.shell import err

Accountant = StrEnum("Accountant", ["rdp", "pld"])


def privacy(
    delta: Annotated[float, option("--delta", "D", "δ, below 1 / records; default: 1e-5.")] = 1e-5,
    noise: Annotated[float | None, option("--noise", "Z", "Noise deviation / clipping norm.")] = None,
    sample_rate: Annotated[float | None, option("--sample-rate", "Q", "Probability of a record per step.")] = None,
    steps: Annotated[int | None, option("--steps", "T", "Total number of steps.")] = None,
    epsilon: Annotated[float | None, option("--epsilon", "E", "Maximum ε.")] = None,
    accountant: Annotated[Accountant, option("--accountant", "rdp|pld", "Fast (default), or tighter.")] = (
        Accountant.rdp
    ),
    format: Shown = Format.table,
) -> None:
    """Compute noise, sample rate, steps or ε from the others.

    Each step samples each record independently and adds Gaussian noise once to the sum of clipped gradients. Neighbours
    differ by one added or removed record, or by zeroing out one client's update. For replacement of an update, at
    sample rate 1, give half of the noise.

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
