"""Ends what a simulation started, when the process that started it is over, however it ended.

A program of its own that imports nothing of fedveil: `python warden.py HOME PID`. HOME is the simulation's private
folder, where all its processes write their logs; PID is the process to outlive, which holds the other end
of stdin.
"""

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path


def started(home: str) -> list[int]:
    """The processes that have a file open in the simulation's folder, where the system tells (Linux): Ray's all log
    there."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if os.readlink(link).startswith(f"{home}/"):
                found.add(int(link.parts[2]))
    return sorted(found)


def main(home: str, outlived: int) -> None:
    sys.stdin.buffer.read()  # returns when the other end is closed, be it by a kill
    for pid in set(started(home)) - {os.getpid(), outlived}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
