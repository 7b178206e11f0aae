"""The audit of noised sums: it contradicts what is too weak, and not what is charged."""

import dataclasses
import math

import numpy as np
import pytest
import torch

import fedveil as fv
from codec_tools import stack_of
from fedveil.attacks.users import SumAudit, audit, encoded, neighbours, ruled_out
from fedveil.codecs.raw import Update
from fedveil.privacy.accountant import Noised, epsilon
from fedveil.privacy.secagg import masks
from fedveil.privacy.secagg.client import Summand
from fedveil.privacy.skellam import SumNoise
from toys import linear_task

SEED = fv.Seed.root(7)
ZERO = fv.UserLevel(noise=2.0, clip=0.5, delta=1e-3, relation="zero-out")
REPLACED = dataclasses.replace(ZERO, relation="replacement", colluders=1)


@pytest.mark.parametrize(
    ("how", "bits", "size"), [(ZERO, 8, 100), (ZERO, 20, 20_010), (REPLACED, 8, 16), (REPLACED, 20, 20_010)]
)
def test_sums_do_not_contradict_what_is_charged_and_without_noise_they_do(how, bits, size):
    found = audit(how, fv.SecureSum(bits=bits), size, 5, SEED, trials=8000)
    assert found.epsilon == pytest.approx({"zero-out": 1.55, "replacement": 3.55}[how.relation], rel=0.01)
    assert found.lower < found.curve < found.epsilon < found.control
    assert found.curve > 0.65 * found.epsilon
    assert found.lower > 0.3 * found.epsilon or how is ZERO  # of which 8000 sums may tell nothing
    assert (found.clients, found.relation, list(found.broken())) == (3 - how.colluders, how.relation, [])


@pytest.mark.parametrize("size", [1, 16])
def test_noise_that_is_too_small_is_caught(size):
    """A quarter of the deviation, as if every client counted on 16 times as many."""
    fixed = fv.SecureSum(bits=8).noised(SumNoise(2.0)).fixed_point(3, 3, {}, Update)
    weak = dataclasses.replace(fixed, clip=0.5, variance=fixed.variance / 16)
    found, curve = ruled_out(encoded(weak), neighbours(ZERO, size), 3, 10_000, ZERO.delta, SEED)
    charged = epsilon([ZERO.step(8, size)], ZERO.delta)
    assert curve > found > 1.5 * charged
    told = SumAudit(10_000, 3, "zero-out", ZERO.delta, charged, found, 8.0)
    assert "noised sums rule out every ε below" in next(told.broken())


def test_noise_that_is_a_little_too_small_is_caught_by_the_curve():
    """Two clients' noise where three were counted on: one pair (ε, δ) does not notice."""
    fixed = fv.SecureSum(bits=20).noised(SumNoise(2.0)).fixed_point(3, 3, {}, Update)
    weak = dataclasses.replace(fixed, clip=0.5)
    found, curve = ruled_out(encoded(weak), neighbours(ZERO, 1), 2, 20_000, ZERO.delta, SEED)
    assert found < epsilon([ZERO.step(20, 1)], ZERO.delta) < curve


def test_rounded_shares_of_gaussian_noise_are_caught():
    """What the secure sum did before: 287 clients of whom 144 suffice, 4 bits over ±(1 + 8σ/√3) C, to the nearest. A
    share of deviation σC/12 is far below half a step of 1.37 C, so that it rounds to nothing."""
    clip, reach = 0.5, 0.5 * (1 + 16 / math.sqrt(3))

    def shares(updates, key, draw):
        noise = np.random.default_rng(list(key)).normal(0, 2.0 * clip / 12, updates.shape)
        return np.floor((updates + noise) / reach * 7.5 + 8).astype(np.int64)

    charged = epsilon([Noised(2.0, 1.0, 1)], ZERO.delta)
    assert charged == pytest.approx(1.55, abs=0.005)
    middle = np.full(1, reach / 15, np.float32)  # what is rounded the least
    found, _ = ruled_out(shares, neighbours(ZERO, 1), 287, 4000, ZERO.delta, SEED, others=middle)
    assert found > 2 * charged


def test_what_is_audited_is_what_a_client_gives_to_the_sum():
    how = dataclasses.replace(fv.SecureSum(bits=8), clip=0.5).noised(SumNoise(2.0))
    stack, fixed = stack_of(linear_task(), 0, 1), how.fixed_point(4, 3, {}, Update)
    update = torch.linspace(-0.2, 0.15, 8)
    sent = Summand(how, {})._encoded(stack, 1, fixed, Update(update), 8)[:-2]
    key = masks.derive(stack.secrets("sum noise")[1].key, b"fedveil sum noise")
    found = encoded(fixed)(update.numpy()[None], key, stack.seeds("rounding")[1].numpy())
    np.testing.assert_array_equal(found[0], sent.view(np.dtype(f"i{sent.itemsize}")))
