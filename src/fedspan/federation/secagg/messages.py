"""What a server and its clients send each other around a round under secure aggregation, beside its orders to train.

    keys:    server -> all: a session begins;                client -> server: its two public keys
    shares:  server -> client: its neighbours' keys;         client -> server: shares of two secrets, sealed for each
    (train:  ``parcels.Order`` with its ``secure`` part;     client -> server: a masked vector)
    unmask:  server -> client: who replied, who did not,     client -> server: one share of each of them
             and what the neighbours sealed for it

All of it is in headers; these parcels have no bodies.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import ConfigDict, Field

from fedspan.federation.protocol import FORMAT, Count, Envelope, HeaderPart, Name, Order, decode_order, read_header

__all__ = [
    "MASKED",
    "KeysOrder",
    "KeysReply",
    "Phase",
    "PhaseReply",
    "PublicKeys",
    "SharesOrder",
    "SharesReply",
    "UnmaskOrder",
    "UnmaskReply",
    "context_of",
    "decode_phase",
    "decode_request",
    "refuse_phase",
    "size_of",
]

A = TypeVar("A", bound="PhaseReply")

MASKED = "masked"
"""Name of the one tensor of a masked reply."""

_Key = Annotated[bytes, Field(min_length=32, max_length=32)]
_Sealed = Annotated[bytes, Field(min_length=28, max_length=256)]
_Share = Annotated[bytes, Field(min_length=34, max_length=34)]


class BinaryPart(HeaderPart):
    """A piece of a header with bytes in it, which stand there in base64."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")


class PublicKeys(BinaryPart):
    """A client's public keys of a session.

    Args:
        sealing: to seal shares for it.
        masking: of its pairwise masks.
    """

    sealing: _Key
    masking: _Key


class _Order(BinaryPart):
    format: Literal[1] = FORMAT
    run: Annotated[str, Field(max_length=256)] = ""
    serial: Count = 0
    round: Count
    attempt: Count
    to: Name
    session: Count

    def envelope(self) -> Envelope:
        """As it travels."""
        return Envelope(self.model_dump_json())


class KeysOrder(_Order):
    """Begins a session; sessions of a run have growing numbers."""

    task: Literal["keys"] = "keys"


class SharesOrder(_Order):
    """Asks for shares.

    Args:
        threshold: of them that give a secret.
        peers: keys of the client's neighbours and its own.
    """

    task: Literal["shares"] = "shares"
    threshold: Annotated[int, Field(ge=2, lt=2**16)]
    peers: dict[Name, PublicKeys]


class UnmaskOrder(_Order):
    """Asks for what removes masks.

    Args:
        survivors: of those that the client masked with, itself among them, whose vectors are in the sum.
        dropped: the others.
        sealed: what each of them sealed for the client.
    """

    task: Literal["unmask"] = "unmask"
    survivors: tuple[Name, ...]
    dropped: tuple[Name, ...]
    sealed: dict[Name, _Sealed]


Phase = KeysOrder | SharesOrder | UnmaskOrder


class PhaseReply(BinaryPart):
    """What all answers say.

    Args:
        id: the client's own.
        session: as it was told.
        failed: why there is nothing else, in words.
    """

    format: Literal[1] = FORMAT
    id: Name
    session: Count
    failed: Annotated[str, Field(max_length=4096)] | None = None

    def envelope(self) -> Envelope:
        """As it travels."""
        return Envelope(self.model_dump_json())


class KeysReply(PhaseReply):
    """A client's public keys."""

    task: Literal["keys"] = "keys"
    keys: PublicKeys | None = None


class SharesReply(PhaseReply):
    """Shares of a client's two secrets, sealed for every neighbour and itself."""

    task: Literal["shares"] = "shares"
    sealed: dict[Name, _Sealed] = Field(default_factory=dict)


class UnmaskReply(PhaseReply):
    """A share for every client that was asked for: of a survivor's own mask, or of a dropped one's key."""

    task: Literal["unmask"] = "unmask"
    shares: dict[Name, _Share] = Field(default_factory=dict)


_ANSWERS: dict[str, type[PhaseReply]] = {"keys": KeysReply, "shares": SharesReply, "unmask": UnmaskReply}


def decode_phase(envelope: Envelope) -> Phase:
    """The order in a parcel.

    Raises:
        ValueError: if it is none of these; nothing else, whatever came.
    """
    for kind in (KeysOrder, SharesOrder):
        try:
            return read_header(kind, envelope)
        except ValueError:
            continue
    return read_header(UnmaskOrder, envelope)


def decode_request(envelope: Envelope) -> Order | Phase:
    """Whatever a server asks of a client.

    Raises:
        ValueError: if it is neither an order nor one of these; nothing else, whatever came.
    """
    try:
        return decode_order(envelope)
    except ValueError:
        return decode_phase(envelope)


def refuse_phase(order: Phase, why: str) -> PhaseReply:
    """The answer of a client that could not do what it was asked."""
    return _ANSWERS[order.task](id=order.to, session=order.session, failed=why[:4096])


def size_of(envelope: Envelope) -> int:
    """Bytes that the ledger counts: here the header is what travels."""
    return len(envelope.header.encode()) + len(envelope.body)


def context_of(run: str, session: int) -> str:
    """The text that binds keys to a session of a run."""
    return f"{run}/{session}"
