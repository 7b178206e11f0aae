"""A run as it goes: progress on stderr, and Ctrl-C."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from types import FrameType

from rich.filesize import decimal
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from fedveil.cli.shell import err
from fedveil.core.ledger import Ledger, Row
from fedveil.core.metrics import ACCURACY
from fedveil.gpu.context import using

INTERRUPTED = 130
LINE_EVERY = 5.0  # seconds, where stderr is no terminal
LONG = 3.0  # seconds of a round after which it is told how far its clients are


class Watch:
    """Progress on stderr: one line that renews itself on a terminal, elsewhere a line every few seconds."""

    def __init__(self, rounds: int, done: Ledger) -> None:
        self.rounds, self.first = rounds, len(done.rows)
        self.up, self.metric, self.spent = sum(row.bytes_up for row in done.rows), "", ""
        self.began = self.round_began = time.monotonic()
        self.text, self.told, self.lock = f"round {self.first}/{rounds}", -LINE_EVERY, threading.Lock()
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=10))
        self.bar = Progress(*columns, console=err, disable=not err.is_terminal)
        self.line = self.bar.add_task(self.text, total=rounds)

    def __enter__(self) -> Watch:
        self.bar.start()
        self.told_steps = using(observer=self.step, announcer=self.announce)
        self.told_steps.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.told_steps.__exit__(None, None, None)
        self.bar.stop()

    def __call__(self, row: Row) -> None:
        self.up += row.bytes_up
        primary = row.primary or ACCURACY
        if primary.name in row.metrics:
            value = row.metrics[primary.name]
            self.metric = f"  {primary.words} {value:.4f}" if primary.share else f"  {primary.words} {value:.4g}"
        if row.epsilon is not None:
            self.spent = f"  ε {row.epsilon:.4g}" + (f" ({row.relation})" if row.relation else "")
        now = time.monotonic()
        left = round((now - self.began) / (row.round - self.first) * (self.rounds - row.round))
        self.text = f"round {row.round}/{self.rounds}{self.metric}{self.spent}  {decimal(self.up)} up"
        self.text += f"  {datetime.timedelta(seconds=left)} left" if left else ""
        self.round_began = now
        self.bar.update(self.line, completed=row.round)
        self._tell(self.text)

    def step(self, done: int, total: int) -> None:
        """Called by every thread that trains, within a round; told if the round is long."""
        if time.monotonic() - self.round_began >= LONG:
            self._tell(f"{self.text}  step {done}/{total}")

    def announce(self, what: str) -> None:
        """Called by every thread that trains, before something that has no steps to tell of."""
        self._tell(f"{self.text}  {what}", at_once=True)

    def _tell(self, line: str, at_once: bool = False) -> None:
        with self.lock:
            self.bar.update(self.line, description=line)
            if self.bar.disable and (at_once or time.monotonic() - self.told >= LINE_EVERY):
                self.told = time.monotonic()
                err.print(line, soft_wrap=True)


class Interrupt:
    """Ctrl-C: the first one stops after the round, the second one at once."""

    def __init__(self, hint: str) -> None:
        self.hint, self.asked = hint, False

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def __call__(self) -> bool:
        return self.asked

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self.asked:  # run folders survive a kill at any moment; an exception would wait for the engine's threads
            _interject(f"aborted; {self.hint} goes on from the last finished round", "\x1b[?25h")  # shows the cursor
            os._exit(INTERRUPTED)
        self.asked = True
        _interject("stopping after this round; Ctrl-C again aborts at once")


def _interject(sentence: str, control: str = "") -> None:
    """Say something from a signal handler, which may have interrupted a write to stderr: past its buffer."""
    start = f"\r\x1b[2K{control}" if err.is_terminal else ""  # in place of the progress bar, which comes again below
    os.write(2, f"{start}fedveil: {sentence}\n".encode())
