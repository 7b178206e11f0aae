"""A run as it goes, told on stderr."""

from __future__ import annotations

import datetime
import sys
import threading
import time

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from fedveil.core.ledger import Ledger, Row, headline
from fedveil.gpu.context import LINE_EVERY, using

LONG = 3.0  # seconds of a round after which it is told how far its clients are


class Watch:
    """Progress on stderr: one line that renews itself on a terminal and in a notebook, elsewhere a line every few
    seconds. It is called with each round's row.

    rounds:  how many there are
    done:    the rounds before
    console: where it is told; by default stderr
    """

    def __init__(self, rounds: int, done: Ledger, console: Console | None = None) -> None:
        self.notebook = console is None and Console().is_jupyter
        self.console = console or Console(stderr=True, force_jupyter=False, markup=False, highlight=False, emoji=False)
        self.rounds, self.first = rounds, len(done.rows)
        self.up, self.metric, self.spent = sum(row.bytes_up for row in done.rows), "", ""
        self.began = self.round_began = time.monotonic()
        self.width = 0
        self.text, self.told, self.lock = f"round {self.first}/{rounds}", -LINE_EVERY, threading.Lock()
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=10))
        self.bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.line = self.bar.add_task(self.text, total=rounds)

    def __enter__(self) -> Watch:
        self.bar.start()
        self.told_steps = using(observer=self.step, announcer=self.announce)
        self.told_steps.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.told_steps.__exit__(None, None, None)
        self.bar.stop()
        if self.notebook:
            print(file=sys.stderr)

    def __call__(self, row: Row) -> None:
        self.up += row.bytes_up
        if told := headline([row]):
            self.metric = f"  {told}"
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
            if self.notebook:
                print(f"\r{line:<{self.width}}", end="", file=sys.stderr, flush=True)
                self.width = len(line)  # what is left of a longer line is blanked
            elif self.bar.disable and (at_once or time.monotonic() - self.told >= LINE_EVERY):
                self.told = time.monotonic()
                self.console.print(line, soft_wrap=True)
