"""Fixed orthonormal bases from a seed: dense, or structured so that they cost neither memory nor time.

Shapes: N the longer, K the shorter of a layer's two sides, R rank.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from fedspan.core.projectors import draw_random_projector
from fedspan.core.tensors import create_generator


@lru_cache(maxsize=256)
def draw_dense_bases(shape: tuple[int, int], seed: int, layer: str) -> tuple[Tensor, Tensor]:
    """Draw random L (O, K) with orthonormal columns and R (K, I) with orthonormal rows, K = min(O, I); float32.

    Both are uniformly distributed. Each takes a QR of a matrix as large as the layer, so the last ones are cached.
    """
    k = min(shape)
    L_OK = draw_random_projector(shape, k, "left", create_generator(seed, "L", layer))
    return L_OK, draw_random_projector(shape, k, "right", create_generator(seed, "R", layer))


def draw_mixing_keys(longer: int, shorter: int, seed: int, layer: str) -> tuple[Tensor, Tensor]:
    """Draw the keys of ``multiply_by_mixing``'s basis: K of N positions, (K,) int64, and signs, (N,) float32."""
    rng = create_generator(seed, "mixing", layer)
    positions_K = torch.randperm(longer, generator=rng)[:shorter]
    signs = torch.randint(0, 2, (longer,), generator=rng).float() * 2 - 1
    return positions_K, signs


def multiply_by_mixing(A_RK: Tensor, positions_K: Tensor, signs_N: Tensor) -> Tensor:
    """Compute ``A M`` (R, N) for the basis M = S C D (K, N), which has orthonormal rows and is not formed.

    S puts the K columns at their positions among N, C is the orthonormal cosine transform (its rows in the order in
    which one FFT of length N takes them), D flips signs. R N log N operations; every entry of M is of the order of 1 /
    sqrt(N), as in a random basis. Differentiable in A.
    """
    length = signs_N.numel()
    spread_RN = A_RK.new_zeros(*A_RK.shape[:-1], length).index_copy(-1, positions_K.long(), A_RK)
    number_N = torch.arange(length, device=A_RK.device, dtype=A_RK.dtype)
    phase_N = torch.polar(torch.full_like(number_N, math.sqrt(2 / length)), number_N * (-math.pi / (2 * length)))
    mixed_RN = (torch.fft.fft(spread_RN) * phase_N).real
    level_N = torch.ones_like(number_N).masked_fill(number_N == 0, math.sqrt(0.5))
    return mixed_RN * level_N * signs_N.to(A_RK.dtype)
