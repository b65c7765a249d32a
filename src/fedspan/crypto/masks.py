"""Masks: uniform integers of a ring, from a 32-byte seed.

The generator is AES-256 in counter mode with the seed as its key: the integers are the keystream, so all values of the
ring are equally likely, and guessing a mask means guessing 256 bits.
"""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR

from fedspan.crypto.ring import Integers

__all__ = ["add_mask", "mask"]

_CHUNK = 1 << 20
"""Bytes of keystream per step; a whole number of any ring's integers."""


def add_mask(total: Integers, seed: bytes, sign: int = 1) -> None:
    """Add a seed's mask to a vector in place, modulo the ring's size.

    Args:
        total: Contiguous integers of the ring.
        seed: Seed of 32 bytes, used for one mask only.
        sign: 1, or -1 to remove the mask.
    """
    stream = Cipher(AES256(seed), CTR(bytes(16))).encryptor()
    step, zeros = _CHUNK // total.itemsize, bytes(_CHUNK)
    for start in range(0, len(total), step):
        part = total[start : start + step]
        drawn = np.frombuffer(stream.update(zeros[: part.nbytes]), total.dtype)
        if sign > 0:
            part += drawn
        else:
            part -= drawn


def mask(seed: bytes, length: int, dtype: np.dtype[np.uint32] | np.dtype[np.uint64]) -> Integers:
    """Generate a seed's mask."""
    total: Integers = np.zeros(length, dtype)
    add_mask(total, seed)
    return total
