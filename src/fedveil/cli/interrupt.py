"""Ctrl-C: the first one stops a run after its round."""

from __future__ import annotations

import os
import signal
from subprocess import Popen
from types import FrameType

from fedveil.cli.shell import err

INTERRUPTED = 130


class Interrupt:
    """Ctrl-C: the first one stops after the round, the second one at once.

    children: processes that are told, too; they are in sessions of their own, which a terminal does not tell
    """

    def __init__(self, hint: str) -> None:
        self.hint, self.asked = hint, False
        self.children: list[Popen[str]] = []

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def __call__(self) -> bool:
        return self.asked

    def tell_children(self) -> None:
        for child in self.children:
            child.send_signal(signal.SIGINT)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self.tell_children()
        if self.asked:  # run folders survive a kill at any moment; an exception would wait for the engine's threads
            _interject(f"aborted; {self.hint} goes on from the last saved round", "\x1b[?25h")  # shows the cursor
            os._exit(INTERRUPTED)
        self.asked = True
        _interject("stopping after this round; Ctrl-C again aborts at once")


def _interject(sentence: str, control: str = "") -> None:
    """Say something from a signal handler, which may have interrupted a write to stderr: past its buffer."""
    start = f"\r\x1b[2K{control}" if err.is_terminal else ""  # in place of the progress bar, which comes again below
    os.write(2, f"{start}fedveil: {sentence}\n".encode())
