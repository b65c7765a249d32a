"""Unbiased quantization of a tensor to a few bits an entry, and the bytes that it takes (QSGD, arXiv:1610.02132).

    Q(x)_j = ||x|| sign(x_j) xi_j,   xi_j = (l + 1) / s with probability s |x_j| / ||x|| - l, else l / s

with l = floor(s |x_j| / ||x||) and s = 2^(bits - 1) - 1 levels of magnitude beside the sign.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_NORM = 4  # bytes of a float32
_AT_ONCE = 2**18  # entries whose bits are expanded at once; a multiple of 8, so that parts end on a byte


def compute_level_count(bits: int) -> int:
    """Return the number s of magnitude levels for which a code of ``bits`` bits holds the signed levels -s ... s."""
    return 2 ** (bits - 1) - 1


def quantize(value: Tensor, bits: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Quantise to levels in [-s, s], int64, of the same shape, and a float32 norm: ``norm * level / s`` is unbiased.

    The norm is rounded up to float32, so that no entry exceeds it and no level exceeds s.
    """
    exact, levels = value.double(), compute_level_count(bits)
    norm = exact.norm()
    rounded = norm.float()
    if rounded.double() < norm:
        rounded = torch.nextafter(rounded, torch.tensor(math.inf))
    scaled = levels * exact.abs() / rounded.double() if norm > 0 else torch.zeros_like(exact)
    lower = scaled.floor()
    up = torch.rand(value.shape, generator=rng, dtype=torch.float64) < scaled - lower
    return (exact.sign() * (lower + up)).to(torch.int64), rounded


def pack_levels(levels: Tensor, norm: Tensor, bits: int) -> Tensor:
    """Pack into a uint8 vector: the norm's 4 bytes, then codes level + s of ``bits`` bits, lowest bit first, padded."""
    codes = levels.flatten() + compute_level_count(bits)
    return torch.cat([norm.reshape(1).view(torch.uint8), *(_to_bytes(part, bits) for part in codes.split(_AT_ONCE))])


def unpack_levels(packed: Tensor, bits: int) -> Tensor:
    """Decode a packed tensor, flat, float32; padding in the last byte may decode to surplus entries at the end."""
    norm, stream = packed[:_NORM].clone().view(torch.float32), packed[_NORM:]
    codes = torch.cat([_from_bytes(part, bits) for part in stream.split(_AT_ONCE * bits // 8)])
    return (codes - compute_level_count(bits)).to(torch.float32) * (norm / compute_level_count(bits))


def _to_bytes(codes: Tensor, bits: int) -> Tensor:
    stream = (codes[:, None] >> torch.arange(bits) & 1).flatten().to(torch.uint8)
    stream = torch.nn.functional.pad(stream, (0, -stream.numel() % 8)).reshape(-1, 8)
    return (stream << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def _from_bytes(packed: Tensor, bits: int) -> Tensor:
    stream = (packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()
    stream = stream[: stream.numel() // bits * bits].reshape(-1, bits).to(torch.int64)
    return (stream << torch.arange(bits)).sum(1)
