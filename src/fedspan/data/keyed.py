"""Generators keyed by what they are for, so that no draw depends on how many were made before it."""

from __future__ import annotations

import hashlib
import json

import numpy as np

__all__ = ["generator"]


def generator(seed: int, *key: str | int) -> np.random.Generator:
    """A generator of its own for each (seed, key); the global state of numpy is neither read nor changed.

    Args:
        seed: the run's seed.
        key: the purpose of the draw and whatever it is drawn for, such as ``("split", "client-03")``.
    """
    digest = hashlib.sha256(json.dumps([seed, *key]).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))
