"""Audits as `fedveil audit` leaves them."""

from pathlib import Path

import msgspec

from fedveil.attacks.audit import Audit
from fedveil.attacks.mechanism import Mechanism
from fedveil.attacks.roc import Figures, Rate


def audited(folder: Path, epsilon: float | None = 5.75, broken: tuple[str, ...] = (), **mechanism: float) -> Path:
    """Put an audit into a run's folder."""
    rates = [Rate(0.001, 0.0, 0.0, 0.01, False), Rate(0.01, 0.0125, 0.0, 0.03, True)]
    weak = Figures(0.516, 0.474, 0.558, rates, 0.492, 0.5, [0.0, 0.1, 1.0], [0.0, 0.12, 1.0])
    control = Figures(0.966, 0.925, 1.0, rates, 0.938, 6.0, [0.0, 0.0, 1.0], [0.0, 0.9, 1.0])
    told = {"canaries": 400, "answers": 1, "steps": 40, "delta": 1e-6, "epsilon": 4.75, "lower": 1.125, "guesses": 50}
    told |= {"right": 40, "noise": 2.0, "found": 1.9, "most": 2.1, "reused": False, "control": 6.5} | mechanism
    found = Audit(
        3, 360, 1e-3, epsilon, {"loss": weak}, control, weak, Mechanism(**told) if mechanism else None, [*broken]
    )
    (folder / "audit.json").write_bytes(msgspec.json.encode(found))
    return folder
