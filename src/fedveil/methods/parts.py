"""Build the parts of a method that averages from its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from fedveil.codecs.agreed import AgreedCodec
from fedveil.codecs.base import Codec
from fedveil.codecs.raw import Raw
from fedveil.core.account import Account
from fedveil.core.batchnorm import Statistics
from fedveil.core.message import Question
from fedveil.core.task import Task
from fedveil.links.agreed import Agreed
from fedveil.links.decoded import Decoded
from fedveil.links.down import Downlink, EncodedSteps, FromInit, FullWeights, Train, TrainFrom, TrainFull, TrainHere
from fedveil.links.payloads import Payloads, extended
from fedveil.links.summed import Summed
from fedveil.links.up import Uplink
from fedveil.privacy.dpsgd import DpSgd
from fedveil.privacy.secagg.settings import SecureSum
from fedveil.privacy.users import UserLevel
from fedveil.train.aggregators import Aggregator, NoisySum
from fedveil.train.local import LocalTraining
from fedveil.train.trainers import Trainer
from fedveil.train.transforms import ClipNoise, Feedback, Transform, Weigh


class Options(Protocol):
    """The options of a method that averages, and what it states of itself."""

    @property
    def name(self) -> str: ...

    @property
    def unsupported(self) -> Mapping[str, str]: ...

    @property
    def local(self) -> LocalTraining: ...

    @property
    def up(self) -> Codec: ...

    @property
    def down(self) -> Codec | None: ...

    @property
    def aggregator(self) -> Aggregator: ...

    @property
    def feedback(self) -> bool: ...

    @property
    def full_rounds(self) -> int: ...

    @property
    def privacy(self) -> DpSgd | None: ...

    @property
    def user_privacy(self) -> UserLevel | None: ...

    @property
    def secure(self) -> SecureSum | None: ...

    @property
    def vectors(self) -> tuple[str, ...]:
        """The vectors that clients send, by name."""

    @property
    def scalars(self) -> Mapping[str, Any]:
        """The numbers that clients send beside them, by name."""

    @property
    def broadcasts(self) -> Mapping[str, Any]:
        """The tensors that the server sends beside the weights, by name."""

    @property
    def weighted(self) -> bool:
        """Whether clients count by their records."""

    @property
    def own_training(self) -> bool:
        """Whether clients train in another way than FedAvg's."""

    @property
    def own_step(self) -> bool:
        """Whether the server steps in another way than FedAvg's."""

    @property
    def trainer(self) -> Trainer:
        """What clients do with their records."""

    @property
    def limited(self) -> bool:
        """Whether long updates are shortened."""

    @property
    def needs_all(self) -> str:
        """The setting because of which the server holds all vectors of a cohort at once; empty if it does not."""

    def client_cost(self, task: Task) -> Account | None: ...


@dataclass(frozen=True)
class Parts:
    """The parts of one phase.

    release:    transforms after which vectors may leave a client: clip, noise, weights. A linear codec's uplink clips
                and noises codes instead
    transforms: further transforms before the codec
    secure:     settings of the secure sum; None: in the clear
    trusted:    whether the server adds the noise of user-level privacy
    equal:      whether clients have equal weights because their record counts are private
    full:       whether codecs are left out
    statistics: whether running statistics of batch norm layers travel beside the weights and the updates
    """

    release: tuple[Transform, ...]
    transforms: tuple[Transform, ...]
    up: Uplink
    down: Downlink
    secure: SecureSum | None
    trusted: bool
    equal: bool
    full: bool
    statistics: bool

    @property
    def questions(self) -> tuple[type[Question], ...]:
        """Return the questions that the uplink collects answers to."""
        return (self.down.question, *self.up.questions)


def assemble(m: Options, full: bool = False, statistics: bool = False) -> Parts:
    """Return the parts of an ordinary round, or with `full` of a round without codecs."""
    codec, users = Raw() if full else m.up, m.user_privacy
    summed = bool(users and users.where == "sum")
    trusted, equal = summed and not m.secure, bool(m.privacy or users)
    private: tuple[Transform, ...] = (ClipNoise(users, noise=not summed),) if users and not trusted else ()
    feedback = (Feedback(),) if m.feedback and codec.lossy else ()
    before, after = ((), private) if codec.linear else (private, ())
    weigh = (Weigh(equal),) if codec.in_code_space and m.weighted else ()
    secure = _secure(m, codec, equal)
    scalars, counted = tuple(m.scalars.items()), m.weighted and not equal
    payloads = Payloads(codec.payload, m.vectors, scalars, m.weighted, statistics)
    up: Uplink
    if codec.in_code_space:
        up = Agreed(cast(AgreedCodec, codec), scalars, secure, feedback)
    elif secure and codec.payload.additive:
        up = Summed(codec, secure, payloads, counted, noised=summed, transforms=feedback, release=after)
    else:
        aggregator = NoisySum(users) if users and trusted else m.aggregator
        limited = m.limited and not trusted  # a median of the clients would let one change what others add to the sum
        coded = codec.linear and (trusted or m.aggregator.linear)
        up = Decoded(codec, payloads, aggregator, counted, limited, feedback, coded, after)
    extra = {**m.broadcasts, **codec.extra, **({"statistics": Statistics} if statistics else {})}
    down = _down(None if full else m.down, TrainFull if full else Train, extra)
    return Parts(before + weigh, feedback, up, down, secure, trusted, equal, full, statistics)


def _down(codec: Codec | None, plain: type[Question], extra: Mapping[str, Any]) -> Downlink:
    fields = tuple(extra.items())
    if codec is None:
        return FullWeights(extended(plain, fields))
    if codec.reference == "init":
        return FromInit(codec, extended(TrainFrom, fields))
    return EncodedSteps(codec, extended(TrainHere, fields))


def _secure(m: Options, codec: Codec, equal: bool) -> SecureSum | None:
    """Return the settings of the secure sum. Codes and private updates have their own range."""
    how, users = m.secure, m.user_privacy
    reach = cast(AgreedCodec, codec).reach if codec.in_code_space else None
    if how and reach is not None:
        how = replace(how, clip=reach)
    elif how and users and users.where == "sum":
        return replace(how, clip=users.clip).noised(users.sum_noise)
    elif how and users:
        how = replace(how, clip=users.reach)
    return how.even() if how and equal else how
