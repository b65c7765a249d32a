"""A fixed low-pass filter for gradients: the binomial kernel (1, 4, 6, 4, 1) / 16 along one axis.

Liu et al., "Rethinking LoRA for Privacy-Preserving Federated Learning in Large Models", ICLR 2026, arXiv:2602.19926,
smooth noisy gradients with it. Values beyond an end are those before it, mirrored (d c b a | a b c d | d c b a), so a
constant does not change and the filter is a symmetric matrix.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fedspan.core.tensors import Tensors
from fedspan.core.values import Group

_KERNEL = (1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16)


def smooth(values: Tensor, axis: int) -> Tensor:
    """Smooth a tensor of any shape along one axis."""
    size, reach = values.shape[axis], len(_KERNEL) // 2
    smoothed = torch.zeros_like(values)
    for number, weight in enumerate(_KERNEL):
        places = torch.arange(number - reach, number - reach + size, device=values.device) % (2 * size)
        mirrored = torch.where(places < size, places, 2 * size - 1 - places)
        smoothed.add_(values.index_select(axis, mirrored), alpha=weight)
    return smoothed


def smooth_groups(groups: Iterable[Group], gradients: Tensors) -> dict[str, Tensor]:
    """Smooth the gradients of those groups that ask for it; others, and missing ones, remain as they are."""
    axes = {name: group.smoothed_axis for group in groups for name in group.names}
    smoothed = dict(gradients)
    for name, value in gradients.items():
        axis = axes.get(name)
        if axis is not None:
            smoothed[name] = smooth(value, axis)
    return smoothed
