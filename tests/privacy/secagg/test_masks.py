"""Key exchange, derivation and streams against their RFCs' vectors; fixed point against its stated bound."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.core.message import Refused
from fedveil.privacy.secagg import masks
from fedveil.privacy.secagg.masks import FixedPoint
from fedveil.privacy.skellam import rounded

h = bytes.fromhex
SUNSCREEN = (
    b"Ladies and Gentlemen of the class of '99: "
    b"If I could offer you only one tip for the future, sunscreen would be it."
)

# ---------------------------------------------------------------------------------------------------- vectors


def test_x25519_is_that_of_rfc_7748():
    alice = h("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = h("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    to_alice, to_bob = masks.public_key(alice), masks.public_key(bob)
    assert to_alice == h("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
    assert to_bob == h("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
    shared = h("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
    assert masks.exchange(alice, [to_bob]) == masks.exchange(bob, [to_alice]) == [shared]


@pytest.mark.parametrize("point", [0, 1, 2**255 - 20, 2**255 - 19, 2**255 - 18], ids=["0", "1", "p-1", "p", "p+1"])
def test_a_public_key_of_low_order_is_refused(point):
    with pytest.raises(Refused, match="bad key"):
        masks.exchange(bytes(range(32)), [point.to_bytes(32, "little")])


@pytest.mark.parametrize(
    ("secret", "salt", "info", "key"),
    [
        (
            b"\x0b" * 22,
            bytes(range(13)),
            bytes(range(0xF0, 0xFA)),
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (
            b"\x0b" * 22,
            None,
            b"",
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
)
def test_derivation_is_that_of_rfc_5869(secret, salt, info, key):
    assert masks.derive(secret, info, salt, 42) == h(key)
    assert masks.derive(secret, info + b"!", salt, 42) != h(key)


def test_the_key_stream_is_that_of_rfc_8439():
    stream = masks.key_stream(bytes(range(32)), h("000000000000004a00000000"), counter=1)
    assert stream.update(SUNSCREEN) == h(
        "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0bf91b65c5524733ab8f593dabcd62b357"
        "1639d624e65152ab8f530c359f0861d807ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab7793736"
        "5af90bbf74a35be6b40b8eedf2785e42874d"
    )


def test_sealing_is_that_of_rfc_8439():
    key, nonce = bytes(range(0x80, 0xA0)), h("070000004041424344454647")
    sealed = masks.seal(key, nonce, SUNSCREEN, h("50515253c0c1c2c3c4c5c6c7"))
    assert sealed == nonce + h(
        "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d63dbea45e8ca9671282fafb69da92728b"
        "1a71de0a9e060b2905d6a5b67ecd3b3692ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc"
        "3ff4def08e4b7a9de576d26586cec64b6116"
        "1ae10b594f09e26a7e902ecbd0600691"
    )
    assert masks.unseal(key, sealed, h("50515253c0c1c2c3c4c5c6c7")) == SUNSCREEN
    assert masks.unseal(key, sealed, b"somebody else") is None
    assert masks.unseal(key, sealed[:-1] + b"\0", h("50515253c0c1c2c3c4c5c6c7")) is None


# ---------------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
@pytest.mark.parametrize("size", [1, 7, 65_536, 65_537, 200_001])
def test_a_mask_is_the_key_stream_element_by_element(dtype, size):
    vector, key = np.arange(size, dtype=dtype), bytes(range(32))
    masks.mask(vector, [key])
    stream = masks.key_stream(key).update(bytes(vector.nbytes))
    np.testing.assert_array_equal(vector, np.arange(size, dtype=dtype) + np.frombuffer(stream, dtype))
    masks.mask(vector, [], [key])
    np.testing.assert_array_equal(vector, np.arange(size, dtype=dtype))


def test_no_two_elements_share_a_mask():
    vector = np.zeros(300_000, np.uint64)
    masks.mask(vector, [b"k" * 32])
    assert len(np.unique(vector)) == len(vector)


def test_seeds_that_fold_to_the_same_32_bits_give_different_masks():
    """A known failure: folding a seed to 32 bits leaves an attacker four billion masks to try."""
    seed, first = bytes(range(32)), b"word"
    last = bytes(a ^ b ^ c for a, b, c in zip(seed[:4], seed[28:], first, strict=True))
    other = first + seed[4:28] + last

    def fold(data):
        return np.bitwise_xor.reduce(np.frombuffer(data, np.uint32))

    assert fold(seed) == fold(other)
    mine, its = np.zeros(1000, np.uint32), np.zeros(1000, np.uint32)
    masks.mask(mine, [seed])
    masks.mask(its, [other])
    assert np.count_nonzero(mine == its) < 5


def test_every_bit_of_a_key_counts():
    key, seen = bytearray(32), set()
    for bit in range(256):
        key[bit // 8] ^= 1 << bit % 8
        vector = np.zeros(4, np.uint32)
        masks.mask(vector, [bytes(key)])
        seen.add(vector.tobytes())
        key[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 256


# ---------------------------------------------------------------------------------------------------- fixed point


@st.composite
def cohorts(draw):
    """Values and weights of a cohort, with weights from one record to a million."""
    n, size = draw(st.integers(1, 9)), draw(st.integers(1, 20))
    clip, bits = draw(st.sampled_from([1e-3, 0.1, 1.0, 50.0])), draw(st.sampled_from([8, 16, 20, 24, 40]))
    weights = draw(st.lists(st.integers(1, 10**6), min_size=n, max_size=n))
    draws = np.random.default_rng(draw(st.integers(0, 2**32)))
    return FixedPoint(n, clip, bits, 10**6), weights, draws.uniform(-clip, clip, (n, size)).astype(np.float32)


@given(cohorts())
def test_the_mean_is_within_the_stated_bound_of_the_float_mean(cohort):
    fixed, weights, values = cohort
    draw = np.random.default_rng(1)
    values = np.clip(values, -np.float32(fixed.clip), np.float32(fixed.clip))
    total = sum(fixed.encode(v, w, draw) for v, w in zip(values, weights, strict=True))
    assert total.dtype == (np.uint64 if fixed.wide else np.uint32)
    fixed.check(total, len(weights))
    decoded, weight, clipped = fixed.decode(total)
    assert weight == sum(weights)
    assert clipped == 0
    mean, true = decoded * fixed.heaviest / weight, np.average(values.astype(np.float64), axis=0, weights=weights)
    assert np.abs(mean - true).max() <= fixed.error(len(weights), weight) * (1 + 1e-6)


def test_the_bound_is_not_loose():
    """With equal weights the error of one client comes near a step."""
    fixed, draws = FixedPoint(1, 1.0, 8, 1), np.random.default_rng(0)
    values = draws.uniform(-1, 1, 10_000).astype(np.float32)
    decoded, _, _ = fixed.decode(fixed.encode(values, 1, draws))
    assert 0.99 < np.abs(decoded - values).max() / fixed.error(1, 1) <= 1 + 1e-6


@pytest.mark.parametrize("weight", [0, -1, 1001, 10**12])
def test_a_weight_out_of_range_is_an_error(weight):
    """A known failure: a weight beyond its range gave a wrong mean without a word."""
    with pytest.raises(Refused, match=f"out of range: the weight is {weight}, the public maximum 1000"):
        FixedPoint(3, 1.0, 20, 1000).encode(np.zeros(4, np.float32), weight, np.random.default_rng(0))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused_before_it_is_rounded(value):
    values = np.zeros(100_000, np.float32)
    values[70_000] = value
    with pytest.raises(Refused, match="not finite"):
        FixedPoint(3, 1.0, 20, 1000).encode(values, 5, np.random.default_rng(0))


def test_values_beyond_the_range_are_cut_and_counted():
    fixed = FixedPoint(2, 0.5, 20, 10)
    cut, kept = np.array([0.6, -7.0, 0.5, 1e30], np.float32), np.array([0.5, -0.5, 0.5, 0.5], np.float32)
    one, other = (fixed.encode(each, 10, np.random.default_rng(0)) for each in (cut, kept))
    np.testing.assert_array_equal(one[:-1], other[:-1])
    assert (one[-1], other[-1]) == (3, 0)
    assert fixed.decode(one + one)[2] == 6


@pytest.mark.parametrize(
    ("n", "bits", "heaviest", "wide"),
    [
        (4096, 20, 1, False),
        (4097, 20, 1, True),
        (2, 31, 1, False),
        (3, 31, 1, True),
        (10, 20, 429_496_729, False),
        (10, 20, 429_496_730, True),
    ],
)
def test_64_bits_are_taken_where_the_sum_would_not_fit_32(n, bits, heaviest, wide):
    fixed = FixedPoint(n, 1.0, bits, heaviest)
    assert fixed.wide == wide
    high, low = (fixed.encode(np.full(1, x, np.float32), heaviest, np.random.default_rng(0)) for x in (1, -1))
    assert n * int(high[0]) < 2 ** (8 * high.itemsize - 1)
    assert n * int(high[1]) < 2 ** (8 * high.itemsize)
    assert high[0] == 2 ** (bits - 1) - 1
    assert not (high + low)[0]


@pytest.mark.parametrize("bits", [2, 4, 8, 20])
def test_zero_stays_zero_and_rounding_is_right_on_average(bits):
    """Once 100 rounds of zero updates moved the weights by 0.39 at 8 bits."""
    fixed, draw = FixedPoint(5, 1.0, bits, 1), np.random.default_rng(3)
    assert not fixed.encode(np.zeros(1000, np.float32), 1, draw)[:-2].any()
    values = np.repeat(np.float32([0.3, -0.3, 0.01, -0.7]), 40_000)
    decoded, _, _ = fixed.decode(fixed.encode(values, 1, draw))
    off = (decoded - values).reshape(4, -1)
    assert np.abs(off.mean(1)).max() * fixed.half < 6 * 0.5 / np.sqrt(40_000)
    assert np.abs(off).max() * fixed.half < 1


@pytest.mark.parametrize(("size", "bits"), [(100, 8), (20_000, 8), (20_000, 4), (5, 2)])
def test_the_norm_after_rounding_is_within_the_bound_that_privacy_is_charged_for(size, bits):
    fixed, draw = FixedPoint(5, 0.5, bits, 1), np.random.default_rng(4)
    bound = rounded(fixed.half, size)
    for values in (
        np.full(size, 0.5 / np.sqrt(size)),  # everywhere between two whole numbers
        np.eye(1, size)[0] * 0.5,
        draw.normal(size=size) * 10,  # too long: it is cut here too
    ):
        for _ in range(20):
            elements = fixed.encode(values.astype(np.float32), 1, draw, bound)
            whole = elements[:-2].view(np.dtype(f"i{elements.itemsize}")).astype(np.float64)
            assert np.linalg.norm(whole) <= bound
            assert elements[-1] == 0, "how many values were cut would be another thing that is told"
    assert np.linalg.norm(np.round(np.full(size, fixed.half))) > bound or size < 10


def test_what_cannot_be_rounded_within_the_norm_is_rounded_towards_zero():
    fixed = FixedPoint(5, 1.0, 8, 1)
    values = np.float32([0.5, -0.4999, 0.3])
    found = fixed.decode(fixed.encode(values, 1, np.random.default_rng(0), norm=1e-3))[0]
    np.testing.assert_array_equal(found * fixed.half, np.trunc(values.astype(np.float64) * fixed.half))


@pytest.mark.parametrize("place", [0, 5, -2, -1])
@pytest.mark.parametrize("added", [1 << 31, 1 << 25, (1 << 32) - (1 << 22)])
def test_a_sum_that_honest_clients_cannot_have_is_refused(place, added):
    """One client once added 2^31 to an element and moved a weight by 821, unnoticed."""
    fixed, draw = FixedPoint(5, 1.0, 20, 10), np.random.default_rng(0)
    total = sum(fixed.encode(draw.uniform(-1, 1, 8).astype(np.float32), 10, draw) for _ in range(5))
    fixed.check(total, 5)
    total[[place]] += np.uint32(added)
    with pytest.raises(Refused, match="out of range"):
        fixed.check(total, 5)


def test_noise_has_room_in_the_ring_and_within_the_range():
    quiet, noised = FixedPoint(100, 1.0, 25, 1), FixedPoint(100, 1.0, 25, 1, variance=(2.0**24) ** 2)
    assert not quiet.wide
    assert noised.wide
    assert noised.reach(4) == 4 * noised.half + 8 * 2 * 2**24 + 64


def test_a_sum_that_64_bits_do_not_hold_is_an_error_in_one_sentence():
    with pytest.raises(ValueError, match=r"needs more than 64 bits; set fewer bits$"):
        FixedPoint(4097, 1.0, 52, 1)
