"""Shamir's secret sharing: t shares recover a secret, and fewer fit every secret there is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.privacy.secagg import shamir

secret = st.binary(min_size=32, max_size=32)


@st.composite
def deals(draw):
    points = draw(st.lists(st.integers(1, 5000), min_size=1, max_size=12, unique=True))
    return draw(secret), draw(st.integers(1, len(points))), points, draw(st.randoms())


@given(deals())
def test_any_t_shares_recover_the_secret(deal):
    hidden, t, points, random = deal
    shares = dict(zip(points, shamir.share(hidden, t, points), strict=True))
    chosen = random.sample(points, t)
    assert shamir.recover({x: shares[x] for x in chosen}) == hidden
    assert all(len(s) == shamir.SHARE for s in shares.values())


@settings(max_examples=30)
@given(secret, secret, st.integers(2, 9))
def test_fewer_than_t_shares_fit_every_secret(hidden, other, t):
    few = dict(enumerate(shamir.share(hidden, t, range(1, t + 1))[:-1], 1))
    weights = shamir._lagrange(tuple(range(1, t + 1)))
    known = sum(w * int.from_bytes(s, "little") for w, s in zip(weights, few.values(), strict=False))
    missing = (int.from_bytes(other, "little") - known) * pow(weights[-1], -1, shamir.PRIME) % shamir.PRIME
    assert shamir.recover(few | {t: missing.to_bytes(shamir.SHARE, "little")}) == other
    assert shamir.recover(few) != hidden


def test_shares_of_one_secret_are_never_the_same_twice():
    assert shamir.share(bytes(32), 2, [1, 2]) != shamir.share(bytes(32), 2, [1, 2])


def test_secrets_at_the_ends_of_the_range():
    for hidden in (bytes(32), b"\xff" * 32):
        assert shamir.recover(dict(enumerate(shamir.share(hidden, 3, [1, 2, 3]), 1))) == hidden


def test_shares_of_no_32_byte_secret_recover_nothing():
    assert shamir.recover({1: (2**256 + 5).to_bytes(33, "little")}) is None


def test_the_field_is_the_smallest_prime_above_all_secrets():
    def prime(p):  # Miller and Rabin
        odd = (p - 1) // ((p - 1) & (1 - p))
        for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
            power, exponent = pow(base, odd, p), odd
            while exponent != p - 1 and power not in (1, p - 1):
                power, exponent = power * power % p, exponent * 2
            if power != p - 1 and exponent != odd:
                return False
        return True

    assert prime(shamir.PRIME)
    assert not any(prime(p) for p in range(2**256 + 1, shamir.PRIME, 2))


@pytest.mark.parametrize(
    ("hidden", "t", "points"), [(b"short", 1, [1]), (bytes(32), 3, [1, 2]), (bytes(32), 1, [0, 1])]
)
def test_what_cannot_be_shared_is_an_error(hidden, t, points):
    with pytest.raises(ValueError, match="a secret has 32 bytes"):
        shamir.share(hidden, t, points)
