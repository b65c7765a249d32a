"""The change in a reply relative to an untrained client's reply: the quantity that is clipped, noised and masked.

The reference contribution does not depend on data, so a bound on the change bounds a client's influence on a sum. Both
server and client can compute the reference.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedspan.core.method import Method
from fedspan.core.tensors import Tensors, norm
from fedspan.core.values import Client, Contribution, Message
from fedspan.federation.validation import untrained_reply

__all__ = ["apply_change", "change_of", "clip_change", "origin_of"]


def origin_of(method: Method, sent: Message, client: Client, round: int) -> Tensors:
    """Return the contribution of a client that received a message and trained nothing.

    Args:
        method: The run's method, whose replies are summed.
        sent: The message that the client received.
        client: The client.
        round: Number of the round, from 0.

    Raises:
        ValueError: If the method stacks replies instead of summing them.
    """
    contribution = method.contribute(untrained_reply(method, sent, client, round), client)
    if contribution.stack:
        raise ValueError("replies that are stacked have no sum")
    return contribution.sum


def change_of(contribution: Contribution, origin: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a contribution minus that of an untrained client, in float64; missing tensors count as 0.

    Args:
        contribution: Contribution of a reply.
        origin: Result of ``origin_of``.

    Raises:
        ValueError: If it has a tensor that the origin lacks, another shape, a stacked part or a value that is not
            finite.
    """
    if contribution.stack:
        raise ValueError("replies that are stacked have no sum")
    if more := contribution.sum.keys() - origin.keys():
        raise ValueError(f"tensors that an untrained client does not contribute: {sorted(more)[:3]}")
    made: dict[str, Tensor] = {}
    for name, start in origin.items():
        value = contribution.sum.get(name)
        if value is not None and value.shape != start.shape:
            raise ValueError(f"{name} is {list(value.shape)}, not {list(start.shape)}")
        made[name] = (torch.zeros_like(start) if value is None else value).double() - start.double()
        if not bool(torch.isfinite(made[name]).all()):
            raise ValueError(f"{name} holds numbers that are not finite")
    return made


def apply_change(change: Mapping[str, Tensor], origin: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add a change to the origin, in the dtypes of the origin."""
    return {name: (start.double() + change[name]).to(start.dtype) for name, start in origin.items()}


def clip_change(change: Mapping[str, Tensor], limit: float) -> dict[str, Tensor]:
    """Scale a change as a whole so that its norm is at most ``limit``."""
    found = norm(change)
    return {name: value * (limit / found) if found > limit else value for name, value in change.items()}
