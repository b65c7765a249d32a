"""The clients that share a pass, and the tensors that the pass takes from them. Shapes: C clients in a pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedspan.core.tensors import generator
from fedspan.training.client_slot import ClientSlot

__all__ = ["perturb", "select_group", "stack_frozen"]

_LIKE = 1.2
"""Batches may share a pass if their longest examples differ by no more than this factor: padding costs time too."""


def select_group(seats: Sequence[ClientSlot], at_once: int, padded: bool = True) -> list[ClientSlot]:
    """Select the clients of the next pass: the one with the most batches left, and those with the most similar batches.

    Args:
        seats: Open client slots.
        at_once: Number of clients in a pass.
        padded: Whether batches of different lengths would be padded to the longest.
    """
    leader = max(seats, key=lambda seat: seat.left)
    same = [seat for seat in seats if seat.kind == leader.kind]
    if leader.work.job.buffers:  # norm layers that use statistics of their batch
        same = [seat for seat in same if len(seat.batch) == len(leader.batch)]
    low, high = leader.cost / _LIKE, leader.cost * _LIKE
    same = [seat for seat in same if seat is not leader and (not padded or low <= seat.cost <= high)]
    same.sort(key=lambda seat: (abs(len(seat.batch) - len(leader.batch)), abs(seat.cost - leader.cost)))
    kept = {id(seat) for seat in (leader, *same[: at_once - 1])}
    return [seat for seat in seats if id(seat) in kept]


def stack_frozen(group: Sequence[ClientSlot]) -> dict[str, Tensor]:
    """Stack the tensors that do not train, (C, ...) each; tensors that all clients share are not copied."""
    made: dict[str, Tensor] = {}
    for name, first in group[0].others.items():
        own = [seat.others[name] for seat in group]
        shared = all(value is first for value in own) and len(own) > 1
        made[name] = first.expand(len(own), *first.shape) if shared else torch.stack(own)
    return made


def perturb(seat: ClientSlot) -> dict[str, Tensor]:
    """Copy a client's tensors with the trainable ones slightly moved: where B is 0, all outputs would be equal."""
    rng = generator(0, "verify", seat.work.client)
    tensors = {name: value.clone() for name, value in seat.tensors().items()}
    for name in seat.layout.names:
        noise = torch.randn(tensors[name].shape, generator=rng) * 0.02
        tensors[name] = tensors[name] + noise.to(tensors[name])
    return tensors
