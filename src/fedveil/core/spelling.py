"""One-sentence errors for words nobody knows, with the nearest word somebody does."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def unknown(what: str, word: str, known: Iterable[str]) -> ValueError:
    """The error for `word`, which is none of `known`."""
    return ValueError(f"unknown {what} '{word}'{nearest(word, known)}")


def nearest(word: str, known: Iterable[str], path: str = "") -> str:
    """How an error about an unknown word ends: with the nearest right spelling, or all of them if they are few."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{path + '.' if path else ''}{close[0]}'?"
    return f"; known: {', '.join(known) or 'none'}" if len(known) <= 24 else ""


def check_options(what: str, function: Callable[..., Any], options: Mapping[str, object]) -> None:
    """Refuse options that are no keyword-only parameter of `function`."""
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise unknown(f"option of {what}", option, known)
