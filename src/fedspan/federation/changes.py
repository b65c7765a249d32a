"""What a reply changes, beside that of a client that trained nothing: what is clipped, made noisy and summed in secret.

A contribution is compared with one that depends on no data, so a bound on the difference bounds what a client can do to
a sum. Both sides can compute that one.
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
    """What a client contributes that was sent a message and trained nothing.

    Args:
        method: the run's; its replies sum.
        sent: what the client was sent.
        client: who.
        round: Number of the round, from 0.

    Raises:
        ValueError: if the method keeps replies apart.
    """
    contribution = method.contribute(untrained_reply(method, sent, client, round), client)
    if contribution.stack:
        raise ValueError("replies that are kept apart have no sum")
    return contribution.sum


def change_of(contribution: Contribution, origin: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A contribution less that of a client that trained nothing, float64; what it leaves out counts as 0.

    Args:
        contribution: a reply's.
        origin: from ``origin_of``.

    Raises:
        ValueError: if it holds anything that the origin does not, in another shape, apart, or not finite.
    """
    if contribution.stack:
        raise ValueError("replies that are kept apart have no sum")
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
    """The tensors of which something is the change, in their own number formats."""
    return {name: (start.double() + change[name]).to(start.dtype) for name, start in origin.items()}


def clip_change(change: Mapping[str, Tensor], limit: float) -> dict[str, Tensor]:
    """A change, scaled down as a whole so that its norm is at most ``limit``."""
    found = norm(change)
    return {name: value * (limit / found) if found > limit else value for name, value in change.items()}
