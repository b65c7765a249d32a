"""FedPAQ: clients send what changed, quantized without bias to a few bits an entry.

Reisizadeh et al., "FedPAQ: A Communication-Efficient Federated Learning Method with Periodic Averaging and
Quantization", AISTATS 2020, arXiv:1909.13014; its quantizer (example 1) is QSGD's (arXiv:1610.02132).

    client i:  sends Q(x_i - x), every tensor by itself: its norm in 32 bits, then ``bits`` bits an entry
    server:    x_i' = x + Q(x_i - x), then as the wrapped method's;   x is sent to clients unchanged

    Q(v)_j = ||v|| sign(v_j) xi_j,   xi_j = (l + 1) / s with probability s |v_j| / ||v|| - l, else l / s

with l = floor(s |v_j| / ||v||) and s = 2^(bits - 1) - 1 levels of magnitude beside the sign. Q is unbiased, so the mean
of replies is right in expectation.

Deviations: the paper averages plainly, which is ``federation.weights: uniform``. Around a low-rank method the factors
are unbiased, but their product is only where one of them is the same for all clients (FFA-LoRA, RoLoRA). Levels have
codes of one length, s = 2^(bits - 1) - 1; the paper's s is free. The server's mean is in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from fedspan.core.method import Claims, Memory, declare_bounded
from fedspan.core.tensors import Tensors, create_generator
from fedspan.core.values import Client, Job
from fedspan.wrappers.compression import Compression

_NORM = 4  # bytes of a float32
_AT_ONCE = 2**18  # entries whose bits are expanded at once; a multiple of 8, so that parts end on a byte


@final
@dataclass(frozen=True, kw_only=True)
class FedPAQ(Compression):
    """Quantises replies.

    Args:
        bits: Bits per entry, sign included (2 to 16).
    """

    paper: ClassVar[str] = (
        "FedPAQ: A Communication-Efficient Federated Learning Method with Periodic Averaging and Quantization "
        "(AISTATS 2020, arXiv:1909.13014)"
    )
    key: ClassVar[str] = "fedpaq"

    bits: int = declare_bounded(8, 2, 16)

    def explain_refusal(self, claims: Claims) -> str | None:
        refusal = super().explain_refusal(claims)
        if refusal is None and claims.sends != "values":
            # Packed codes have no shape, so the server needs that of the start. The noise, in proportion to a tensor's
            # norm, is too large for whole gradients, sketches and factors, and would add up in control variates.
            other = claims.describe_other_replies()
            return f"sends changes of tensors from which all clients start alike, and this method's {other}"
        return refusal

    def compress(
        self, changes: Tensors, job: Job, client: Client, memory: Memory, round: int
    ) -> tuple[Tensors, Memory]:
        packed = {
            name: pack_levels(
                *quantize(change, self.bits, create_generator(self.seed, self.key, round, client.id, name)), self.bits
            )
            for name, change in changes.items()
        }
        return packed, memory

    def decompress(self, tensors: Tensors) -> Tensors:
        return {name: unpack_levels(value, self.bits) for name, value in tensors.items()}


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
