"""Rules: a table of the combinations of options that do not work, each with an error message.

A row states a combination that does not work, and what to use instead. Rows look at what parts state of themselves
(`additive`, `in_code_space`, `server_can_encode`, …), never at their types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fedveil.core.method import IN_TURN
from fedveil.core.sampling import CohortSampler
from fedveil.core.task import Task
from fedveil.gpu.host import free_memory
from fedveil.methods.parts import Options

COPIES = 4  # of the vectors of a cohort: sorting makes one, and an index of twice its size
UNSUPPORTED = "options that the method cannot have"
CLIENT = 'or user_privacy.where="client"'


@dataclass(frozen=True)
class Rule:
    """A row: when it applies, and the sentence."""

    name: str
    broken: Callable[[Options], object]
    says: Callable[[Options], str]


def _noised_sum(m: Options) -> bool:
    return m.user_privacy is not None and m.user_privacy.where == "sum"


def _set(m: Options, key: str) -> bool:
    """Whether an option is used."""
    return getattr(m, key, None) is not None


RULES = (
    Rule(
        UNSUPPORTED,
        lambda m: any(_set(m, key) for key in m.unsupported),
        lambda m: next(f"{m.name} has no method.{key}: {m.unsupported[key]}" for key in m.unsupported if _set(m, key)),
    ),
    Rule(
        "full rounds",
        lambda m: m.full_rounds < 0,
        lambda m: f"method.full_rounds is {m.full_rounds}; it is 0 or more",
    ),
    Rule(
        "a down codec that the server cannot use",
        lambda m: m.down and not m.down.server_can_encode,
        lambda m: f"method.down is {m.down and m.down.name}, which is for the way up only; use another codec",
    ),
    Rule(
        "codes with a robust aggregator",
        lambda m: m.up.in_code_space and not m.aggregator.linear,
        lambda m: (
            f"method.aggregator.kind is {m.aggregator.kind}, but the server decodes only the mean of {m.up.name}'s "
            'codes and has no single updates to compare; use mean, and user_privacy.where="client" to bound updates'
        ),
    ),
    Rule(
        "codes of several vectors",
        lambda m: m.up.in_code_space and len(m.vectors) > 1,
        lambda m: (
            f"{m.name} sends {len(m.vectors)} vectors ({', '.join(m.vectors)}), and {m.up.name} codes one vector for "
            "the whole cohort; use another codec, such as qsgd or top-k"
        ),
    ),
    Rule(
        "feedback with a code that never changes",
        lambda m: m.feedback and m.up.loses_the_same,
        lambda m: (
            f"method.feedback adds the error of {m.up.name} to the next update, but a code that is the same in every "
            "round never sends it; set method.up.permute=true"
        ),
    ),
    Rule(
        "no training in a method with a training of its own",
        lambda m: m.up.replaces_training and m.own_training,
        lambda m: (
            f"{m.up.name} fits the client's data without local training, and {m.name} changes that training; use "
            f"fedsynth, or set method.up's {m.up.replaces_training}"
        ),
    ),
    Rule(
        "no training with feedback or full rounds",
        lambda m: m.up.replaces_training and (m.feedback or m.full_rounds),
        lambda m: (
            f"{m.up.name} fits the client's data without local training, so there is no update for method.feedback or "
            f"method.full_rounds; leave them out, or set method.up's {m.up.replaces_training}"
        ),
    ),
    Rule(
        "secure codes with full rounds",
        lambda m: m.secure and m.full_rounds and m.up.in_code_space,
        lambda m: (
            f"method.secure sums either {m.up.name}'s codes or full updates, which have another range; "
            "set full_rounds to 0"
        ),
    ),
    Rule(
        "scalars beside a robust aggregator",
        lambda m: m.scalars and not m.aggregator.linear,
        lambda m: (
            f"method.aggregator.kind is {m.aggregator.kind}, but {m.name} divides a sum of updates by a sum of "
            f"{' and '.join(m.scalars)}; use mean"
        ),
    ),
    Rule(
        "scalars beside lossy payloads",
        lambda m: m.scalars and m.full_rounds and m.up.in_code_space,
        lambda m: f"{m.name} sends {m.up.name}'s codes in every round; set full_rounds to 0",
    ),
    Rule(
        "private scalars",
        lambda m: m.scalars and (m.privacy or m.user_privacy),
        lambda m: (
            f"{m.name} sends {' and '.join(m.scalars)} in the clear, which no clip bounds and no noise covers, so it "
            "has no differential privacy; leave method.privacy and method.user_privacy out"
        ),
    ),
    Rule(
        "scalars beside a secure sum",
        lambda m: m.scalars and m.secure,
        lambda m: (
            f"{m.name} sends {' and '.join(m.scalars)} in the clear, and a secure sum of updates does not carry them; "
            "leave method.secure out"
        ),
    ),
    Rule(
        "two promises",
        lambda m: m.privacy and m.user_privacy,
        lambda m: "method.privacy is for each record, method.user_privacy for each client; set one of them",
    ),
    Rule(
        "private gradients in bfloat16",
        lambda m: m.privacy and m.local.precision != "float32",
        lambda m: (
            f"local.precision is {m.local.precision}, but the clipping of method.privacy is proved for float32 "
            'gradients; set local.precision="float32"'
        ),
    ),
    Rule(
        "private gradients that accumulate",
        lambda m: m.privacy and m.local.accumulate > 1,
        lambda m: (
            f"local.accumulate is {m.local.accumulate}, but method.privacy draws the records of each step by itself "
            f"and takes them in pieces that fit; set local.batch={m.local.step_size} and local.accumulate=1"
        ),
    ),
    Rule(
        "private codes",
        lambda m: _noised_sum(m) and m.up.in_code_space,
        lambda m: (
            f"user_privacy.where is sum, which adds up clipped updates, but {m.up.name} adds up codes; use another "
            f"codec, {CLIENT}"
        ),
    ),
    Rule(
        "private payloads that do not add up",
        lambda m: _noised_sum(m) and m.secure and ((m.up.lossy and not m.up.linear) or not m.up.payload.additive),
        lambda m: (
            f"method.secure cannot sum {m.up.name}'s messages, so clients cannot share the noise; use raw or sketch, "
            f"{CLIENT}"
        ),
    ),
    Rule(
        "a private robust aggregator",
        lambda m: _noised_sum(m) and not m.aggregator.linear,
        lambda m: (
            f"method.aggregator.kind is {m.aggregator.kind}, which does not bound the effect of one client; use mean, "
            f"{CLIENT}"
        ),
    ),
    Rule(
        "a noised sum with steps down",
        lambda m: _noised_sum(m) and not m.secure and m.down and m.down.reference == "last",
        lambda m: (
            f"method.down is {m.down and m.down.name}, which may skip a round and its noise if no client holds the "
            "server's weights; leave it out"
        ),
    ),
    Rule(
        "colluders without shared noise",
        lambda m: m.user_privacy and m.user_privacy.colluders and not (_noised_sum(m) and m.secure),
        lambda m: (
            f"user_privacy.colluders is {m.user_privacy and m.user_privacy.colluders}, but clients share noise only "
            'with user_privacy.where="sum" and method.secure; set it to 0'
        ),
    ),
    Rule(
        "integer noise with the PLD accountant",
        lambda m: m.user_privacy and m.user_privacy.accountant == "pld" and _noised_sum(m) and m.secure,
        lambda m: 'user_privacy.accountant is pld, but noise inside a secure sum is accounted by "rdp" only',
    ),
    Rule(
        "nothing to sum securely",
        lambda m: m.secure and not m.up.payload.additive and not m.full_rounds,
        lambda m: (
            f"method.secure needs messages that can be added, but {m.up.name}'s have to be decoded one by one; use "
            "raw, sketch or powersgd"
        ),
    ),
    Rule(
        "a secure sum with a robust aggregator",
        lambda m: m.secure and not m.aggregator.linear,
        lambda m: (
            f"method.aggregator.kind is {m.aggregator.kind}, which compares single updates, but in a secure sum the "
            "server sees none; use mean"
        ),
    ),
)


class Mismatch(ValueError):
    """Options that do not go together, and the row that says so."""

    def __init__(self, rule: str, sentence: str) -> None:
        self.rule = rule
        super().__init__(sentence)


def broken(m: Options) -> Iterator[Mismatch]:
    """The rows that a combination breaks."""
    return (Mismatch(rule.name, rule.says(m)) for rule in RULES if rule.broken(m))


def validate(m: Options) -> None:
    """Raise a `Mismatch` for the first row that the combination breaks."""
    for mismatch in broken(m):
        raise mismatch


def no_norms(m: Options) -> str:
    """Why clients cannot train batch norm layers of their own; empty if they can."""
    if m.trainer.no_norms:
        return m.trainer.no_norms
    codec = next((codec for codec in (m.up, m.down) if codec and codec.needs), None)
    return f"{codec.name} fits gradients of single records, at fixed running statistics" if codec else ""


def no_statistics(m: Options) -> str:
    """Why running statistics cannot travel beside updates; empty if they can."""
    if m.privacy or m.user_privacy:
        return "running statistics are means over records, which no clip bounds and no noise covers"
    if m.secure:
        return "running statistics would travel outside the secure sum"
    if m.up.in_code_space:
        return f"{m.up.name}'s messages have no room for running statistics"
    return no_norms(m)


def waits(m: Options) -> str:
    """Why a round needs the answers of its whole cohort at once; empty if it takes late ones too."""
    if m.secure:
        return IN_TURN
    if _noised_sum(m):
        return (
            "the ε of method.user_privacy is of cohorts that chance draws in each round, and a buffer holds who is fast"
        )
    if m.up.in_code_space:
        return f"the server averages {m.up.name}'s codes unseen, and codes of different rounds have no mean"
    if m.full_rounds:
        return "answers to ordinary questions would arrive in method.full_rounds"
    return f"{m.name}'s server step takes updates of one version of the weights" if m.own_step else ""


def validate_on(m: Options, task: Task) -> None:
    """Raise a ValueError if a codec would look at records past the noise."""
    if m.client_cost(task):
        for codec in dict.fromkeys(m.up.for_client(client) for client in range(len(task.clients))):
            if codec.reads_records:
                raise ValueError(
                    f"{codec.name} reads a client's records when it encodes, which bypasses the noise of differential "
                    f"privacy; set its {codec.reads_records}"
                )


def validate_sampling(m: Options, task: Task, sampler: CohortSampler) -> None:
    """Raise a ValueError if cohorts are too large for the codec, or drawn so that the promise does not hold."""
    asked = len(task.clients) if sampler.kind == "poisson" else min(sampler.size, len(task.clients))
    if m.up.most is not None and asked > m.up.most:
        raise ValueError(
            f"a round may ask {asked} clients, but {m.up.name}'s codes add up for {m.up.most} at most; set "
            f"method.up.cohort={asked}"
        )
    _validate_memory(m, task, asked)
    users = m.user_privacy
    if users is None or users.where != "sum":
        return
    if m.secure:
        enough = m.secure.quorum(min(sampler.size, len(task.clients)))
        if enough <= users.colluders:
            raise ValueError(
                f"user_privacy.colluders is {users.colluders}, but {enough} clients are enough for a sum, and they "
                f"would know all of its noise; set it to {enough - 1} or less"
            )
    elif sampler.quorum != 1:
        raise ValueError(
            f"cohort.quorum is {sampler.quorum:g}, but with method.user_privacy a skipped round would reveal who was "
            "drawn; leave it at 1"
        )


def _validate_memory(m: Options, task: Task, asked: int) -> None:
    """Raise a ValueError if the server has to hold all vectors of a cohort at once and has no memory for them."""
    if not m.needs_all:
        return
    needed, free = COPIES * 4 * task.layout.size * len(m.vectors) * asked, free_memory(task.device)
    if needed > free:
        raise ValueError(
            f"{m.needs_all} needs the vectors of all {asked:,} clients of a round at once, about {needed / 1e9:.3g} "
            f"GB, and {free / 1e9:.3g} GB are free on {task.device}; ask fewer clients, or take a mean, which needs no "
            "more for more of them"
        )
