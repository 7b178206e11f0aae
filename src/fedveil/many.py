"""`fv.run_many`: the same runs with several seeds, and what their differences say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedveil.core.cohort import Engine
from fedveil.core.ledger import Result
from fedveil.facade import run
from fedveil.runs.recipe import Recipe
from fedveil.runs.repeats import parse_held, parse_seeds, with_seed
from fedveil.runs.statistics import Difference, Repeats, Spread, note, table

Train = Callable[[int, Path | None], Result]


@dataclass(frozen=True)
class Runs:
    """Results by name and seed."""

    results: Mapping[str, Mapping[int, Result]]

    @property
    def repeats(self) -> dict[str, Repeats]:
        """The ledgers of each name."""
        return {
            name: Repeats(name, {seed: result.ledger for seed, result in by_seed.items()})
            for name, by_seed in self.results.items()
            if by_seed
        }

    def spread(self, name: str) -> Spread | None:
        """Mean and standard deviation of the primary metric over the seeds."""
        return self.repeats[name].spread()

    def difference(self, name: str, base: str | None = None) -> Difference | None:
        """The paired difference of the primary metric to `base`, by default the first name, with its 95% interval.

        None if the two share fewer than two seeds, or have different primary metrics.
        """
        found = self.repeats
        return found[name].difference(found[next(iter(found)) if base is None else base])

    def table(self) -> str:
        """Means, standard deviations and paired differences as text."""
        found = list(self.repeats.values())
        if not found:
            return "no run is done"
        rows = [[cell.replace("\n", " ") for cell in row] for row in table(found)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, "", note(found)])


def run_many(
    runs: Recipe | Train | Mapping[str, Recipe | Train],
    seeds: int | str | Sequence[int] = 5,
    *,
    folder: Path | str | None = None,
    hold: Sequence[str] = (),
    data_dir: Path | str | None = None,
    device: str = "auto",
    engine: Callable[[], Engine] | None = None,
    progress: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Runs:
    """Run recipes or functions once per seed, one run after the other.

    runs:   a recipe, or a function (seed, folder) -> `Result` that calls `fv.run`, or several of them by name. All
            names get the same seeds, so that their results can be compared in pairs
    seeds:  5 is 0 to 4; also "0-4", "0,2,5-7" or a sequence
    folder: where runs are kept: folder/seed-N, or with names folder/NAME/seed-N. A finished run is used as it is, and a
            run that was stopped goes on. A function gets the path of its run and hands it to `fv.run`
    hold:   what all seeds of a recipe share, decided by the first: of "split", "weights" and "cohorts"
    engine: makes the engine of a recipe's run; default: `LocalEngine`
    stop:   asked after each round of a recipe, and before each run; True ends the queue
    """
    named: Mapping[str, Recipe | Train] = runs if isinstance(runs, Mapping) else {"": runs}
    chosen = parse_seeds(str(seeds)) if isinstance(seeds, (int, str)) else tuple(seeds)
    if not chosen or not named:
        raise ValueError("run_many has no seeds or no runs; give at least one of each")
    held = parse_held(",".join(hold) or None, fixed_noise=False)
    if held and any(not isinstance(each, Recipe) for each in named.values()):
        raise ValueError(
            f"hold is {', '.join(held)}, which is for recipes; a function decides itself what a seed is for"
        )
    found: dict[str, dict[int, Result]] = {name: {} for name in named}
    for name, each in named.items():
        for seed in chosen:
            if stop():
                return Runs(found)
            path = None if folder is None else Path(folder, name, f"seed-{seed}")
            if not isinstance(each, Recipe):
                found[name][seed] = each(seed, path)
                continue
            plan = with_seed(each, seed, held, chosen[0])
            found[name][seed] = run(
                plan.build(data_dir, device=device),
                plan.method,
                rounds=plan.rounds,
                cohort=plan.cohort,
                seed=seed,
                engine=engine() if engine else None,
                evaluate_every=plan.evaluate_every,
                target=plan.target,
                early_stopping=plan.early_stopping,
                folder=path,
                progress=progress,
                stop=stop,
            )
    return Runs(found)
