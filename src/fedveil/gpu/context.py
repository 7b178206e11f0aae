"""How steps are launched and who hears of them: settings of a run, and not of the process.

    with using(compile=True, observer=told):
        ...

A thread begins with the default settings; whoever starts one runs it in a copy of its own (`contextvars.copy_context`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

LINE_EVERY = 5.0  # seconds between two lines of progress, where nothing renews a line
Observer = Callable[[int, int], None]  # called with the steps done and the steps there are


@dataclass(frozen=True)
class Context:
    """What holds for every step that is launched within a `using` block.

    capture:   record steps and replay them, as graphs on a GPU and as operators on a CPU; without it they run eagerly
    compile:   compile what is `Fused`
    kernels:   use the library's own kernels; without them products of windows and PyTorch's group norm stand in
    observer:  told of the steps of every loop, from the threads that train
    announcer: told what is about to take long and has no steps
    """

    capture: bool = True
    compile: bool = False
    kernels: bool = True
    observer: Observer | None = None
    announcer: Callable[[str], None] | None = None


DEFAULT = Context()
_current: ContextVar[Context] = ContextVar("fedveil.gpu", default=DEFAULT)


def current() -> Context:
    """The settings that hold here."""
    return _current.get()


@contextmanager
def using(**changes: Any) -> Iterator[Context]:
    """Change some settings, by the names of `Context`, until the block ends."""
    token = _current.set(replace(current(), **changes))
    try:
        yield current()
    finally:
        _current.reset(token)
