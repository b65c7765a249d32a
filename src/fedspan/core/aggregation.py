"""Aggregation of a stack of replies: weighted sums of products as pairs of factors, means, residuals.

Shapes: O output features, I input features, R rank, K clients, Q the sum of their ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from fedspan.core.base import Delta
from fedspan.core.lowrank import LowRank, assign_values_to_B, concatenate, svd
from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import LayerSpec, Reduced

T = TypeVar("T")


def map_layers(function: Callable[[LayerSpec], T], layers: Iterable[LayerSpec]) -> dict[str, T]:
    """Compute ``{layer.name: function(layer)}``, as many layers at a time as torch has threads.

    Each layer is computed on one thread: the QR and SVD of a few hundred columns are slower on several, and the
    result does not depend on the number of threads. A single layer is computed on the calling thread.
    """
    selected, threads = list(layers), torch.get_num_threads()
    torch.set_num_threads(1)  # the pool's threads start with this value
    try:
        if len(selected) < 2:
            return {layer.name: function(layer) for layer in selected}
        with ThreadPoolExecutor(min(threads, len(selected))) as pool:
            return dict(zip((layer.name for layer in selected), pool.map(function, selected), strict=True))
    finally:
        torch.set_num_threads(threads)


def sum_products(layer: str, reduced: Reduced) -> LowRank:
    """Compute ``sum_i p_i s_i B_i A_i`` of a stack of LoRA factors as one pair of rank Q.

    It is exact for any ranks and scalings. Weight p_i and scaling s_i multiply B alone.
    """
    a, b = join_tensor_name(layer, "A"), join_tensor_name(layer, "B")
    pairs = [
        LowRank(contribution.tensors[b], contribution.tensors[a], contribution.weight * contribution.client.scaling)
        for contribution in reduced.stack
    ]
    return concatenate(pairs)


def average_stack(reduced: Reduced) -> dict[str, Tensor]:
    """Compute the weighted mean of stacked tensors that have one shape for all clients, summed in float64."""
    means: dict[str, Tensor] = {}
    for name, like in reduced.stack[0].tensors.items():
        total = torch.zeros_like(like, dtype=torch.float64)
        for contribution in reduced.stack:
            total.add_(contribution.tensors[name], alpha=contribution.weight)
        means[name] = total.to(like.dtype)
    return means


def compute_residual(layer: str, reduced: Reduced, mean_B: Tensor, scaling: float, rank: int | None = None) -> LowRank:
    """Compute the loss of averaging, ``s (sum_i p_i B_i A_i - B A)`` with means B and A, as a pair of rank (K - 1) R.

    With ``sum_i p_i (B_i - B) = 0`` it is ``s sum_{i<K} p_i (B_i - B)(A_i - A_K)``: factors without an SVD.

    Args:
        reduced: K replies of one rank and scaling s.
        mean_B: Mean B, (O, R).
        scaling: Scaling s.
        rank: Maximum rank of a best approximation by an SVD of the factors; None: the exact residual.
    """
    a, b = join_tensor_name(layer, "A"), join_tensor_name(layer, "B")
    *others, last = reduced.stack
    empty = LowRank(mean_B[:, :0], last.tensors[a][:0])
    pairs = [
        LowRank(
            contribution.tensors[b] - mean_B, contribution.tensors[a] - last.tensors[a], contribution.weight * scaling
        )
        for contribution in others
    ]
    exact = concatenate([empty, *pairs])
    if rank is None or rank >= min(exact.rank, *exact.shape):
        return exact
    return assign_values_to_B(*svd(exact, rank)).to(mean_B.dtype)


def choose_smaller_form(pair: LowRank) -> Delta:
    """Return the pair, or the dense matrix where that has fewer elements."""
    rows, columns = pair.shape
    return pair if pair.numel() <= rows * columns else pair.to_dense()
