"""What a server and a client on another machine send each other: a header, which is JSON, and a body of tensors.

The body is the message's wire format (``wire``), so that the ledger counts the same bytes on every engine; the header
holds what a simulation simply knows: the round, the learning rate, which client. Whatever comes from the network is
checked field by field here; nothing is unpickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedspan.core.values import Client

__all__ = [
    "FORMAT",
    "ClientFacts",
    "Count",
    "Envelope",
    "HeaderPart",
    "Masking",
    "Name",
    "Order",
    "OrderKind",
    "Part",
    "Reply",
    "ScoredPart",
    "Scores",
    "decode_order",
    "decode_reply",
    "read_header",
]

FORMAT = 1
"""Version of the headers; a reader refuses any other."""

_HEADER = 1 << 20
"""Bytes of a header, at most."""

OrderKind = Literal["train", "evaluate", "export"]
"""What a server may ask of a client."""

Name = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=0, lt=2**53)]


@dataclass(frozen=True)
class Envelope:
    """What travels.

    Args:
        header: JSON.
        body: an encoded message, or nothing.
    """

    header: str
    body: bytes = b""


class HeaderPart(BaseModel):
    """A piece of a header."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


H = TypeVar("H", bound=HeaderPart)


class ClientFacts(HeaderPart):
    """What both sides know of a client (``core.values.Client``)."""

    id: Name
    rank: Count
    scaling: float
    examples: Count
    weight: Annotated[float, Field(ge=0)]
    held: Count | None

    @classmethod
    def of(cls, client: Client) -> ClientFacts:
        """Of a client."""
        return cls(**{name: getattr(client, name) for name in cls.model_fields})

    def client(self) -> Client:
        """The client."""
        return Client(**self.model_dump())


class Part(HeaderPart):
    """One phase of a client's training: its mean loss over so many examples."""

    loss: float
    examples: Annotated[float, Field(ge=0)]


class Masking(HeaderPart):
    """What a client is told of the secure sum that its reply goes into (``engines.secure_client``).

    Args:
        session: number of the exchange of keys that came before.
        peers: itself and the neighbours that are still there, whose masks its own cancel.
        clients: addends of the sum, at most.
        clip: norm of a change, at most.
        bits: of the integers.
        top: the greatest weight in the sum; weights count as shares of it.
        layout: digest of the names and shapes of what is summed.
    """

    session: Count
    peers: tuple[Name, ...]
    clients: Annotated[int, Field(ge=2, lt=2**24)]
    clip: Annotated[float, Field(gt=0)]
    bits: Literal[32, 64]
    top: Annotated[float, Field(gt=0)]
    layout: Annotated[str, Field(min_length=64, max_length=64)]


Scores = dict[Name, float]
"""Metrics by name; ``examples`` among them."""

ScoredPart = Literal["validation", "test"]
"""Of a client's examples."""


class _OrderHeader(HeaderPart):
    format: Literal[1] = FORMAT
    task: OrderKind
    run: Annotated[str, Field(max_length=256)] = ""
    serial: Count = 0
    round: Count
    attempt: Count
    lr: Annotated[float, Field(ge=0)]
    to: Name
    client: ClientFacts | None
    best: Count | None = None
    secure: Masking | None = None


class _ReplyHeader(HeaderPart):
    format: Literal[1] = FORMAT
    task: OrderKind
    round: Count
    attempt: Count
    id: Name
    parts: tuple[Part, ...] = ()
    scores: dict[ScoredPart, Scores] = Field(default_factory=dict)
    failed: Annotated[str, Field(max_length=4096)] | None = None
    lost: bool = False


@dataclass(frozen=True)
class Order:
    """What a server asks of a client.

    Args:
        task: train; evaluate a model; export the client's own model where it is.
        round: number of the state that it is sent.
        attempt: of the round, from 0.
        lr: learning rate of the round.
        to: the id of whom it is asked.
        client: its facts; None where it is the global model that it evaluates.
        best: the round that it held when the run was at its best so far; what it kept of that must stay.
        run: which one, where a node may know several.
        serial: grows from order to order of a run; what is not newer than another one was sent before.
        secure: into which secure sum the reply goes; None: it is sent as it is.
        body: the message, encoded.
    """

    task: OrderKind
    round: int
    attempt: int
    lr: float
    to: str
    client: Client | None
    body: bytes
    best: int | None = None
    run: str = ""
    serial: int = 0
    secure: Masking | None = None

    def envelope(self) -> Envelope:
        """As it travels."""
        facts = None if self.client is None else ClientFacts.of(self.client)
        header = _OrderHeader(
            task=self.task,
            round=self.round,
            attempt=self.attempt,
            lr=self.lr,
            to=self.to,
            client=facts,
            best=self.best,
            run=self.run,
            serial=self.serial,
            secure=self.secure,
        )
        return Envelope(header.model_dump_json(), self.body)


@dataclass(frozen=True)
class Reply:
    """What a client replies.

    Args:
        task: what it was asked.
        round: as it was told.
        attempt: as it was told.
        id: its own.
        parts: losses of its training, phase by phase.
        scores: by part of its data.
        failed: why there is nothing else, in words; None: it went well.
        lost: what it kept of the round that the order builds on is gone, so it must be sent everything anew.
        body: the message, encoded; empty after an evaluation.
    """

    task: OrderKind
    round: int
    attempt: int
    id: str
    parts: tuple[Part, ...] = ()
    scores: dict[ScoredPart, Scores] | None = None
    failed: str | None = None
    lost: bool = False
    body: bytes = b""

    def envelope(self) -> Envelope:
        """As it travels."""
        header = _ReplyHeader(
            task=self.task,
            round=self.round,
            attempt=self.attempt,
            id=self.id,
            parts=self.parts,
            scores=self.scores or {},
            failed=None if self.failed is None else self.failed[:4096],
            lost=self.lost,
        )
        return Envelope(header.model_dump_json(), self.body)


def decode_order(envelope: Envelope) -> Order:
    """The order in a parcel; its body is looked into when it is asked for.

    Raises:
        ValueError: if the header is none; nothing else, whatever came.
    """
    header = read_header(_OrderHeader, envelope)
    client = None if header.client is None else header.client.client()
    best, run, serial, secure = header.best, header.run, header.serial, header.secure
    return Order(
        header.task,
        header.round,
        header.attempt,
        header.lr,
        header.to,
        client,
        envelope.body,
        best,
        run,
        serial,
        secure,
    )


def decode_reply(envelope: Envelope) -> Reply:
    """The answer in a parcel.

    Raises:
        ValueError: if the header is none; nothing else, whatever came.
    """
    header = read_header(_ReplyHeader, envelope)
    return Reply(
        header.task,
        header.round,
        header.attempt,
        header.id,
        header.parts,
        header.scores,
        header.failed,
        header.lost,
        envelope.body,
    )


def read_header(kind: type[H], envelope: Envelope) -> H:
    """A parcel's header as one of a kind.

    Raises:
        ValueError: if it is none; nothing else, whatever came.
    """
    if len(envelope.header) > _HEADER:
        raise ValueError(f"a header of {len(envelope.header)} characters, of {_HEADER} at most")
    try:
        return kind.model_validate_json(envelope.header)
    except (ValidationError, ValueError, RecursionError) as error:
        lines = str(error).splitlines()
        raise ValueError(f"not a fedspan header: {'; '.join(line.strip() for line in lines[1:3]) or lines}") from error
