"""Random generators keyed by their purpose, so that no draw depends on the number of earlier draws."""

from __future__ import annotations

import hashlib
import json

import numpy as np


def make_generator(seed: int, *key: str | int) -> np.random.Generator:
    """Create a separate generator for each (seed, key); numpy's global state is neither read nor changed.

    Args:
        key: Purpose and subject of the draw, such as ``("split", "client-03")``.
    """
    digest = hashlib.sha256(json.dumps([seed, *key]).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))
