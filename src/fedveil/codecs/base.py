"""Update codecs: what an update looks like on the wire. Any of them goes up, down, or both ways.

A codec turns updates at weights `w` into payloads and payloads back into updates, with one `decode` for both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from fedveil.core.forecast import Compute
from fedveil.core.message import Answer, Size
from fedveil.core.seeds import Seed
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task


class Codec:
    """A frozen dataclass of settings with `encode` and `decode`. One that states a `name` is entered in the `registry`.

    reference: what a down message is relative to. "last": the weights of the round before, so that everyone applies the
               decoded step and stays in step. "init": the initial weights, which everyone can draw.
    """

    name: ClassVar[str]
    payload: ClassVar[type[Answer]]
    reference: ClassVar[str] = "last"
    server_can_encode: ClassVar[bool] = True  # whether the server, which has no data and is one, can use it
    in_code_space: ClassVar[bool] = False  # whether codes are averaged as they are (`AgreedCodec`)
    lossy: ClassVar[bool] = True  # whether what is decoded differs from what was encoded
    extra: ClassVar[Mapping[str, Any]] = {}  # fields that it adds to the method's question, with their types
    needs: ClassVar[tuple[str, ...]] = ()  # of the model, by the names in `task.WAYS_OUT`
    registry: ClassVar[dict[str, type[Codec]]] = {}

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            cls.registry[cls.name] = cls

    def for_client(self, client: int) -> Codec:
        """The codec a client uses: this one, unless clients differ."""
        return self

    def validate(self, task: Task) -> None:
        """Raise a ValueError if the codec cannot work on this task."""

    @property
    def reads_records(self) -> str:
        """Which settings would keep `encode` from looking at a client's records again; none where it does not look."""
        return ""

    @property
    def loses_the_same(self) -> bool:
        """Whether it loses the same directions in every round, so that error feedback would only pile them up."""
        return False

    def sizes(self, task: Task) -> Mapping[str, Size]:
        """What the dimension names of the payload stand for."""
        return task.sizes

    def forecast_compute(self) -> Compute:
        """What encoding one update takes of a client."""
        return Compute()

    def check(self, task: Task, payload: Any) -> None:
        """Raise `Refused` for a payload that fits its schema and still cannot be decoded."""

    def exhibit(self, payload: Any) -> tuple[str, Tensor, Tensor] | None:
        """What a payload holds that can be looked at: a name, images [N, channels, height, width], labels [N, K]."""
        return None

    def encode(
        self, task: Task, w: Tensor, updates: Tensor, seeds: Sequence[Seed], stack: ClientStack | None
    ) -> list[Any]:
        """Updates [C, d] at `w` [C, d] -> C payloads. `stack` is None on the server, which has no data of its own."""
        raise NotImplementedError

    def decode(self, task: Task, w: Tensor, payloads: Sequence[Any]) -> Tensor:
        """C payloads at `w` [C, d] -> updates [C, d]."""
        raise NotImplementedError
