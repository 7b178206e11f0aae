"""What the rows of a ledger say about how a run went."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile

from fedveil.core.ledger import Ledger, Row
from fedveil.core.metrics import ACCURACY, VALIDATION
from fedveil.core.task import Task


class NoUsableAnswers(RuntimeError):
    """Round after round without an answer that could be used: the run ends here."""

    @staticmethod
    def after(ledger: Ledger) -> NoUsableAnswers:
        rounds = sum(1 for _ in takewhile(unanswered, reversed(ledger.rows)))
        told = f"no client answered for {rounds} round{'s' if rounds > 1 else ''}"
        return NoUsableAnswers(f"{told}; the last reasons were: {grouped(ledger.rows[-1].missing.values())}")


def grouped(reasons: Iterable[str]) -> str:
    """Reasons in one sentence; of those that differ in their numbers only, the first and how many there are."""
    alike: dict[str, list[str]] = {}
    for reason in reasons:
        alike.setdefault(re.sub(r"-?\d[\d.e+-]*", "#", reason), []).append(reason)
    return ", ".join(same[0] if len(same) == 1 else f"{len(same)} × {same[0]}" for same in alike.values())


def learned_nothing(ledger: Ledger) -> bool:
    """Whether there were rounds and no answer could be used in any of them."""
    return bool(ledger.rows) and all(unanswered(row) or _skipped(row) for row in ledger.rows)


NOTHING = "nothing was learned"
STAYED = "the weights stay as they were"  # the last words of the event of a round without a result


def nothing_learned(ledger: Ledger) -> str:
    """The sentence about such a run."""
    rounds, last = len(ledger.rows), ledger.rows[-1]
    why = grouped(last.missing.values()) or "; ".join(last.events)
    return f"{NOTHING}: no answer could be used in {rounds} round{'s' if rounds > 1 else ''}; the last reasons: {why}"


def unanswered(row: Row) -> bool:
    return bool(row.cohort) and all(str(client) in row.missing for client in row.cohort)


def _skipped(row: Row) -> bool:
    """Whether a round had nobody to ask, or ended without a result."""
    return not row.cohort or any(event.endswith(STAYED) for event in row.events)


def behind_clients(row: Row) -> bool:
    """Whether most clients are ahead of a server that had to go back to an older checkpoint."""
    ahead = ("refused: wrong round", "refused: wrong stage")
    return 2 * sum(why.startswith(ahead) for why in row.missing.values()) > len(row.cohort)


def reached(row: Row, target: float | None) -> bool:
    """Whether the primary metric on the test records has reached `target`."""
    primary = row.primary or ACCURACY
    value = row.metrics.get(primary.name)
    return target is not None and value is not None and primary.reached(value, target)


def best_row(ledger: Ledger) -> Row | None:
    """The first row with the best primary metric on the validation records; None where none was measured."""
    primary, best = ledger.primary, None
    name = VALIDATION + primary.name
    for row in ledger.rows:
        if name in row.metrics and (best is None or primary.better(row.metrics[name], best.metrics[name])):
            best = row
    return best


def stalled(ledger: Ledger, evaluations: int | None) -> bool:
    """Whether the primary metric on the validation records has not improved in so many evaluations."""
    best, name = best_row(ledger), VALIDATION + ledger.primary.name
    if evaluations is None or best is None:
        return False
    later = [row for row in ledger.rows if row.round > best.round]
    tried = [name in row.metrics or any(event.startswith(f"{name} is ") for event in row.events) for row in later]
    return sum(tried) >= evaluations


def finished(ledger: Ledger, rounds: int, target: float | None, early_stopping: int | None) -> str | None:
    """Why no round is left to do; None if some are."""
    if any(reached(row, target) for row in ledger.rows[-1:]):
        return "target"
    if stalled(ledger, early_stopping):
        return "early"
    return "rounds" if len(ledger.rows) >= rounds else None


def validate_goals(task: Task, target: float | None, early_stopping: int | None) -> None:
    """Raise a ValueError if a run of `task` cannot end at `target` or by early stopping."""
    if target is not None and not task.metrics:
        raise ValueError(
            f"target is {target:g}, but the model's outputs are not class scores, so there is no accuracy; leave it "
            "out, or give the task metrics"
        )
    if target is not None:
        task.primary.validate_target(target)
    if early_stopping is not None and early_stopping < 1:
        raise ValueError(f"early_stopping is {early_stopping}; use 1 evaluation or more")
    if early_stopping is not None and task.validation is None:
        raise ValueError(
            f"early_stopping is {early_stopping}, but there are no validation records; hold some out with "
            "task.validation or fedveil.data.hold_out"
        )
