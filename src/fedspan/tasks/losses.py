"""Means over parts of a batch, and the number format of losses."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["means", "widened"]


def widened(values: Tensor) -> Tensor:
    """Convert to float32 or better."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def means(values_B: Tensor, members_CB: Tensor) -> Tensor:
    """Compute the mean over each client's examples, (C,).

    This is a product with a matrix of zeros and ones, not an indexed sum, which adds in no fixed order on a GPU.

    Args:
        values_B: One number for each of B examples (or tokens).
        members_CB: 1 where an example belongs to a client, else 0.
    """
    members_CB = members_CB.to(values_B)
    return members_CB @ values_B / members_CB.sum(1)
