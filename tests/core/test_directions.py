"""Directions: the words of SplitMix64, the same in NumPy and PyTorch, and the laws they are made into."""

import math

import numpy as np
import pytest
import torch

from fedveil.core import directions
from fedveil.core.directions import LAWS, Directions, order, words

KEYS = np.array([0, 1234567, -5, -(2**63), 2**63 - 1])


def test_words_are_those_of_splitmix64():
    """Its first three outputs from the seed 1234567, as published with the algorithm's test vectors."""
    (found,) = words(KEYS[1:2, None], np.arange(3)).view(np.uint64).tolist()
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_words_and_signs_are_bit_for_bit_the_same_in_numpy_and_pytorch():
    places = np.arange(1000)
    ours = words(torch.from_numpy(KEYS)[:, None], torch.from_numpy(places))
    assert np.array_equal(words(KEYS[:, None], places), ours.numpy())
    for law in LAWS[1:]:
        law = Directions.of(law, 777, 100)
        assert np.array_equal(law.rows(np, KEYS, 60, 50), law.rows(torch, torch.from_numpy(KEYS), 60, 50).numpy())
    assert np.array_equal(order(np, KEYS, 99), order(torch, torch.from_numpy(KEYS), 99).numpy())


def test_gaussians_are_the_same_up_to_rounding_and_box_mullers():
    law = Directions.of("gaussian", 777, 100)
    ours, theirs = law.rows(np, KEYS, 60, 50), law.rows(torch, torch.from_numpy(KEYS), 60, 50).numpy()
    assert ours.dtype == theirs.dtype == np.float32
    assert np.abs(ours - theirs).max() < 2e-6
    word = int(words(KEYS[1:2], np.array([61 * 389 + 7])).view(np.uint64)[0])  # direction 61, place 7
    radius, angle = math.sqrt(-2 * math.log(((word >> 40) + 1) / 2**24)), 2 * math.pi * (word & (2**24 - 1)) / 2**24
    assert ours[1, 1, 7] == pytest.approx(radius * math.cos(angle), abs=1e-6)
    assert ours[1, 1, 389 + 7] == pytest.approx(radius * math.sin(angle), abs=1e-6)


def test_golden_directions():
    first = {law: Directions.of(law, 5, 4).rows(np, KEYS[1:2], 1, 1)[0, 0].tolist() for law in LAWS}
    assert first["gaussian"] == pytest.approx(GOLDEN["gaussian"], abs=1e-6)
    assert first["rademacher"] == GOLDEN["rademacher"]
    assert first["orthogonal"] == GOLDEN["orthogonal"]


GOLDEN = {
    "gaussian": [1.398151, 0.133286, -1.067345, 0.9086901, -0.4651451],
    "rademacher": [-1, 1, -1, 1, 1],
    "orthogonal": [-1, -1, -1, -1, 1],
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("piece", [None, 16])
def test_entries_from_one_to_another_are_those_of_the_whole_direction(law, piece):
    law = Directions.of(law, 201, 40)  # 101 cosines and 100 sines, or 4 words of signs
    whole = law.rows(np, KEYS, 3, 2)
    for start, stop in ((0, 201), (0, 7), (64, 65), (90, 101), (90, 130), (101, 102), (150, 201), (1, 200)):
        found = law.rows(np, KEYS, 3, 2, piece, (start, stop))
        np.testing.assert_allclose(found, whole[..., start:stop], atol=1e-6)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 200])
def test_a_direction_does_not_depend_on_what_is_drawn_with_it(law, size):
    law = Directions.of(law, size, 40)
    together = law.rows(np, KEYS, 0, 50)
    assert np.array_equal(together[2:3, 41:42], law.rows(np, KEYS[2:3], 41, 1))
    assert np.array_equal(together, law.rows(np, KEYS, 0, 50, piece=3))


