"""`fedveil list`, `describe` and `inspect`: what there is, what it sends, and what a file holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fedveil.cli import show
from fedveil.cli.options import Format, Shown, What, argument
from fedveil.cli.shell import out
from fedveil.core.spelling import nearest

if TYPE_CHECKING:
    from fedveil.codecs.base import Codec
    from fedveil.core.method import Method
    from fedveil.runs.recipe import Recipe


def list_(
    what: Annotated[What, argument("methods|codecs|models|data|losses|metrics|recipes")], format: Shown = Format.table
) -> None:
    """List methods, codecs, models, data, losses, metrics or recipes.

    Example: fedveil list recipes
    """
    from fedveil import data, models
    from fedveil.codecs.base import Codec
    from fedveil.core.losses import LOSSES
    from fedveil.core.measures import METRICS
    from fedveil.core.method import METHODS
    from fedveil.runs import recipe

    tables: dict[What, Callable[[], dict[str, str]]] = {
        What.methods: lambda: {name: _summary(method) for name, method in METHODS.items()},
        What.codecs: lambda: {name: _first_line(codec) for name, codec in Codec.registry.items()},
        What.models: lambda: {name: _first_line(model) for name, model in models.MODELS.items()},
        What.data: lambda: {name: _first_line(load) for name, load in data.SETS.items()},
        What.losses: lambda: {name: _first_line(loss) for name, loss in LOSSES.items()},
        What.metrics: lambda: {name: _first_line(metric) for name, metric in METRICS.items()},
        What.recipes: lambda: {name: _setting(recipe.read(name)) for name in recipe.names()},
    }
    found = tables[what]()
    if format is Format.json:
        show.as_json([{"name": name, "summary": summary} for name, summary in found.items()])
    else:
        show.pairs(found.items())


def _summary(method: type[Method]) -> str:
    return method.about.summary if hasattr(method, "about") else _first_line(method)


def _first_line(thing: object) -> str:
    return (thing.__doc__ or "").partition("\n")[0]


def _setting(plan: Recipe) -> str:
    size, clients = plan.cohort.size, plan.split.clients
    who = f"{size} of {clients}" if size < clients else f"all {clients}"
    return f"{plan.split.kind}, {size if plan.split.kind == 'natural' else who} clients a round, {plan.rounds} rounds"


def describe(method: Annotated[str, argument("METHOD")], format: Shown = Format.table) -> None:
    """Print what a method or codec sends, and its keys.

    For a method, also print who sees it, its labelled privacy claims, and which of the paper's settings differ.

    Example: fedveil describe scaffold
    """
    from fedveil.codecs.base import Codec
    from fedveil.core.method import METHODS

    if method in Codec.registry and method not in METHODS:
        return _describe_codec(Codec.registry[method](), format)
    if method not in METHODS:
        raise ValueError(f"there is no method '{method}'{nearest(method, [*METHODS, *Codec.registry])}")
    if not hasattr(METHODS[method], "about"):
        raise ValueError(f"{method} does not describe itself; state `about: ClassVar[fv.About]` in its class")
    about, keys = METHODS[method].about, dict(_keys(METHODS[method](), "method"))
    norms = _batch_norm(METHODS[method]())
    if format is Format.json:
        claims = [{"kind": kind, "sentence": sentence} for kind, sentence in about.claims]
        told = {"name": method, **vars(about), "claims": claims, "keys": keys, "as_printed": _as_printed(method)}
        show.as_json(told | {"batch_norm": norms})
        return
    words = [(name.replace("_", " "), text) for name, text in vars(about).items() if name not in ("claims", "paper")]
    show.pairs([("method", method), *words, *about.claims, ("batch norm", norms), ("paper", about.paper)])
    out.out("\nkeys for --set, with their defaults")
    show.pairs(_typed(METHODS[method](), "method"))
    for names, changes in _grouped(_as_printed(method)):
        out.out("\nthe paper's settings, where they differ")
        show.pairs([("  recipe", ", ".join(names)), *((f"  {key}", value) for key, value in changes.items())])


def _batch_norm(method: Method) -> str:
    """What may happen to batch norm layers, and why something else may not."""
    from fedveil.core.batchnorm import POLICIES

    whys = {policy: method.no_batch_norm(policy) for policy in POLICIES[:-1]}
    usable = ", ".join([*(policy for policy, why in whys.items() if not why), POLICIES[-1]])
    why = next((why for why in whys.values() if why), "")
    return f"{usable}; not {' or '.join(p for p, w in whys.items() if w)}: {why}" if why else usable


def _as_printed(method: str) -> dict[str, dict[str, Any]]:
    """The recipes with the settings of the method's paper, and those of its keys that are not at their defaults."""
    from fedveil.core.method import METHODS
    from fedveil.runs import recipe

    plans = {name: recipe.read(name) for name in recipe.names() if name.endswith("-paper")}
    usual = METHODS[method]()
    return {
        name: dict(_changes(plan.method, usual, "method")) for name, plan in plans.items() if plan.method.name == method
    }


