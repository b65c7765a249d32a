"""Real numbers as integers of a ring, so that they can be summed under masks without overflow.

    x in [-c, c]  ->  floor(x / c L + u) mod 2^b,   L = floor(2^(b - 1) / m) - 1   for at most m addends,   u in [0, 1)

A sum of m encodings is within +- m L < 2^(b - 1), so its sign is unambiguous.

The rounding is stochastic: its mean is x, whatever the step c / L is. With rounding to the nearest integer, whoever
chooses coarse steps (by c, m or the weights) would round all addends but the largest one to zero and receive that one
alone. Here the others' entries stay in the sum, as rare whole steps. The draws u follow from the addend itself, so that
equal runs have equal bits, and nobody can predict them without the addend.

Masks: uniform integers of a ring, from a 32-byte seed.

The generator is AES-256 in counter mode with the seed as its key: the integers are the keystream, so all values of the
ring are equally likely, and guessing a mask means guessing 256 bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

Integers = NDArray[Any]
"""Array of uint32 or uint64."""


@dataclass(frozen=True)
class Ring:
    """The integers modulo 2^bits, and their encoding of real numbers.

    Args:
        bits: Bits per integer, 32 or 64.
        clip: Maximum magnitude of an addend's entries.
        addends: Maximum number of addends in a sum.
    """

    bits: int
    clip: float
    addends: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the integers; little-endian, as the masks' keystream is read."""
        return np.dtype(f"<u{self.bits // 8}")

    @property
    def levels(self) -> int:
        """Number L of steps between 0 and ``clip``.

        Raises:
            ValueError: If there is no room for so many addends.
        """
        levels = 2 ** (self.bits - 1) // self.addends - 1
        if self.bits not in (32, 64) or self.addends < 2 or levels < 1:
            raise ValueError(f"no ring of {self.bits} bits has room for {self.addends} addends")
        return levels

    def encode(self, values: NDArray[np.float64]) -> Integers:
        """Encode real numbers as integers of the ring.

        Args:
            values: Numbers within +- ``clip``; excess from rounding is clipped.
        """
        steps = values / self.clip * self.levels
        seed = hashlib.sha256(b"fedspan rounding" + np.ascontiguousarray(values).tobytes()).digest()
        for part, drawn in _draw_keystream(steps, seed, np.dtype("<u4")):
            part += drawn * 2.0**-32
        signed = np.floor(steps)
        # In 64 bits a float may round to 2^62, above L: the bound is enforced on integers.
        bounded = np.clip(signed, -float(self.levels), float(self.levels)).astype(np.int64)
        return np.clip(bounded, -self.levels, self.levels).astype(self.dtype)

    def decode(self, total: Integers) -> NDArray[np.float64]:
        """Decode a sum of encodings to real numbers."""
        return total.view(f"<i{self.bits // 8}").astype(np.float64) * (self.clip / self.levels)

    def bound_error(self, count: int) -> float:
        """Bound the error of a decoded sum of encodings, in any entry.

        Every addend has an error of at most one step, plus float64 rounding errors, which matter where steps are as
        small as these: at most 2^-49 of ``clip``.
        """
        return count * self.clip * (1 / self.levels + 2.0**-49)


_CHUNK = 1 << 18
"""Numbers that are drawn in one step."""


def add_mask(total: Integers, seed: bytes, sign: int = 1) -> None:
    """Add a seed's mask to a vector in place, modulo the ring's size.

    Args:
        total: Contiguous integers of the ring.
        seed: Seed of 32 bytes, used for one mask only.
        sign: 1, or -1 to remove the mask.
    """
    for part, drawn in _draw_keystream(total, seed, total.dtype):
        if sign > 0:
            part += drawn
        else:
            part -= drawn


def _draw_keystream(
    values: NDArray[Any], seed: bytes, dtype: np.dtype[Any]
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield the parts of a vector, as views, with as many integers of a seed's keystream."""
    stream = Cipher(AES256(seed), CTR(bytes(16))).encryptor()
    zeros = bytes(_CHUNK * dtype.itemsize)
    for start in range(0, len(values), _CHUNK):
        part = values[start : start + _CHUNK]
        yield part, np.frombuffer(stream.update(zeros[: len(part) * dtype.itemsize]), dtype)
