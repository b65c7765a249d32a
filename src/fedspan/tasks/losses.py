"""Means over parts of a batch, and the number format that losses are computed in."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["means", "widened"]


def widened(values: Tensor) -> Tensor:
    """In float32 or better."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def means(values_B: Tensor, members_CB: Tensor) -> Tensor:
    """The mean over each client's examples, (C,).

    A product with a matrix of zeros and ones, not an indexed sum: on a GPU those add in no fixed order.

    Args:
        values_B: one number for each of B examples (or tokens).
        members_CB: 1 where an example is a client's, else 0.
    """
    members_CB = members_CB.to(values_B)
    return members_CB @ values_B / members_CB.sum(1)