def _grouped(found: dict[str, dict[str, Any]]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Recipes with the same changes together."""
    for name, changes in found.items():
        names = [other for other, same in found.items() if same == changes]
        if names[0] == name:
            yield names, changes


def _changes(thing: Any, usual: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What a recipe sets below `path` that is not as in `usual`."""
    if type(thing) is not type(usual):
        if hasattr(thing, "registry"):
            yield f"{path}.name", thing.name
        usual = type(thing)()
    for part in dataclasses.fields(thing):
        value, key = getattr(thing, part.name), f"{path}.{part.name}"
        if dataclasses.is_dataclass(value):
            yield from _changes(value, getattr(usual, part.name), key)
        elif value != getattr(usual, part.name):
            yield key, list(value) if isinstance(value, tuple) else value


def _typed(thing: Any, path: str) -> Iterator[tuple[str, str]]:
    """What a recipe can set below `path`, and the present values as one would type them. None is to leave a key out; of
    a table that is left out the keys are named."""
    from fedveil.runs.typed import keys, section

    for key, value in _keys(thing, path):
        shown = str(value).lower() if value is None or isinstance(value, bool) else f"{value}" or '""'
        name = key.removeprefix(f"{path}.")
        if value is None and "." not in name and (table := section(type(thing), name)):
            shown = f"none, or its {', '.join(keys(table))}"
        yield f"  {key}", shown


def _describe_codec(codec: Codec, format: Format) -> None:
    """A codec's own words, and its keys as those of the way up."""
    words, keys = " ".join((codec.__doc__ or "").split("\n\n")[0].split()), dict(_keys(codec, "method.up"))
    if format is Format.json:
        return show.as_json({"name": codec.name, "summary": words, "keys": keys})
    show.pairs([("codec", codec.name), ("summary", words)])
    out.out(f"\nkeys for --set, with their defaults{'; method.down takes the same' if codec.server_can_encode else ''}")
    show.pairs(_typed(codec, "method.up"))


def _keys(thing: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What a recipe can set below `path`, and the present values."""
    if hasattr(thing, "registry"):
        yield f"{path}.name", thing.name
    for part in dataclasses.fields(thing):
        value, key = getattr(thing, part.name), f"{path}.{part.name}"
        value = list(value) if isinstance(value, tuple) else value  # as one types it
        yield from _keys(value, key) if dataclasses.is_dataclass(value) else [(key, value)]


def inspect(file: Annotated[Path, argument("FILE")], format: Shown = Format.table) -> None:
    """Show the contents of a checkpoint or a message.

    Example: fedveil inspect runs/demo/digits-scaffold/checkpoint-00000020.fv
    """
    from fedveil.cli import records
    from fedveil.core.message import Refused

    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    try:
        head, found = records.opened(file)
    except Refused as error:
        raise ValueError(f"{file} cannot be shown: {error}") from None
    parts = [(part, type(record).__name__, records.fields(record)) for part, record in found]
    if format is Format.json:
        show.as_json(head | {"records": [{"part": part, "kind": kind, "fields": seen} for part, kind, seen in parts]})
        return
    show.pairs(head.items())
    for part, kind, seen in parts:
        out.out(f"\n{part}: {kind}")
        show.pairs((f"  {name}", records.line(value)) for name, value in seen.items())
