"""An entropy coder behind any codec: fewer bytes where the payload is not quite random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from fedveil.codecs.base import Codec
from fedveil.codecs.qsgd import Qsgd
from fedveil.core import message, schema
from fedveil.core.forecast import Compute
from fedveil.core.message import Answer, Container, Count, Envelope, Record, Refused, Size
from fedveil.core.seeds import Seed
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task


@message.kind
class Squeezed(Answer, Container, frozen=True):
    """A payload's frame, compressed."""

    data: bytes
    records: Count = 1


@dataclass(frozen=True)
class Zstd(Codec[Squeezed]):
    """Zstandard on another codec's payload. Its size varies, so what `cost` says of it is an upper bound."""

    name: ClassVar[str] = "zstd"
    payload: ClassVar[type[Answer]] = Squeezed

    inner: Codec = field(default_factory=Qsgd)
    level: int = 19

    def __post_init__(self) -> None:
        if not 1 <= self.level <= 22:
            raise ValueError("zstd.level is from 1 to 22")
        if self.inner.in_code_space:
            raise ValueError(f"zstd cannot be put around {self.inner.name}, whose codes are averaged as they are sent")
        if not self.inner.server_can_encode:
            raise ValueError(f"zstd cannot be put around {self.inner.name}, of which clients differ; put it within")

    @property
    def reference(self) -> str:  # type: ignore[override]
        return self.inner.reference

    @property
    def at_weights(self) -> bool:  # type: ignore[override]
        return self.inner.at_weights

    @property
    def lossy(self) -> bool:  # type: ignore[override]
        return self.inner.lossy

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.inner.needs

    @property
    def reads_records(self) -> str:
        return self.inner.reads_records

    @property
    def replaces_training(self) -> str:
        return self.inner.replaces_training

    def validate(self, task: Task) -> None:
        _zstandard()
        self.inner.validate(task)

    def sizes(self, task: Task) -> Mapping[str, Size]:
        """As many bytes as Zstandard can make of an inner frame: what cannot be compressed grows a little."""
        longest = message.size(schema.blank(self.inner.payload, self.inner.sizes(task))) + 16  # a number may be longer
        return {**task.sizes, "bytes": longest + longest // 256 + 64}

    def forecast_compute(self, records: int) -> Compute:
        return self.inner.forecast_compute(records)

    def check(self, task: Task, payload: Squeezed) -> None:
        self.inner.check(task, self._read(task, payload))

    def encode(
        self, task: Task, w: Tensor, updates: Tensor, seeds: Sequence[Seed], stack: ClientStack | None
    ) -> list[Squeezed]:
        coder = _zstandard().ZstdCompressor(level=self.level)
        payloads = self.inner.encode(task, w, updates, seeds, stack)
        return [Squeezed(coder.compress(message.frame(payload, Envelope()))) for payload in payloads]

    def decode(self, task: Task, w: Tensor, payloads: Sequence[Squeezed]) -> Tensor:
        return self.inner.decode(task, w, [self._read(task, payload) for payload in payloads])

    def _read(self, task: Task, payload: Squeezed) -> Record:
        """The inner payload, checked. Nothing is unpacked that says it is longer than its schema allows."""
        kind, sizes, limit = self.inner.payload, self.inner.sizes(task), self._limit(task)
        zstandard = _zstandard()
        try:
            if zstandard.get_frame_parameters(payload.data).content_size > limit:  # unknown is 2^64 - 1
                raise Refused("too large", f"the payload unpacks to more than {limit} bytes")
            frame = zstandard.ZstdDecompressor().decompress(payload.data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise Refused("malformed", f"the payload is not Zstandard: {error}") from None
        record, _ = message.unframe(frame, {kind.kind: kind}, limit)
        schema.check(record, sizes)
        return record

    def _limit(self, task: Task) -> int:
        return schema.size_limit(self.inner.payload, self.inner.sizes(task))


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise ImportError("the zstd codec needs the extra 'zstd': pip install 'fedveil[zstd]'") from None
    return zstandard
