"""Parametrizations of several clients at once, and their products with each client's rows.

Shapes: C clients, B examples of each, O output features, I input features, R rank; N rows of a client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedspan.core.lowrank import LowRank
from fedspan.core.parametrization import Effective, Parametrization
from fedspan.models.operators import Linear, Operator

__all__ = ["StackedPair", "added", "apply", "joins", "product", "stacked_effective"]


def stacked_effective(parametrization: Parametrization, slots: Mapping[str, Tensor], clients: int) -> Effective:
    """Compute a parametrization's ``Effective`` for every client at once.

    Args:
        parametrization: Parametrization of one layer, the same for all clients.
        slots: Stacked slots by name, (C, ...) each.
        clients: Number of clients, C.

    Returns:
        The ``Effective``; its pair is a ``StackedPair`` or a matrix (C, O, I), its weight (C, O, I).
    """
    kept: list[Effective] = []

    def one(own: dict[str, Tensor]) -> tuple[Tensor, ...]:
        effective = parametrization.effective(own)
        kept.append(effective)
        pair = effective.pair
        parts = () if pair is None else ((pair.B, pair.A) if isinstance(pair, LowRank) else (pair,))
        return parts if effective.weight is None else (*parts, effective.weight)

    made = vmap(one)(dict(slots))
    effective = kept[0]
    weight = None if effective.weight is None else made[-1]
    pair: Any = None
    if isinstance(effective.pair, LowRank):
        pair = StackedPair(made[0], made[1], effective.pair.scale)
    elif effective.pair is not None:
        pair = made[0]
    return Effective(pair, weight, effective.base, effective.dropout)


class StackedPair:
    """``scale * B A`` for every client: B (C, O, R), A (C, R, I)."""

    def __init__(self, B: Tensor, A: Tensor, scale: float) -> None:
        self.B, self.A, self.scale = B, A, scale

    def to(self, dtype: torch.dtype) -> StackedPair:
        """Convert to another number format."""
        return StackedPair(self.B.to(dtype), self.A.to(dtype), self.scale)


def joins(operator: Operator, pair: Any, x_CB: Tensor, y: Tensor) -> bool:
    """Check whether ``added`` can be used."""
    return isinstance(operator, Linear) and isinstance(pair, StackedPair) and pair.A.dtype == x_CB.dtype == y.dtype


def added(y_CNO: Tensor, pair: StackedPair, x_CB: Tensor) -> Tensor:
    """Compute ``y + scale * x A^T B^T`` client by client; A, B and y must share one number format."""
    h_CNR = torch.bmm(x_CB.flatten(1, -2), pair.A.mT)
    return torch.baddbmm(y_CNO, h_CNR, (pair.B * pair.scale).mT)


def product(operator: Operator, pair: Any, x_CB: Tensor, like: torch.dtype) -> Tensor:
    """Apply each client's change of weight to its rows, (C, B, ..., O): ``Operator.product`` client by client."""
    factors = isinstance(pair, StackedPair)
    if isinstance(operator, Linear):
        if not factors:
            return _linear(x_CB.to(pair.dtype), pair).to(like)
        h = _linear(x_CB.to(pair.A.dtype), pair.A)
        return _linear(h, pair.B * pair.scale).to(like)
    if factors:
        return vmap(lambda B, A, x: operator.product(LowRank(B, A, pair.scale), x, like))(pair.B, pair.A, x_CB)
    return vmap(lambda matrix, x: operator.product(matrix, x, like))(pair, x_CB)


def apply(operator: Operator, weight_COI: Tensor, x_CB: Tensor) -> Tensor:
    """Apply each client's own whole weight to its rows, without a bias."""
    if isinstance(operator, Linear):
        return _linear(x_CB, weight_COI)
    return vmap(lambda matrix, x: operator.apply(x, matrix))(weight_COI, x_CB)


def _linear(x_CB: Tensor, matrix_COI: Tensor) -> Tensor:
    """Compute ``x @ W_c^T`` client by client, as one batched product: (C, B, ..., I) -> (C, B, ..., O)."""
    made = torch.bmm(x_CB.flatten(1, -2), matrix_COI.mT)
    return made.unflatten(1, x_CB.shape[1:-1])
