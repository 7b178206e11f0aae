"""One-sentence errors for words nobody knows, with the nearest word somebody does."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def unknown(what: str, word: str, known: Iterable[str]) -> ValueError:
    """The error for `word`, which is none of `known`."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
    return ValueError(f"unknown {what} {word!r}; {hint}")


def check_options(what: str, function: Callable[..., Any], options: Mapping[str, object]) -> None:
    """Refuse options that are no keyword-only parameter of `function`."""
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise unknown(f"option of {what}", option, known)
