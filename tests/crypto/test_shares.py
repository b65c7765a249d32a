"""Secret shares: the threshold that opens them, and that fewer are noise."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")

from Crypto.Protocol.SecretSharing import Shamir

from fedspan.crypto.shares import SHARE, combine, split
from helpers.randomness import chi_square

SEED = bytes(range(32))


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(2, 8), st.integers(0, 6), st.randoms(use_true_random=False))
def test_any_threshold_of_shares_give_the_secret(secret: bytes, threshold: int, more: int, rng: random.Random) -> None:
    shares = split(secret, threshold, threshold + more)
    assert len(set(shares)) == threshold + more
    assert {len(share) for share in shares} == {SHARE}
    rng.shuffle(shares)
    assert combine(shares[:threshold], threshold) == secret
    assert combine(shares, threshold) == secret
    with pytest.raises(ValueError, match="it takes"):
        combine(shares[: threshold - 1], threshold)
    with pytest.raises(ValueError, match="it takes"):
        combine([shares[0]] * threshold, threshold)
    last = bytearray(shares[threshold - 1])
    last[-1] ^= 1
    assert combine([*shares[: threshold - 1], bytes(last)], threshold) != secret


@settings(max_examples=20, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(2, 12), st.integers(0, 100), st.randoms(use_true_random=False))
def test_shares_are_put_together_as_by_the_library(
    secret: bytes, threshold: int, more: int, rng: random.Random
) -> None:
    used = rng.sample(split(secret, threshold, threshold + more), threshold)
    halves = ([(int.from_bytes(one[:2], "big"), one[at : at + 16]) for one in used] for at in (2, 18))
    assert combine(used, threshold) == b"".join(Shamir.combine(half) for half in halves) == secret


def test_fewer_shares_than_the_threshold_are_noise() -> None:
    """One of two shares, over many divisions of one secret: every byte of it takes all values alike."""
    drawn = b"".join(split(SEED, 2, 3)[0][2:] for _ in range(2000))
    assert abs(chi_square(np.bincount(np.frombuffer(drawn, np.uint8), minlength=256))) < 5


def test_what_cannot_be_shared_is_refused() -> None:
    for secret, threshold, count in ((SEED[:16], 2, 3), (SEED, 1, 3), (SEED, 4, 3)):
        with pytest.raises(ValueError, match="shares of"):
            split(secret, threshold, count)
    with pytest.raises(ValueError, match="a share has 34 bytes"):
        combine([b"short"] * 2, 2)
