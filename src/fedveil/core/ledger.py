"""What a run cost and what came of it: a row a round, written as it happens."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace
from rich.filesize import decimal
from torch import Tensor

from fedveil.core.account import Tally
from fedveil.core.export import GRAPHS, STATES, state_dict, write
from fedveil.core.metrics import ACCURACY, LOSS, Primary
from fedveil.core.notebook import curve, page
from fedveil.core.task import Task

RIGHT = "right.json"


class Stage(msgspec.Struct, frozen=True):
    """One stage of a secure sum: its name, how many clients were asked and answered, and its bytes."""

    stage: str
    asked: int
    answered: int
    up: int
    down: int


class Right(msgspec.Struct, frozen=True):
    """Which test records the weights after a round classify correctly, as written to right.json."""

    round: int
    records: int
    bits: str  # hexadecimal, the first record in the highest bit

    @staticmethod
    def of(round_: int, right: Tensor) -> Right:
        """From bool [records]."""
        return Right(round_, len(right), np.packbits(right.cpu().numpy()).tobytes().hex())

    def unpacked(self) -> npt.NDArray[np.bool_]:
        """As bool [records]."""
        bits = np.frombuffer(bytes.fromhex(self.bits), np.uint8)
        if len(bits) != -(-self.records // 8):
            raise ValueError(f"{len(bits)} bytes for {self.records} records")
        return np.unpackbits(bits, count=self.records).astype(np.bool_)


class Row(msgspec.Struct, kw_only=True):
    """One round. Bytes are of encoded frames, counted as they were handed to the engine or came from it."""

    round: int
    cohort: list[int]  # the clients drawn
    up: dict[str, int] = {}  # bytes by client
    down: dict[str, int] = {}
    wire_up: int = 0  # bytes of the engine's own messages around those frames; 0 where nothing is sent
    wire_down: int = 0
    secure: list[Stage] = []  # of a secure sum; its bytes are in `up` and `down` too
    missing: dict[str, str] = {}  # client -> why there was no answer to use
    events: list[str] = []  # what else happened: strangers, duplicates, a quorum not reached
    metrics: dict[str, float] = {}  # accuracy, loss and what the method noted
    passes: int = 0  # records run forward and backward by the clients, in simulation
    memory: int = 0  # bytes that the largest client needs for weights and activations, as forecast; 0: not known
    epsilon: float | None = None
    noise: float | None = None  # σ, of which this ε is
    relation: str | None = None  # the neighbours for which this ε holds
    colluders: int | None = None  # clients without whose noise it holds, where clients share the noise of a sum
    batch_norm: str | None = None  # what happens to batch norm layers, where the model has some that are trained
    seconds: float = 0.0  # of the clock since the row before: training, evaluation, and waiting for the disk
    evaluating: float = 0.0  # of these, what evaluation took
    saving: float = 0.0  # what it took to write the checkpoint of the round before, beside this round's training
    simulated: float | msgspec.UnsetType = msgspec.UNSET  # seconds of the simulated clock; absent without latencies
    primary: Primary | msgspec.UnsetType = msgspec.UNSET  # of `metrics`; absent where it is accuracy, or the loss alone

    def count_up(self, client: int, size: int) -> None:
        self.up[str(client)] = self.up.get(str(client), 0) + size

    def count_down(self, client: int, size: int) -> None:
        self.down[str(client)] = self.down.get(str(client), 0) + size

    def untimed(self) -> Row:
        """The row without its seconds, which differ between runs that are otherwise equal."""
        return replace(self, seconds=0.0, evaluating=0.0, saving=0.0)

    @property
    def bytes_up(self) -> int:
        return sum(self.up.values())

    @property
    def bytes_down(self) -> int:
        return sum(self.down.values())

    @property
    def protocol(self) -> list[Stage]:
        """The stages that a secure sum adds: all but the one in which the vectors themselves travel."""
        return [each for each in self.secure if each.stage != "masked"]


@dataclass
class Ledger:
    """The rows of a run; with a file, each is appended to it as one JSON line.

    tally: what was charged, where it is known; from it the summary has a tighter ε beside the one that is charged
    right: which test records the final weights classify correctly, where accuracy is the primary metric
    """

    rows: list[Row] = field(default_factory=list)
    file: io.BufferedWriter | None = None
    tally: Tally | None = field(default=None, compare=False, repr=False)
    right: Right | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        return f"Ledger({self.told()})"

    def told(self) -> str:
        """Rounds, metric and bytes in a few words."""
        sent = decimal(sum(row.bytes_up for row in self.rows))
        return ", ".join(filter(None, (f"{len(self.rows)} rounds", headline(self.rows), f"{sent} up")))

    def append(self, row: Row) -> None:
        """Enter a round. Its ε is never below that of the round before: nothing takes back what was released."""
        if self.rows and (before := self.rows[-1].epsilon) is not None:
            row.epsilon = max(before, row.epsilon or 0.0)
        self.rows.append(row)
        if self.file:
            self.file.write(msgspec.json.encode(row) + b"\n")
            self.file.flush()

    @staticmethod
    def read(path: Path) -> Ledger:
        """The rows of a `ledger.jsonl`, and the right.json beside it; a last line cut off by a kill is left out."""
        rows = []
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                try:
                    rows.append(msgspec.json.decode(line, type=Row))
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise ValueError(f"{path} line {len(rows) + 1} is not a ledger row: {error}") from None
        return Ledger(rows, right=read_right(path.parent, rows))

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Rounds and values of one metric, where it was measured."""
        seen = [(row.round, row.metrics[name]) for row in self.rows if name in row.metrics]
        return [r for r, _ in seen], [v for _, v in seen]

    @property
    def primary(self) -> Primary:
        """The primary metric: what the newest row that has one says, accuracy where it was measured, or the loss."""
        return primary(self.rows)

    def summary(self, method: str) -> dict[str, Any]:
        """The figures of `--format json`."""
        primary = self.primary
        _, value = self.series(primary.name)
        _, accuracy = self.series("accuracy")
        _, loss = self.series("loss")
        charged = next((row for row in reversed(self.rows) if row.epsilon is not None), None)
        up, asked = sum(row.bytes_up for row in self.rows), sum(len(row.up) for row in self.rows)
        return {
            "method": method,
            "rounds": len(self.rows),
            "metric": primary.name,
            "value": value[-1] if value else None,
            "accuracy": accuracy[-1] if accuracy else None,
            "accuracy_last3": sum(accuracy[-3:]) / len(accuracy[-3:]) if accuracy else None,
            "loss": loss[-1] if loss else None,
            "bytes_up": up,
            "bytes_down": sum(row.bytes_down for row in self.rows),
            "protocol_up": sum(each.up for row in self.rows for each in row.protocol),
            "protocol_down": sum(each.down for row in self.rows for each in row.protocol),
            "wire_up": sum(row.wire_up for row in self.rows) or None,
            "wire_down": sum(row.wire_down for row in self.rows) or None,
            "bytes_up_per_client_round": up / asked if asked else 0.0,
            "clients_failed": sum(len(row.missing) for row in self.rows),
            "passes": sum(row.passes for row in self.rows),
            "memory": max((row.memory for row in self.rows), default=0) or None,
            "epsilon": charged and charged.epsilon,
            "epsilon_pld": self.tally.tightened(charged.epsilon or 0.0) if self.tally and charged else None,
            "noise": charged and charged.noise,
            "relation": charged and charged.relation,
            "colluders": charged and charged.colluders,
            "batch_norm": self.rows[-1].batch_norm if self.rows else None,
            "simulated": math.fsum(row.simulated or 0.0 for row in self.rows) or None,
            "seconds": sum(row.seconds for row in self.rows),
            "evaluating": sum(row.evaluating for row in self.rows),
            "saving": sum(row.saving for row in self.rows),
        }


