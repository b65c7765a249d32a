"""Random draws that privacy rests on, noise and samples: from a key, and pseudorandom to anyone without it.

torch's CPU generator has only 2^32 streams, whatever its seed, so an observer of a noisy value could try them all, and
with them all samples. Here a stream is SHAKE-256 of a 32-byte key. A Gaussian draw is half the sum of four draws: the
gaps that floating-point numbers leave in a single draw would reveal information about the value it is added to
(Mironov, CCS 2012; the remedy is that of Holohan and Braghin, arXiv 2107.10138).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

KEY_BYTES = 32
_TERMS = 4
_BITS = 52  # plus one half, exact in a float64


def derive_seed_key(seed: int) -> bytes:
    """Derive the key of a reproducible simulation: anyone with the seed knows all draws."""
    return hashlib.sha256(f"fedspan noise {seed}".encode()).digest()


def draw_gaussian(key: bytes, shape: torch.Size, *label: int | str) -> Tensor:
    """Draw standard normal values, float64 on the CPU.

    Args:
        key: Key of 32 bytes.
        label: Name of the draw; under one key, another label gives unrelated draws.
    """
    count = shape.numel()
    uniform = _draw_uniform(key, _TERMS * count, label)
    normals = torch.special.ndtri(uniform).view(_TERMS, count).sum(0) / _TERMS**0.5
    return normals.view(shape)


def draw_poisson_sample(key: bytes, rate: float, count: int, *label: int | str) -> Tensor:
    """Draw each of ``count`` positions independently with probability ``rate``.

    Args:
        key: Key of 32 bytes.
        label: Name of the draw; under one key, another label gives an unrelated sample.

    Returns:
        The positions in ascending order, int64; possibly none.
    """
    return (_draw_uniform(key, count, label) < rate).nonzero().flatten()


def _draw_uniform(key: bytes, count: int, label: tuple[int | str, ...]) -> Tensor:
    """Draw values strictly between 0 and 1, (count,), float64."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key of {KEY_BYTES} bytes, not {len(key)}")
    if not count:
        return torch.zeros(0, dtype=torch.float64)
    text = "\x1f".join(map(str, label)).encode()
    stream = hashlib.shake_256(key + text).digest(8 * count)
    bits = torch.frombuffer(bytearray(stream), dtype=torch.int64) & ((1 << _BITS) - 1)
    return (bits.double() + 0.5) * 2.0**-_BITS


def compute_tensor_digest(tensors: Mapping[str, Tensor]) -> str:
    """Compute the SHA-256 of named tensors on the CPU, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
