"""What a method is: hyper-parameters, and three functions over explicit records."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from msgspec.structs import replace

from fedveil.core import message, schema
from fedveil.core.account import Account, Promise
from fedveil.core.capability import GRADIENTS
from fedveil.core.cohort import Cohort
from fedveil.core.exchange import Exchange
from fedveil.core.forecast import Compute, Turn
from fedveil.core.message import Container, Question, Record, Slots, Weights
from fedveil.core.sampling import CohortSampler
from fedveil.core.task import Task


@message.kind
class State(Container, frozen=True):
    """What the server knows between rounds: the weights that are evaluated and published, and a slot for each part of
    the method that keeps something."""

    weights: Weights
    slots: Slots = Slots()

    def put(self, name: str, record: Record) -> State:
        """The same with another record in a slot."""
        return replace(self, slots=self.slots.put(**{name: record}))


class Method(Exchange):
    """What crosses the wire. Subclasses are frozen dataclasses of hyper-parameters with three functions.

    init_state(task)          -> state    the server's first state
    round(state, cohort)      -> state    the server: ask the cohort, merge what comes back
    handlers[type(question)]  : (stack, question) -> one answer for each client of the stack, in its order

    A subclass that states a `name` is entered in the `registry` and can be used in recipes under it.
    """

    about: ClassVar[About]
    unsupported: ClassVar[Mapping[str, str]] = {}  # why a key that other methods have is none of this one's
    registry: ClassVar[dict[str, type[Method]]] = {}

    def __init_subclass__(cls) -> None:
        for option in inspect.get_annotations(cls):
            if hasattr(getattr(super(cls, cls), option, None), "__get__"):
                raise TypeError(f"{cls.__name__}.{option} is an option with the name of a function; rename it")
        if "name" in cls.__dict__:
            cls.registry[cls.name] = cls

    @property
    def min_clients(self) -> int:
        """The smallest cohort with which a round can work."""
        return 1

    @property
    def reads_rounds(self) -> bool:
        """Whether what a round does depends on how many rounds there are."""
        return False

    @property
    def needs(self) -> tuple[str, ...]:
        """What the model has to allow, by the names in `task.WAYS_OUT`."""
        return (GRADIENTS,)

    @property
    def waits(self) -> str:
        """Why a round needs the answers of its whole cohort; empty if it takes them by `cohort.arrivals`, late ones
        too."""
        return "it asks a cohort and waits for it"

    def no_batch_norm(self, policy: str) -> str:
        """Why the method cannot train batch norm layers under a policy; empty if it can."""
        return "it compares models at fixed running statistics"

    @property
    def promise(self) -> Promise | None:
        """The differential privacy that the method promises; None: none."""
        return None

    def over(self, rounds: int) -> Method:
        """The method for a run of so many rounds: schedules without a length of their own get that length."""
        return self

    def with_noise(self, noise: float) -> Method:
        """The method with other noise in its promise."""
        promise: Any = self.promise
        promise = dataclasses.replace(promise, noise=noise)
        return dataclasses.replace(self, **{promise.key: promise})  # type: ignore[type-var]

    @property
    def noised_sum(self) -> Any:
        """The secure sum inside which clients add noise; None where they do not."""
        return None

    def summed_numbers(self, task: Task) -> int:
        """How many numbers of a client are in a sum."""
        return task.layout.size

    @property
    def codecs(self) -> tuple[Any, ...]:
        """The codecs that it uses, up and down."""
        return ()

    def client_cost(self, task: Task) -> Account | None:
        """What an answer costs a client that makes it private itself; None where it does not."""
        return None

    def account(self, task: Task, cohort: CohortSampler) -> Account | None:
        """What an answer costs in differential privacy; None where none is promised."""
        return self.client_cost(task)

    def init_state(self, task: Task) -> State:
        raise NotImplementedError

    def round(self, state: State, cohort: Cohort) -> State:
        raise NotImplementedError

    def forecast_messages(self, task: Task, turn: Turn) -> list[Question]:
        """What a client will be asked in a turn, without values; by default every kind of question, once."""
        return [schema.blank(kind, task.sizes) for kind in self.handlers]

    def forecast_compute(self, turn: Turn) -> Compute:
        """What the answers to these questions will take; by default nothing worth counting."""
        return Compute()


METHODS = Method.registry


def require_method(thing: Any) -> None:
    """Raise a TypeError if somebody gives something else where a method belongs."""
    if isinstance(thing, Method):
        return
    if isinstance(thing, type):
        raise TypeError(f"{thing.__name__} is a class; give an instance of it, {thing.__name__}()")
    kind = type(thing).__name__
    hint = f"; codecs go into a method, as in FedAvg(up={kind}())" if hasattr(thing, "in_code_space") else ""
    raise TypeError(f"{kind} is no method, such as FedAvg(){hint}")


IN_TURN = "method.secure sums the answers of one cohort, whose masks cancel only together"
SUMMED = (
    "proved",
    "with secure: a server that follows the protocol learns the sum over the clients and nothing else about any one; "
    'with secure.server = "malicious" this holds against a server that lies, too.',
)


@dataclass(frozen=True)
class About:
    """What `fedveil describe` says of a method. A privacy word comes with its kind: proved, measured or heuristic."""

    summary: str
    sends: str
    server_sees: str
    network_sees: str
    claims: tuple[tuple[str, str], ...]  # (kind, sentence)
    paper: str
