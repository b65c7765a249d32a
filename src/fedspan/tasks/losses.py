"""Mean losses of clients that share a batch, and the number format of losses."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SMOOTHING", "average_by_client", "upcast"]

SMOOTHING = "label_smoothing"
"""Key of a training batch's share of each target that is spread over the vocabulary, (B,), on the CPU."""


def upcast(values: Tensor) -> Tensor:
    """Convert to float32 or better."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def average_by_client(values_B: Tensor, mask_CB: Tensor) -> Tensor:
    """Compute the mean over each client's examples, (C,).

    This is a product with a matrix of zeros and ones, not an indexed sum, which adds in no fixed order on a GPU.

    Args:
        values_B: One number for each of B examples (or tokens).
        mask_CB: 1 where an example belongs to a client, else 0.
    """
    mask_CB = mask_CB.to(values_B)
    return mask_CB @ values_B / mask_CB.sum(1)
