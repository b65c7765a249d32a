"""Distances of replies from those of untrained clients, compared within a cohort; scaling replies towards them.

The reply of an untrained client depends on no data, so the server can compute it. A limit on the norm of the change
from it bounds a client's influence on the update, whatever the client sends.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedspan.core.method import Claims, Method, Quantity
from fedspan.core.tensors import Tensors, compute_norm
from fedspan.core.values import Client, Contribution, Message

ENOUGH_REPLIES = 3
"""Minimum number of replies that are compared with each other."""
MODEL = "change"
"""Name of what a reply holds in the unit of the model's tensors; others are a method's ``Claims.quantities``."""


@dataclass(frozen=True)
class ChangeSize:
    """The size of a reply's change from the untrained reply, in one unit."""

    norm: float
    """L2 norm over all entries; of squares, the norm of their roots."""
    entries: int
    """Number of entries; clients with other ranks have other numbers."""

    @property
    def scale(self) -> float:
        """Square root of the number of entries, with which the norms of changes of one kind grow."""
        return math.sqrt(max(1, self.entries))


Change = Mapping[str, ChangeSize]
"""The sizes of a reply's change by the name of the quantity: ``MODEL``, and those of ``Claims.quantities``."""


def measure_change(
    message: Message, contribution: Contribution, expected: Message, method: Method, client: Client
) -> dict[str, ChangeSize]:
    """Measure a reply's change; a tensor whose number of dimensions differs from the untrained one counts as a whole.

    It is measured on what is summed, because what is transmitted may be compressed; where the server needs replies one
    by one, on the reply.
    """
    measured, untrained = message.tensors, expected.tensors
    if not _is_stacked(contribution):
        measured, untrained = contribution.sum, method.contribute(expected, client).sum
    claims = method.declare_claims()
    totals: dict[str, tuple[float, int]] = {MODEL: (0.0, 0), **{one.name: (0.0, 0) for one in claims.quantities}}
    for name, value in measured.items():
        if not value.is_floating_point() or _get_slot(name) in claims.directions:
            continue
        quantity = _get_quantity(name, claims)
        change = value.double() - _start(value, untrained[name])
        squares = change.abs() if quantity is not None and quantity.is_squared else change.square()
        key = MODEL if quantity is None else quantity.name
        total, entries = totals[key]
        totals[key] = total + float(squares.sum()), entries + value.numel()
    return {key: ChangeSize(math.sqrt(total), entries) for key, (total, entries) in totals.items()}


def compute_capped_median(values: Collection[float]) -> float:
    """Return the number with which a cohort's numbers are compared: their median.

    Of an even number of values it is the mean of the middle two, but at most twice the lower one, so that half of a
    cohort cannot raise it further.

    Args:
        values: The clients' numbers, not negative; at least one.
    """
    return min(statistics.median(values), 2 * statistics.median_low(values))


def compute_norm_limits(changes: Mapping[str, Change], ratio: float) -> dict[str, dict[str, float]]:
    """Return the norms that each client's change may have, by client and quantity.

    A norm is ``ratio`` times the median (``compute_capped_median``) of the cohort's norms of this quantity; of clients
    with more entries, as many times the square root of their number.

    Returns:
        The limits; none if there are too few replies to compare, or most changes are zero.
    """
    if len(changes) < ENOUGH_REPLIES:
        return {}
    medians = {
        quantity: compute_capped_median([one[quantity].norm / one[quantity].scale for one in changes.values()])
        for quantity in next(iter(changes.values()))
    }
    if not any(median > 0 for median in medians.values()):
        return {}
    return {
        id: {quantity: ratio * medians[quantity] * size.scale for quantity, size in change.items()}
        for id, change in changes.items()
    }


def shrink_reply(
    method: Method,
    message: Message,
    contribution: Contribution,
    expected: Message,
    client: Client,
    factors: Mapping[str, float],
) -> Contribution:
    """Return a contribution whose change is scaled.

    Contributions that sum are scaled as they are summed. Where the server needs replies one by one, the reply itself is
    scaled, factor by factor, so that its products with the others' stay of the same rank.

    Args:
        factors: Factors on the change by quantity, from 0 to 1; quantities that are left out stay as they are.
    """
    claims = method.declare_claims()

    def shrink(name: str, value: Tensor, untrained: Tensor) -> Tensor:
        quantity = _get_quantity(name, claims)
        factor = factors.get(MODEL if quantity is None else quantity.name, 1.0)
        if factor == 1 or _get_slot(name) in claims.directions:
            return value
        return _scale(value, untrained, factor**2 if quantity is not None and quantity.is_squared else factor)

    if _is_stacked(contribution):
        tensors = {name: shrink(name, value, expected.tensors[name]) for name, value in message.tensors.items()}
        return method.contribute(replace(message, tensors=tensors), client)
    untrained = method.contribute(expected, client).sum
    scaled = {name: shrink(name, value, untrained[name]) for name, value in contribution.sum.items()}
    return replace(contribution, sum=scaled)


def rebase_change(contribution: Contribution, start: Tensors, target: Tensors, factor: float) -> Contribution:
    """Return a contribution whose change from one start is scaled and added to another: target + factor (x - start).

    Args:
        target: Contribution of an untrained client that received the state to which the change is added.
    """
    moved = {
        name: (target[name].double() + factor * (value.double() - start[name].double())).to(value.dtype)
        if value.is_floating_point()
        else value
        for name, value in contribution.sum.items()
    }
    return replace(contribution, sum=moved)


def compute_change(contribution: Contribution, origin: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a contribution minus that of an untrained client, in float64; missing tensors count as 0.

    Args:
        origin: Contribution of an untrained client, from ``validation.compute_origin``.

    Raises:
        ValueError: If it has a tensor that the origin lacks, another shape, a stacked part or a value that is not
            finite.
    """
    if contribution.stack:
        raise ValueError("replies that are stacked have no sum")
    if unknown := contribution.sum.keys() - origin.keys():
        raise ValueError(f"tensors that an untrained client does not contribute: {sorted(unknown)[:3]}")
    change: dict[str, Tensor] = {}
    for name, start in origin.items():
        value = contribution.sum.get(name)
        if value is not None and value.shape != start.shape:
            raise ValueError(f"{name} is {list(value.shape)}, not {list(start.shape)}")
        change[name] = (torch.zeros_like(start) if value is None else value).double() - start.double()
        if not bool(torch.isfinite(change[name]).all()):
            raise ValueError(f"{name} holds numbers that are not finite")
    return change


def apply_change(change: Mapping[str, Tensor], origin: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add a change to the origin, in the dtypes of the origin."""
    return {name: (start.double() + change[name]).to(start.dtype) for name, start in origin.items()}


def clip_change(change: Mapping[str, Tensor], limit: float) -> tuple[Mapping[str, Tensor], float]:
    """Scale a change as a whole so that its norm is at most ``limit``.

    Returns:
        The scaled change, and the factor by which it was scaled; 1 if its norm was at most ``limit``.
    """
    norm = compute_norm(change)
    if not norm > limit:
        return change, 1.0
    factor = limit / norm
    return {name: value * factor for name, value in change.items()}, factor


def _is_stacked(contribution: Contribution) -> bool:
    """Check whether the server needs numbers of this reply one by one."""
    return any(value.is_floating_point() for value in contribution.stack.values())


def _get_slot(name: str) -> str:
    return name.rpartition("/")[2]


def _get_quantity(name: str, claims: Claims) -> Quantity | None:
    return next((quantity for quantity in claims.quantities if quantity.contains(name)), None)


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
