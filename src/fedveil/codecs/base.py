"""Update codecs: the format of an update on the wire, up, down or both.

A codec turns updates at weights `w` into payloads and payloads back into updates, with one `decode` for both sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic

from torch import Tensor
from typing_extensions import TypeVar

from fedveil.core import schema
from fedveil.core.forecast import Compute
from fedveil.core.message import KINDS, Answer, Size
from fedveil.core.seeds import Seed
from fedveil.core.spelling import nearest
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task

P = TypeVar("P", bound=Answer, default=Any)  # a codec's payload


class Codec(Generic[P]):
    """A frozen dataclass of settings with `encode` and `decode`, generic in its payload.

    A subclass with a `name` is registered in `registry`.

    reference: start of a down message. "last": the weights of the round before; server and clients apply the decoded
               step. "init": the initial weights, which everyone can draw.
    """

    name: ClassVar[str]
    payload: ClassVar[type[Answer]]
    reference: ClassVar[str] = "last"
    server_can_encode: ClassVar[bool] = True  # whether the server, which has no records, can encode with it
    in_code_space: ClassVar[bool] = False  # whether the server averages codes before it decodes (`AgreedCodec`)
    at_weights: ClassVar[bool] = True  # whether decoding depends on the weights that the update is about
    lossy: ClassVar[bool] = True  # whether decoding differs from the update
    linear: ClassVar[bool] = False  # whether a payload is one tensor, a map of the update that a round's clients share
    extra: ClassVar[Mapping[str, Any]] = {}  # fields that it adds to the method's question, with their types
    needs: ClassVar[tuple[str, ...]] = ()  # operations of the model, by the names in `capability.WAYS_OUT`
    registry: ClassVar[dict[str, type[Codec]]] = {}

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            cls.registry[cls.name] = cls

    def for_client(self, client: int) -> Codec:
        """Return the codec of a client; clients may use different settings."""
        return self

    def validate(self, task: Task) -> None:
        """Raise a ValueError if the codec cannot work on this task."""

    @property
    def reads_records(self) -> str:
        """Return the settings that keep `encode` from reading a client's records; empty if it does not read them."""
        return ""

    @property
    def replaces_training(self) -> str:
        """Return the settings with which `encode` needs an update; empty if it does. Otherwise it makes its own update
        from the client's records, and clients do not train before."""
        return ""

    @property
    def loses_the_same(self) -> bool:
        """Whether the codec loses the same directions in every round, which error feedback would accumulate."""
        return False

    @property
    def most(self) -> int | None:
        """The largest cohort whose payloads can be averaged; None if any can."""
        return None

    def sizes(self, task: Task) -> Mapping[str, Size]:
        """Return the sizes behind the dimension names of the payload."""
        return task.sizes

    def shared(self, seed: Seed) -> Mapping[str, Any]:
        """Return the fields of a payload, other than tensors, that the public seed of a round determines. They are the
        same for all clients, and a secure sum does not carry them."""
        return {}

    def summed_numbers(self, task: Task) -> int:
        """Return how many numbers stand for a vector where vectors are clipped, noised and added up: the weights, or
        for a linear codec the numbers of its payload."""
        if not self.linear:
            return task.layout.size
        _, shape = schema.fields(self.payload)[self.code_field].bind(self.sizes(task))
        return math.prod(shape)

    @property
    def code_field(self) -> str:
        """The name of the one tensor in a linear codec's payload."""
        (name,) = schema.fields(self.payload)
        return name

    def forecast_compute(self, records: int) -> Compute:
        """Return the compute that encoding one update takes of a client with so many records."""
        return Compute()

    def check(self, task: Task, payload: P) -> None:
        """Raise `Refused` if a payload fits its schema but cannot be decoded."""

    def exhibit(self, payload: P) -> tuple[str, Tensor, Tensor] | None:
        """Return images of a payload for the report: a name, images [N, channels, height, width], labels [N, K]."""
        return None

    def encode(
        self, task: Task, w: Tensor, updates: Tensor, seeds: Sequence[Seed], stack: ClientStack | None
    ) -> list[P]:
        """Encode updates [C, d] at `w` [C, d] into C payloads. `stack` is None on the server, which has no records."""
        raise NotImplementedError

    def decode(self, task: Task, w: Tensor, payloads: Sequence[P]) -> Tensor:
        """Decode C payloads at `w` [C, d] into updates [C, d]."""
        raise NotImplementedError


def as_codec(given: Any, key: str) -> Codec:
    """Return the codec that an option means: itself, or that of a registered name with its default settings.

    Anything else is a TypeError, and a codec whose payload does not fit is a ValueError: one sentence each.
    """
    if isinstance(given, str):
        if given not in Codec.registry:
            raise ValueError(f"method.{key} is '{given}', which is no codec{nearest(given, Codec.registry)}")
        given = Codec.registry[given]()
    if not isinstance(given, Codec):
        found = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
        raise TypeError(f"method.{key} is {found}; it takes a codec, such as Qsgd(), or a codec's name")
    for problem in _problems(given):
        raise ValueError(f"{type(given).__name__}{problem}")
    return given


def _problems(codec: Codec) -> Iterator[str]:
    """What is missing in a codec's class for the server to receive its payloads."""
    payload: Any = getattr(codec, "payload", None)
    if not isinstance(payload, type):
        yield " states no payload; set `payload` to the class of what `encode` returns"
        return
    told, fields = f".payload is {payload.__name__}", getattr(payload, "__struct_fields__", ())
    if KINDS.get(getattr(payload, "kind", -1)) is not payload:
        yield f"{told}, which is not registered; put @message.kind above it"
    if codec.in_code_space:
        for name in ("offer", "agreement"):
            if not hasattr(codec, name):
                yield f" is in code space and states no {name}; set it to the class of that message"
        if "share" not in fields:
            yield f"{told}, which has no field `share`, the weight on a client's codes; add it with Shape((1,))"
    elif "records" not in fields:
        yield f"{told}, which has no field `records`, by which updates are weighted; add `records: Count = 1`"
    elif codec.linear:
        if not getattr(payload, "additive", False) or len(schema.fields(payload)) != 1:
            yield f"{told}, but a linear codec's payload states additive = True and has one tensor; let it do so"
    elif getattr(payload, "additive", False) and "update" not in fields:
        yield f"{told}, which is additive and has no field `update` [d] to sum; add it, or leave `additive` out"
