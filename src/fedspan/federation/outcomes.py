"""What comes of asking clients, beside their replies: what travelled, and who failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Direction", "Failure", "OutOfRoundEvents", "Purpose", "TooFew", "Transfer"]

Direction = Literal["down", "up"]
Purpose = Literal["train", "evaluate", "export"]


class TooFew(Exception):
    """Too few clients are left in an attempt of a round; the reasons are among the failures."""


@dataclass(frozen=True)
class Transfer:
    """One message that travelled.

    Args:
        client: id.
        direction: ``down`` or ``up``.
        bytes: serialized size.
        payload: bytes of tensor data in it.
        purpose: what it was for.
    """

    client: str
    direction: Direction
    bytes: int
    payload: int
    purpose: Purpose = "train"


@dataclass(frozen=True)
class Failure:
    """A client whose reply does not count in a round, or that was not measured, or did not export.

    Args:
        client: id.
        attempt: of the round, from 0.
        reason: in words.
        purpose: what it was asked for.
    """

    client: str
    attempt: int
    reason: str
    purpose: Purpose = "train"


@dataclass(frozen=True)
class OutOfRoundEvents:
    """What happened between server and clients beside the rounds.

    Args:
        transfers: models that were sent to be evaluated or exported.
        failures: who was not measured.
    """

    transfers: tuple[Transfer, ...] = ()
    failures: tuple[Failure, ...] = ()
