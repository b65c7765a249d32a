"""Gaussian noise from a key: the same for the same key and label, and without the key as good as random.

torch's generator on a CPU has only 2^32 streams, whatever it is seeded with: who sees a noisy value could try them all.
Here a stream is SHAKE-256 of a key of 32 bytes. Every draw is the sum of four, halved: the gaps that floating-point
numbers leave in one draw would tell of what it was added to (Mironov, CCS 2012; the remedy is that of Holohan and
Braghin, arXiv 2107.10138).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["KEY_BYTES", "digest_of", "gaussian", "key_of_seed"]

KEY_BYTES = 32
_TERMS = 4
_BITS = 52  # with a half beside them, exact in a float64


def key_of_seed(seed: int) -> bytes:
    """The key of a simulation that can be repeated: who knows the seed knows the noise."""
    return hashlib.sha256(f"fedspan noise {seed}".encode()).digest()


def gaussian(key: bytes, shape: torch.Size, *label: int | str) -> Tensor:
    """Standard normal draws, float64 on the CPU.

    Args:
        key: 32 bytes.
        shape: of the draws.
        label: names the draw; under one key, another label gives unrelated draws.

    Raises:
        ValueError: for a key of another length.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key of {KEY_BYTES} bytes, not {len(key)}")
    count = shape.numel()
    if not count:
        return torch.zeros(shape, dtype=torch.float64)
    text = "\x1f".join(map(str, label)).encode()
    stream = hashlib.shake_256(key + text).digest(8 * _TERMS * count)
    bits = torch.frombuffer(bytearray(stream), dtype=torch.int64) & ((1 << _BITS) - 1)
    uniform = (bits.double() + 0.5) * 2.0**-_BITS
    draws = torch.special.ndtri(uniform).view(_TERMS, count).sum(0) / _TERMS**0.5
    return draws.view(shape)


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of named tensors on the CPU, in the order of their names."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        found.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
