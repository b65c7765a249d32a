"""Outcomes of exchanges with clients besides their replies: transfers and failures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Direction", "Failure", "OutOfRoundEvents", "Purpose", "TooFew", "Transfer"]

Direction = Literal["down", "up"]
Purpose = Literal["train", "evaluate", "export"]


class TooFew(Exception):
    """Too few clients remain in an attempt of a round; the failures hold the reasons."""


@dataclass(frozen=True)
class Transfer:
    """One transmitted message.

    Args:
        client: Id of the client.
        direction: Direction of the transfer, ``down`` or ``up``.
        bytes: Serialized size.
        payload: Bytes of tensor data in the message.
        purpose: Purpose of the message.
    """

    client: str
    direction: Direction
    bytes: int
    payload: int
    purpose: Purpose = "train"


@dataclass(frozen=True)
class Failure:
    """A client whose reply was rejected or missing in a round, or that was not evaluated or did not export.

    Args:
        client: Id of the client.
        attempt: Attempt of the round, from 0.
        reason: Reason in plain text.
        purpose: Purpose of the order.
    """

    client: str
    attempt: int
    reason: str
    purpose: Purpose = "train"


@dataclass(frozen=True)
class OutOfRoundEvents:
    """Events between server and clients outside the rounds.

    Args:
        transfers: Models that were sent for evaluation or export.
        failures: Clients that were not evaluated.
    """

    transfers: tuple[Transfer, ...] = ()
    failures: tuple[Failure, ...] = ()
