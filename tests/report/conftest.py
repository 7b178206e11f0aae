"""Run folders as a run leaves them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fedveil.core.ledger import Row
from fedveil.runs.folder import RunFolder


def one_round(number: int, accuracy: float | None, sent: int = 1000, **more: object) -> Row:
    """Round `number`, in which two clients sent `sent` bytes each and got 2,000 bytes each."""
    metrics = {} if accuracy is None else {"accuracy": accuracy, "loss": 1 - accuracy}
    fields = {"cohort": [0, 1], "up": {"0": sent, "1": sent}, "down": {"0": 2000, "1": 2000}, "seconds": 0.5, **more}
    return Row(round=number, metrics=metrics, **fields)


@pytest.fixture
def row() -> Callable[..., Row]:
    """row(number, accuracy, sent, other fields...) is a row of the ledger."""
    return one_round


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """make(name, accuracies or rows, method=..., sent=..., extra=...) writes a run's folder and returns it."""

    def make(
        name: str,
        rounds: Sequence[float | Row | None],
        *,
        method: str = "fedavg",
        sent: int = 1000,
        planned: int | None = None,
        extra: str = "",
        task: str = 'data = "digits"',
        tables: str = "",
    ) -> Path:
        folder = RunFolder(tmp_path / name)
        head = f"rounds = {len(rounds) if planned is None else planned}\n{extra}\n[task]\n{task}\n"
        recipe = f'{head}\n[method]\nname = "{method}"\n{tables}'
        folder.describe(recipe, {"fedveil": "0.1.0", "torch": "2.13.0", "gpu": None})
        ledger = folder.ledger(0)
        for number, what in enumerate(rounds, 1):
            ledger.append(what if isinstance(what, Row) else one_round(number, what, sent))
        folder.close()
        return folder.path

    return make
