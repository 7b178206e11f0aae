"""What is settled before the first round: the noise, the first state, and whether all suits the task."""

from __future__ import annotations

from collections import Counter

from fedveil.core.account import AUTO
from fedveil.core.method import Method, State, require_method
from fedveil.core.sampling import CohortSampler
from fedveil.core.seeds import Seed
from fedveil.core.task import Task
from fedveil.core.timeline import asked_each_round

TRIAL = 100.0  # noise from which the noise that suffices is scaled


def settle(task: Task, method: Method, cohort: CohortSampler | int, rounds: int, seed: int = 0) -> Method:
    """The method with a number in place of noise "auto": the least with which all rounds stay within the budget.
    Schedules without a length of their own get these rounds.

    The noise depends on how often the client that is drawn most often will be asked, which the seed decides.
    """
    require_method(method)
    method = method.over(rounds)
    sampler = cohort if isinstance(cohort, CohortSampler) else CohortSampler(size=cohort)
    if method.promise is None or method.promise.noise != AUTO:
        return method
    account = method.with_noise(TRIAL).account(task, sampler)
    assert account
    answers = rounds if account.everyone else _most_asked(task, sampler, rounds, Seed.root(seed))
    return method.with_noise(account.least_noise(answers))


def settled_like(method: Method, other: Method) -> Method:
    """The method with the noise of `other` in place of "auto"."""
    ours, theirs = method.promise, other.promise
    if ours is None or theirs is None or ours.key != theirs.key or ours.noise != AUTO or theirs.noise == AUTO:
        return method
    return method.with_noise(theirs.noise)


def _most_asked(task: Task, cohort: CohortSampler, rounds: int, seed: Seed) -> int:
    """How often the client that is drawn most often is asked."""
    drawn = Counter(k for asked in asked_each_round(cohort, task, seed, rounds) for k in asked)
    return max(drawn.values(), default=1)


def _validate_buffer(task: Task, method: Method, cohort: CohortSampler) -> None:
    """Raise a ValueError if the server is not to wait for a cohort, and the method or the task needs it to."""
    if cohort.buffer is None:
        return
    if why := method.waits:
        raise ValueError(
            f"cohort.buffer is {cohort.buffer}, but {method.name} cannot use late answers: {why}; leave it out"
        )
    if cohort.buffer > len(task.clients):
        raise ValueError(
            f"cohort.buffer is {cohort.buffer}, but a buffer holds one answer of each client at most, and there are "
            f"{len(task.clients)}; use fewer"
        )


def private_root(number: int) -> Seed:
    """The root of what should be private, fixed for a test."""
    return Seed.root(number).child("insecure test noise")


def init_state(task: Task, method: Method, cohort: CohortSampler) -> State:
    """The state before the first round. A ValueError says what does not suit the task or the cohort."""
    largest = len(task.clients) if cohort.kind == "poisson" else min(cohort.size, len(task.clients))
    if largest < method.min_clients:
        raise ValueError(
            f"{method.name} with these settings needs at least {method.min_clients} clients per round, but a round has "
            f"at most {largest}; raise cohort.size"
        )
    _validate_buffer(task, method, cohort)
    if account := method.account(task, cohort):
        account.validate()
        if account.everyone and cohort.seed is not None:
            raise ValueError(
                f"cohort.seed is {cohort.seed}, but with this differential privacy cohorts are drawn in private; leave "
                "it out"
            )
    if task.norms.policy and (why := method.no_batch_norm(task.norms.policy)):
        raise ValueError(
            f"{method.name} with these settings cannot train batch norm layers that are {task.norms.policy}: {why}; "
            'set batch_norm to "frozen", or replace them with fv.group_norm(model)'
        )
    state = method.init_state(task)
    for operation in method.needs:
        task.require(operation, method.name)
    return state
