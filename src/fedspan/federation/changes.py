"""How far replies are from those of untrained clients, compared within a cohort, and scaling replies towards them.

The reply of an untrained client depends on no data, so the server can compute it. A limit on the norm of the change
from it bounds a client's influence on the update, whatever the client sends.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from fedspan.core.method import Method
from fedspan.core.tensors import Tensors
from fedspan.core.values import Client, Contribution, Message

__all__ = ["ENOUGH_REPLIES", "ChangeSize", "compute_norm_limits", "measure_change", "rebase_change", "shrink_reply"]

ENOUGH_REPLIES = 3
"""Minimum number of replies that are compared with each other."""


@dataclass(frozen=True)
class ChangeSize:
    """The size of a reply's change from the untrained reply.

    Args:
        norm: L2 norm over all entries.
        entries: Number of entries; clients with other ranks have other numbers.
    """

    norm: float
    entries: int

    @property
    def scale(self) -> float:
        """Square root of the number of entries, with which the norms of changes of one kind grow."""
        return math.sqrt(max(1, self.entries))


def measure_change(
    message: Message, contribution: Contribution, expected: Message, method: Method, client: Client
) -> ChangeSize:
    """Measure a reply's change; a tensor whose number of dimensions differs from the untrained one counts as a whole.

    It is measured on what is summed, because what is transmitted may be compressed; where the server needs replies one
    by one, on the reply.

    Args:
        message: The reply.
        contribution: Its contribution.
        expected: The untrained reply.
        method: The run's method.
        client: The client.
    """
    measured, untrained = message.tensors, expected.tensors
    if not _is_stacked(contribution):
        measured, untrained = contribution.sum, method.contribute(expected, client).sum
    directions = method.declare_claims().directions
    total, entries = 0.0, 0
    for name, value in measured.items():
        if not value.is_floating_point() or _get_slot(name) in directions:
            continue
        total += float((value.double() - _start(value, untrained[name])).square().sum())
        entries += value.numel()
    return ChangeSize(math.sqrt(total), entries)


def compute_norm_limits(sizes: Mapping[str, ChangeSize], ratio: float) -> dict[str, float]:
    """Return the norm that each client's change may have, by client.

    It is ``ratio`` times the median of the cohort's norms; of clients with more entries, as many times the square root
    of their number.

    Args:
        sizes: The sizes of the changes by client.
        ratio: Multiple of the median.

    Returns:
        The limits; none if there are too few replies to compare, or most changes are zero.
    """
    if len(sizes) < ENOUGH_REPLIES:
        return {}
    median = statistics.median(size.norm / size.scale for size in sizes.values())
    return {id: ratio * median * size.scale for id, size in sizes.items()} if median > 0 else {}


def shrink_reply(
    method: Method, message: Message, contribution: Contribution, expected: Message, client: Client, factor: float
) -> Contribution:
    """Return a contribution whose change is scaled by a factor.

    Contributions that sum are scaled as they are summed. Where the server needs replies one by one, the reply itself is
    scaled, factor by factor, so that its products with the others' stay of the same rank.

    Args:
        method: The run's method.
        message: The reply.
        contribution: Its contribution.
        expected: The untrained reply.
        client: The client.
        factor: Factor on the change, from 0 to 1.
    """
    if _is_stacked(contribution):
        directions = method.declare_claims().directions
        tensors = {
            name: value if _get_slot(name) in directions else _scale(value, expected.tensors[name], factor)
            for name, value in message.tensors.items()
        }
        return method.contribute(replace(message, tensors=tensors), client)
    untrained = method.contribute(expected, client).sum
    return replace(
        contribution,
        sum={name: _scale(value, untrained[name], factor) for name, value in contribution.sum.items()},
    )


def rebase_change(contribution: Contribution, start: Tensors, target: Tensors, factor: float) -> Contribution:
    """Return a contribution whose change from one start is scaled and added to another: target + factor (x - start).

    Args:
        contribution: Contribution of a reply that is summed.
        start: Contribution of an untrained client that received the same state.
        target: Contribution of an untrained client that received the state to which the change is added.
        factor: Factor on the change.
    """
    moved = {
        name: (target[name].double() + factor * (value.double() - start[name].double())).to(value.dtype)
        if value.is_floating_point()
        else value
        for name, value in contribution.sum.items()
    }
    return replace(contribution, sum=moved)


def _is_stacked(contribution: Contribution) -> bool:
    """Check whether the server needs numbers of this reply one by one."""
    return any(value.is_floating_point() for value in contribution.stack.values())


def _get_slot(name: str) -> str:
    return name.rpartition("/")[2]


def _start(value: Tensor, untrained: Tensor) -> Tensor | float:
    """Return the numbers from which a tensor's change counts, in float64; of a smaller tensor, the leading ones."""
    if value.ndim != untrained.ndim or not all(map(int.__le__, value.shape, untrained.shape)):
        return 0.0
    return untrained[tuple(slice(0, length) for length in value.shape)].double().nan_to_num(0.0, 0.0, 0.0)


def _scale(value: Tensor, untrained: Tensor, factor: float) -> Tensor:
    if not value.is_floating_point():
        return value
    start = _start(value, untrained)
    return (start + (value.double() - start) * factor).to(value.dtype)
