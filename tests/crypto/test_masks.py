"""Masks: the keystream of the whole seed, and that they cancel in a sum."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cryptography", reason="the extra fedspan[secagg] is not installed")
pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")

from Crypto.Cipher import AES

from fedspan.crypto.keys import SessionKeys, derive_pair_seed, draw_secret
from fedspan.crypto.masks import Integers, add_mask
from helpers.randomness import chi_square

U32, U64 = np.dtype("<u4"), np.dtype("<u8")
SEED = bytes(range(32))
both = pytest.mark.parametrize("dtype", [U32, U64], ids=["32", "64"])


def generate_mask(seed: bytes, length: int, dtype: np.dtype[Any]) -> Integers:
    """Generate a seed's mask: what ``add_mask`` adds to zeros."""
    total: Integers = np.zeros(length, dtype)
    add_mask(total, seed)
    return total


@both
def test_every_bit_of_the_seed_counts_and_every_value_is_drawn(dtype: np.dtype[Any]) -> None:
    """The keystream of AES-256 as another library makes it; no folding of the seed, no value left out."""
    drawn = generate_mask(SEED, 3 << 18, dtype)
    counters = b"".join(number.to_bytes(16, "big") for number in range(drawn.nbytes // 16))
    assert drawn.tobytes() == AES.new(SEED, AES.MODE_ECB).encrypt(counters)
    seen = {drawn[:8].tobytes()}
    for place in range(256):
        flipped = bytearray(SEED)
        flipped[place // 8] ^= 1 << place % 8
        seen.add(generate_mask(bytes(flipped), 8, dtype).tobytes())
    for one, other in itertools.combinations(range(8), 2):  # pairs of words whose changes cancel under xor
        words = bytearray(SEED)
        words[4 * one] ^= 0x5A
        words[4 * other] ^= 0x5A
        seen.add(generate_mask(bytes(words), 8, dtype).tobytes())
    assert len(seen) == 1 + 256 + 28
    halves = np.bincount(drawn.view(np.uint16), minlength=1 << 16)
    assert halves.min() > 0
    assert abs(chi_square(halves)) < 5


def test_flower_s_generator_folds_its_seed_and_leaves_a_value_out() -> None:
    """Why it is not used: 2^32 masks are all there are."""
    utils = pytest.importorskip("flwr.common.secure_aggregation.secaggplus_utils")
    folded = bytearray(SEED)
    folded[0] ^= 0x5A
    folded[4] ^= 0x5A
    (one,), (other,) = (utils.pseudo_rand_gen(seed, 1 << 22, [(1000,)]) for seed in (SEED, bytes(folded)))
    assert (one == other).all()
    (bits,) = utils.pseudo_rand_gen(SEED, 2, [(1000,)])
    assert set(bits.tolist()) == {0}


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.integers(0, 3000), st.sampled_from([U32, U64]), st.integers(0, 2**32))
def test_masks_cancel(clients: int, length: int, dtype: np.dtype[Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = [rng.integers(0, 2 ** (8 * dtype.itemsize), length, np.uint64).astype(dtype) for _ in range(clients)]
    keys = [SessionKeys.derive(draw_secret(), "run/1") for _ in range(clients)]
    total = np.zeros(length, dtype)
    for i, value in enumerate(values):
        masked = value.copy()
        add_mask(masked, keys[i].own)
        for j, key in enumerate(keys):
            if i != j:
                add_mask(masked, derive_pair_seed(keys[i].masking, key.masking_public, "run/1"), 1 if i < j else -1)
        assert length < 8 or not np.array_equal(masked, value)
        total += masked
    for key in keys:
        add_mask(total, key.own, -1)
    assert np.array_equal(total, sum(values, np.zeros(length, dtype)))


@both
def test_a_vector_longer_than_a_chunk_is_masked_as_a_whole(dtype: np.dtype[Any]) -> None:
    """The mask of a longer vector begins with that of a shorter one, and does not repeat."""
    longer = generate_mask(SEED, (3 << 20) // dtype.itemsize + 5, dtype)
    assert np.array_equal(longer[:1000], generate_mask(SEED, 1000, dtype))
    step = (1 << 20) // dtype.itemsize
    assert not np.array_equal(longer[:step], longer[step : 2 * step])
