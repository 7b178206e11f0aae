"""Payloads of several vectors: one record type for a codec's payloads of every vector that a method sends."""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor

from fedveil.core import message
from fedveil.core.batchnorm import Statistics
from fedveil.core.message import Answer, Container, Count, Question


@dataclass(frozen=True)
class Payloads:
    """How a method's vectors and scalars lie in one answer.

    payload: the codec's own payload, of one vector
    vectors: the names of the vectors
    scalars: the names of the numbers beside them, with their types
    counted: whether an answer states the number of records behind it
    statistics: whether running statistics of batch norm layers lie beside them
    """

    payload: type[Answer]
    vectors: tuple[str, ...] = ("update",)
    scalars: tuple[tuple[str, Any], ...] = ()
    counted: bool = True
    statistics: bool = False

    @property
    def record(self) -> type[Answer]:
        """The type of an answer: the codec's own where that has room for everything."""
        own = "records" in self.payload.__struct_fields__
        beside = (*self.scalars, *((("statistics", Statistics),) if self.statistics else ()))
        if len(self.vectors) == 1 and not beside and (self.counted or not own):
            return self.payload
        return _several(self.payload, self.vectors, beside, self.counted and own)

    def join(
        self,
        parts: Mapping[str, Sequence[Any]],
        scalars: Mapping[str, Sequence[float]],
        records: Sequence[int] | None,
        statistics: Tensor | None = None,
    ) -> list[Any]:
        """Payloads of each vector -> answers, a client each. Without `records` an answer counts as 1."""
        answers: list[Any] = []
        for i in range(len(parts[self.vectors[0]])):
            own = {name: parts[name][i] for name in self.vectors}
            fields = {self.field(name, f): getattr(part, f) for name, part in own.items() for f in self._fields}
            fields |= {name: float(values[i]) for name, values in scalars.items()}
            if records is not None:
                fields["records"] = int(records[i])
            if statistics is not None:
                fields["statistics"] = statistics[i]
            answers.append(self.record(**fields))
        return answers

    def part(self, answer: Any, name: str) -> Any:
        """The codec's payload of one vector in an answer."""
        if isinstance(answer, self.payload):
            return answer
        return self.payload(**{f: getattr(answer, self.field(name, f)) for f in self._fields})

    def field(self, vector: str, field: str) -> str:
        """The name in an answer of a field of a vector's payload."""
        if self.record is self.payload:
            return field
        return _field(vector, field, len(self.vectors), len(self._fields))

    @property
    def _fields(self) -> list[str]:
        return [name for name in self.payload.__struct_fields__ if name != "records"]


def _field(vector: str, field: str, vectors: int, fields: int) -> str:
    if vectors == 1:
        return field
    return vector if fields == 1 else f"{vector}_{field}"


@functools.cache
def _several(
    payload: type[Answer], vectors: tuple[str, ...], scalars: tuple[tuple[str, Any], ...], records: bool
) -> type[Answer]:
    hints = typing.get_type_hints(payload, include_extras=True)
    own = [name for name in payload.__struct_fields__ if name != "records"]
    fields: list[Any] = [(_field(v, f, len(vectors), len(own)), hints[f]) for v in vectors for f in own]
    fields += [*scalars, *([("records", Count, 1)] if records else [])]
    name = "+".join([payload.__name__, *vectors, *(name for name, _ in scalars), *(["records"] if records else [])])
    return _made(name, fields, (Answer, Container) if issubclass(payload, Container) else (Answer,), payload.additive)


def _made(name: str, fields: list[Any], bases: tuple[type, ...], additive: bool) -> type[Answer]:
    namespace = {"additive": additive, "__module__": __name__}
    made: Any = msgspec.defstruct(name, fields, bases=bases, namespace=namespace, frozen=True)
    registered: type[Answer] = message.kind(made)
    return registered


@functools.cache
def extended(question: type[Question], extra: tuple[tuple[str, Any], ...]) -> type[Question]:
    """The question with further fields; the question itself where there are none."""
    if not extra:
        return question
    name = "+".join([question.__name__, *(name for name, _ in extra)])
    made: Any = msgspec.defstruct(name, list(extra), bases=(question,), namespace={"__module__": __name__}, frozen=True)
    registered: type[Question] = message.kind(made)
    return registered
