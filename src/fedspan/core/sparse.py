"""Sparse weight changes: entries selected from a seed, and the matrix that their values represent.

Shapes: O output features, I input features, N selected entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedspan.core.tensors import create_generator


def count_entries(shape: tuple[int, int], density: float) -> int:
    """Return the number of entries of a weight that a density means: at least one."""
    return max(1, round(density * shape[0] * shape[1]))


def draw_entries(shape: tuple[int, int], density: float, seed: int, layer: str) -> Tensor:
    """Draw distinct entries of a weight, uniformly at random, as sorted row-major positions: (N,) int64.

    The same seed gives the same entries.
    """
    rows, columns = shape
    order = torch.randperm(rows * columns, generator=create_generator(seed, "mask", layer))
    return order[: count_entries(shape, density)].sort().values


def scatter_entries(values_N: Tensor, entries_N: Tensor, shape: tuple[int, int]) -> Tensor:
    """Build the (O, I) matrix with these values at these entries and zeros elsewhere; differentiable in the values."""
    return values_N.new_zeros(shape[0] * shape[1]).index_put((entries_N,), values_N).view(shape)