@pytest.mark.parametrize("law", LAWS)
def test_the_second_moment_is_the_identity(law):
    """E[z zᵀ] = I and E[z] = 0, within five standard errors for each of 20 × 20 entries."""
    draws = 40_000
    z = Directions.of(law, 20, 8).rows(np, words(KEYS[:1], np.arange(draws // 8)), 0, 8).reshape(draws, 20)
    z = z.astype(np.float64)
    effective = draws if law != "orthogonal" else draws / 8  # those of a block depend on each other
    assert np.abs(z.T @ z / draws - np.eye(20)).max() < 5 * math.sqrt(2 / effective)
    assert np.abs(z.mean(0)).max() < 5 / math.sqrt(effective)
    if law == "gaussian":
        assert (z**4).mean() == pytest.approx(3, abs=5 * math.sqrt(96 / z.size))
        assert np.abs(z).max() < 5.8


def test_blocks_are_orthogonal_and_each_has_signs_of_its_own():
    law = Directions.of("orthogonal", 256, 100)
    assert law.block == 128
    z = law.rows(np, KEYS[:1], 0, 256)[0]
    assert np.array_equal(z[:128] @ z[:128].T, 256 * np.eye(128))
    assert np.array_equal(z[128:] @ z[128:].T, 256 * np.eye(128))
    assert 0 < np.abs(z[:128] @ z[128:].T).max() < 256
    rest = Directions.of("orthogonal", 250, 100)
    z = rest.rows(np, KEYS[:1], 0, 100)[0]
    assert np.abs(z @ z.T - 250 * np.eye(100)).max() <= 250 % 128
    assert Directions.of("orthogonal", 8, 100).block == 8  # no more than there are dimensions


def test_an_order_is_one_and_depends_on_the_key():
    found = order(np, KEYS, 50)
    assert (np.sort(found, 1) == np.arange(50)).all()
    assert not np.array_equal(found[0], found[1])


def test_an_unknown_law_is_refused():
    with pytest.raises(ValueError, match="'cauchy'; use gaussian, rademacher or orthogonal"):
        Directions("cauchy", 3)


# ---------------------------------------------------------------------------------------------------- the same bits

CORNERS = [
    ((u << 40 | turn) + 2**63) % 2**64 - 2**63
    for u in (0, 1, 2**24 - 1, 2**24 - 2, 2**23, 11863282, 11863283)  # around a power of two times the root of two
    for turn in (0, 1, 2**24 - 1, 2**21, 2**21 - 1, 2**22, 2**23, 3 * 2**22 + 5, 7 * 2**21)
]


def test_exact_gaussians_are_the_same_bits_in_both_libraries_and_near_the_others():
    drawn = np.concatenate([np.array(CORNERS), words(np.array([5]), np.arange(200_000))])
    pairs = [directions._exact_gaussians(xp, own) for xp, own in ((np, drawn), (torch, torch.from_numpy(drawn)))]
    for one, other in zip(*pairs, strict=True):
        assert one.dtype == np.float64
        assert np.array_equal(one.view(np.int64), other.numpy().view(np.int64))
    uniform, turn = (((drawn >> 40) & (2**24 - 1)) + 1) * 2.0**-24, (drawn & (2**24 - 1)) * 2.0**-24
    radius = np.sqrt(-2 * np.log(uniform))
    assert np.abs(pairs[0][0] - radius * np.cos(2 * np.pi * turn)).max() < 1e-10
    assert np.abs(pairs[0][1] - radius * np.sin(2 * np.pi * turn)).max() < 1e-10


@pytest.mark.parametrize("size", [1, 7, 65, 5001, 70_000])
@pytest.mark.parametrize("law", LAWS)
def test_a_combination_is_the_same_bits_in_both_libraries_however_it_is_cut(law, size):
    made = Directions.of(law, size, 11)
    c = (torch.randn(11, generator=torch.Generator().manual_seed(size)) * 10.0 ** torch.arange(-5, 6)).tolist()
    found = [made.combined(np, np.array([77]), c, piece) for piece in (None, 1024)]
    threads = torch.get_num_threads()
    for many in (1, 2):
        torch.set_num_threads(many)
        found.append(made.combined(torch, torch.tensor([77]), c, 1024 * many).numpy())
    torch.set_num_threads(threads)
    assert {each.tobytes() for each in found} == {found[0].tobytes()}
    assert found[0].dtype == np.float32
    rows = made.rows(torch, torch.tensor([77]), 0, 11)[0].double()
    expected = torch.tensor(c, dtype=torch.float64) @ rows
    assert torch.allclose(torch.from_numpy(found[0]).double(), expected, rtol=1e-5, atol=2e-6 * max(map(abs, c)))


def test_roots_are_the_same_bits_in_both_libraries():
    x = np.concatenate([[0.0, -0.0, 1.0, 4.0], 10 ** np.random.default_rng(0).uniform(-30, 30, 100_000)])
    one, other = directions.root(np, x), directions.root(torch, torch.from_numpy(x)).numpy()
    assert np.array_equal(one.view(np.int64), other.view(np.int64))
    assert np.allclose(one, np.sqrt(x), rtol=1e-11, atol=1e-100)
