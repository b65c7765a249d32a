"""Real numbers as integers of a ring, so that they can be summed under masks without rounding or overflow.

    x in [-c, c]  ->  round(x / c L) mod 2^b,   L = floor(2^(b - 1) / m) - 1   for at most m addends

A sum of m encodings is within +- m L < 2^(b - 1), so it is never taken for its negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Integers", "Ring"]

Integers = NDArray[Any]
"""uint32 or uint64."""


@dataclass(frozen=True)
class Ring:
    """The integers modulo 2^bits, and how real numbers stand in them.

    Args:
        bits: 32 or 64.
        clip: size of an addend's entries, at most.
        addends: of a sum, at most.
    """

    bits: int
    clip: float
    addends: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of its integers; little-endian, as the masks' keystream is read."""
        return np.dtype(f"<u{self.bits // 8}")

    @property
    def levels(self) -> int:
        """L: steps between 0 and ``clip``.

        Raises:
            ValueError: if there is no room for so many addends.
        """
        levels = 2 ** (self.bits - 1) // self.addends - 1
        if self.bits not in (32, 64) or self.addends < 2 or levels < 1:
            raise ValueError(f"no ring of {self.bits} bits has room for {self.addends} addends")
        return levels

    def encode(self, values: NDArray[np.float64]) -> Integers:
        """Real numbers as integers of the ring.

        Args:
            values: within +- ``clip``; what rounding brought beyond it is cut off.
        """
        signed = np.rint(values / self.clip * self.levels)
        # In 64 bits a float may round to 2^62, above L: the bound is kept on integers.
        bounded = np.clip(signed, -float(self.levels), float(self.levels)).astype(np.int64)
        return np.clip(bounded, -self.levels, self.levels).astype(self.dtype)

    def decode(self, total: Integers) -> NDArray[np.float64]:
        """A sum of encodings as real numbers."""
        return total.view(f"<i{self.bits // 8}").astype(np.float64) * (self.clip / self.levels)

    def error(self, count: int) -> float:
        """What a decoded sum of encodings is off by, at most, in any entry.

        Every addend is off by half a step, and by the roundings of float64 on the way, which count where steps are as
        small as they: at most 2^-49 of ``clip``.

        Args:
            count: of the addends.
        """
        return count * self.clip * (0.5 / self.levels + 2.0**-49)