@dataclass(frozen=True)
class Best:
    """The round with the best primary metric on the validation records."""

    round: int
    value: float
    weights: Tensor  # [d]
    task: Task  # with the running statistics of that round


@dataclass(frozen=True)
class Result:
    """A finished (or stopped) run."""

    method: str
    weights: Tensor  # [d]
    ledger: Ledger
    task: Task
    stopped: str = (
        "rounds"  # why it ended: rounds, target, early (stopping), budget (of differential privacy), interrupt
    )
    best: Best | None = None  # where there are validation records

    @property
    def metric(self) -> str:
        """The name of the primary metric."""
        return self.ledger.primary.name

    @property
    def value(self) -> float:
        """The primary metric on the test records when it was last measured; not a number where none was."""
        value = self.summary()["value"]
        return math.nan if value is None else float(value)

    def __repr__(self) -> str:
        why = "" if self.stopped == "rounds" else f", stopped: {self.stopped}"
        return f"Result({self.method}, {self.ledger.told()}{why})"

    def _repr_html_(self) -> str:
        """The curve and the summary, for notebooks."""
        metric = self.ledger.primary
        drawn = curve(metric.words, *self.ledger.series(metric.name))
        return page(self.method, drawn, _figures(self.summary()))

    def state_dict(self) -> dict[str, Tensor]:
        """The trained model's state under the names of the model's own `state_dict`, for `load_state_dict`."""
        return state_dict(self.task, self.weights)

    def save(self, path: Path | str) -> None:
        """Write `state_dict()` to a file: .safetensors, or .pt for `torch.load`."""
        write(self.task, self.weights, path, STATES)

    def export(self, path: Path | str) -> None:
        """Write the trained model to an .onnx file: in eval mode, with an input "x" of any number of records."""
        write(self.task, self.weights, path, GRAPHS)

    @property
    def accuracy(self) -> float:
        """Test accuracy when it was last measured; not a number where none was."""
        accuracy = self.summary()["accuracy"]
        return math.nan if accuracy is None else float(accuracy)

    def summary(self) -> dict[str, Any]:
        return self.ledger.summary(self.method)

    def table(self) -> str:
        """The summary as a small table of text."""
        rows = _figures(self.summary())
        width = max(len(key) for key, _ in rows)
        return "\n".join(f"{key:<{width}}  {value}" for key, value in rows)


def read_right(folder: Path, rows: Sequence[Row]) -> Right | None:
    """What the right.json in a run folder says, if it is of the last of these rows."""
    path = folder / RIGHT
    try:
        right = msgspec.json.decode(path.read_bytes(), type=Right)
        len(right.unpacked())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise ValueError(f"{path} does not say which test records are right: {error}; delete it") from None
    return right if rows and rows[-1].round == right.round else None


def primary(rows: Sequence[Row]) -> Primary:
    """The primary metric: what the newest row that has one says, accuracy where it was measured, or the loss."""
    told = next((row.primary for row in reversed(rows) if row.primary), None)
    measured = {name for row in rows for name in row.metrics}
    return told or (LOSS if LOSS.name in measured and ACCURACY.name not in measured else ACCURACY)


def headline(rows: Sequence[Row]) -> str:
    """That metric when it was last measured, such as "accuracy 0.9583"."""
    metric = primary(rows)
    values = [row.metrics[metric.name] for row in rows if metric.name in row.metrics]
    return f"{metric.words} {values[-1]:.4f}" if values else ""


def _figures(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A summary in words, without what is not known."""
    return [(key.replace("_", " "), figure(value)) for key, value in summary.items() if value is not None]


def figure(value: Any) -> str:
    """A number with six significant digits at least, and separators."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e6 else f"{value:,.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
