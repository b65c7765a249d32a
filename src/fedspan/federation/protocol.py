"""Orders and replies between server and clients: their form, their checks, and what a round sends to each client."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fedspan.core.base import BasePatch
from fedspan.core.recent import RecentValues
from fedspan.core.values import Client, Message
from fedspan.errors import escape_controls, require_printable
from fedspan.federation import serialization
from fedspan.files import from_json

FORMAT = 1
"""Version of the headers; a reader rejects any other."""

REPLY_HEADER = 1 << 17
"""Maximum length of a reply's header. To refuse a wrong one of 1 MiB takes half a second."""

_LONGEST_LINE = 500
"""Maximum length of a line of the reason why a header is refused, in characters."""

OrderKind = Literal["train", "second", "statistics", "evaluate", "export"]
"""Kinds of orders that a server may send to a client."""

Name = Annotated[str, Field(min_length=1, max_length=256)]
PrintableName = Annotated[Name, AfterValidator(require_printable)]
"""A name of which a terminal shows every character."""
Count = Annotated[int, Field(ge=0, lt=2**53)]
Reason = Annotated[str, Field(max_length=4096), AfterValidator(escape_controls)]
"""Why another machine refused or failed, in its own words: it goes to logs and terminals."""


@dataclass(frozen=True)
class Envelope:
    """The unit of transmission."""

    header: str
    body: bytes = b""
    """An encoded message, or empty."""

    @property
    def size(self) -> int:
        """Size of both in bytes."""
        return len(_encode_header(self.header)) + len(self.body)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the header and, after it, of the body."""
        content = hashlib.sha256(_encode_header(self.header))
        content.update(self.body)
        return content.hexdigest()


def _encode_header(header: str) -> bytes:
    """Encode a header; one from another machine may hold surrogates, which no encoding has."""
    return header.encode(errors="surrogatepass")


class HeaderPart(BaseModel):
    """A part of a header."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    longest: ClassVar[int] = 1 << 20
    """Maximum length of a whole header of this kind, in characters."""

    def to_envelope(self) -> Envelope:
        """Encode a part that is a whole header as an envelope."""
        return Envelope(self.model_dump_json())


H = TypeVar("H", bound=HeaderPart)


class ClientFacts(HeaderPart):
    """Facts about a client that both sides know (``core.values.Client``)."""

    id: Name
    rank: Count
    scaling: float
    examples: Count
    weight: Annotated[float, Field(ge=0)]
    last_round: Count | None

    @classmethod
    def from_client(cls, client: Client) -> ClientFacts:
        """Create the facts of a client."""
        return cls(**{name: getattr(client, name) for name in cls.model_fields})


class Part(HeaderPart):
    """One phase of a client's training: its mean loss and its number of examples."""

    loss: float
    examples: Annotated[float, Field(ge=0)]


class Masking(HeaderPart):
    """The secure sum that a client's reply enters (``clients.secagg``)."""

    session: Count
    """Number of the session, whose keys and agreement were exchanged before."""
    peers: tuple[Name, ...]
    """The client itself and the other remaining clients, whose masks its own masks cancel."""


Scores = dict[Name, float]
"""Metrics by name, including ``examples``."""

ScoredPart = Literal["validation", "test"]
"""Part of a client's examples that is evaluated."""


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
    longest = REPLY_HEADER

    format: Literal[1] = FORMAT
    task: OrderKind
    round: Count
    attempt: Count
    id: Name
    parts: tuple[Part, ...] = ()
    scores: dict[ScoredPart, Scores] = Field(default_factory=dict)
    failed: Reason | None = None
    lost: bool = False


@dataclass(frozen=True)
class Order:
    """An order of a server to a client."""

    task: OrderKind
    """Kind of order: train, reply in the round's second exchange, compute statistics for the head's start, evaluate a
    model, or export the client's own model on its machine."""
    round: int
    """Number of the round of the transmitted state."""
    attempt: int
    """Attempt of the round, from 0."""
    lr: float
    to: str
    client: Client | None
    """Facts about the client; None if it evaluates the global model."""
    body: bytes
    best: int | None = None
    """Round that the client held at the run's best progress so far; its stored state of that round must stay."""
    run: str = ""
    """Name of the run, for nodes that participate in several."""
    serial: int = 0
    """Serial number that increases with every order of a run; an order without a greater serial is a repetition."""
    secure: Masking | None = None
    """Parameters of the secure sum that the reply enters; None: it is sent in plaintext."""

    @cached_property
    def body_sha256(self) -> bytes:
        """SHA-256 of the body."""
        return hashlib.sha256(self.body).digest()

    @cached_property
    def key(self) -> str:
        """Digest of all of an order that its training depends on: its attempt and its sum's masks are not."""
        client = None if self.client is None else ClientFacts.from_client(self.client).model_dump(mode="json")
        facts = {"run": self.run, "to": self.to, "round": self.round, "lr": self.lr, "client": client}
        text = json.dumps(facts, sort_keys=True)
        return hashlib.sha256(text.encode() + self.body_sha256).hexdigest()[:32]

    def to_envelope(self) -> Envelope:
        """Encode as an envelope."""
        facts = {name: getattr(self, name) for name in _OrderHeader.model_fields if name not in ("format", "client")}
        header = _OrderHeader(**facts, client=None if self.client is None else ClientFacts.from_client(self.client))
        return Envelope(header.model_dump_json(), self.body)


@dataclass(frozen=True)
class Reply:
    """A client's reply to an order."""

    task: OrderKind
    round: int
    attempt: int
    id: str
    parts: tuple[Part, ...] = ()
    """Losses of local training, phase by phase."""
    scores: dict[ScoredPart, Scores] | None = None
    """Metrics by part of the client's data."""
    failed: str | None = None
    """Reason of a failure in plain text; None: the order succeeded."""
    lost: bool = False
    """Whether the client lost the stored state that the order builds on, so that it needs a complete message."""
    body: bytes = b""
    """The encoded message; empty after an evaluation."""

    def to_envelope(self) -> Envelope:
        """Encode as an envelope."""
        facts = {name: getattr(self, name) for name in _ReplyHeader.model_fields if name not in ("format", "scores")}
        facts["failed"] = None if self.failed is None else self.failed[:4096]
        header = _ReplyHeader(**facts, scores=self.scores or {})
        return Envelope(header.model_dump_json(), self.body)


def decode_order(envelope: Envelope) -> Order:
    """Decode the order in an envelope; its body stays encoded.

    Raises:
        ValueError: If the header is invalid; no input raises any other error.
    """
    facts = {name: value for name, value in read_header(_OrderHeader, envelope) if name != "format"}
    client: ClientFacts | None = facts.pop("client")
    return Order(**facts, client=None if client is None else Client(**client.model_dump()), body=envelope.body)


def decode_reply(envelope: Envelope) -> Reply:
    """Decode the reply in an envelope.

    Raises:
        ValueError: If the header is invalid; no input raises any other error.
    """
    facts = {name: value for name, value in read_header(_ReplyHeader, envelope) if name != "format"}
    return Reply(**facts, body=envelope.body)


def read_task(envelope: Envelope) -> str:
    """Return the task that an envelope's header names, so that it is parsed as one kind and not as each in turn.

    Raises:
        ValueError: If the header is too long, no JSON object, or names none; no input raises any other error.
    """
    if len(envelope.header) > HeaderPart.longest:
        raise ValueError(f"a header of {len(envelope.header)} characters, of {HeaderPart.longest} at most")
    try:
        header = from_json(envelope.header.encode())
    except ValueError as error:
        raise ValueError("not a fedspan header: no JSON") from error
    task = header.get("task") if isinstance(header, dict) else None
    if not isinstance(task, str):
        raise ValueError("not a fedspan header: no task")
    return task


def read_header(kind: type[H], envelope: Envelope) -> H:
    """Parse an envelope's header as the given kind.

    Raises:
        ValueError: If the header is not of this kind; no input raises any other error.
    """
    if len(envelope.header) > kind.longest:
        raise ValueError(f"a header of {len(envelope.header)} characters, of {kind.longest} at most")
    try:
        return kind.model_validate_json(envelope.header)
    except (ValidationError, ValueError, RecursionError) as error:
        lines = str(error).splitlines()
        # it quotes names of the header, which are its sender's
        reason = escape_controls("; ".join(line.strip()[:_LONGEST_LINE] for line in lines[1:3]))
        raise ValueError(f"not a fedspan header: {reason or lines}") from error


def serial() -> int:
    """Return a number greater than all earlier ones, also across restarts of the server."""
    return time.time_ns() // 1000


def _identify(message: Message) -> Hashable:
    """Return a key that two messages share if they hold the same tensor objects, so that one encoding serves both."""
    tensors = frozenset((name, id(value)) for name, value in message.tensors.items())
    return tensors, frozenset(message.scalars.items()), _identify_patch(message.base)


def _identify_patch(patch: BasePatch | None) -> Hashable:
    """Return such a key of a change of the base; each client's is an object of its own, with the same matrices."""
    if patch is None:
        return None
    total = frozenset((layer, id(delta)) for layer, delta in patch.total.items())
    return patch.round, patch.whole, patch.rho, total, tuple(map(id, patch.increments))


class OrderEncoder:
    """Creates the orders of one exchange; a message is encoded once for all clients that share its tensors.

    Messages and encodings are stored until the exchange ends, the most recently used ones up to 256 MiB, so that a
    cohort whose clients are all sent different messages does not fill the memory. One that was dropped is encoded again
    when needed.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self._encodings = RecentValues[tuple[Message, bytes]]()

    def order(self, task: OrderKind, round: int, to: str, client: Client | None, message: Message) -> Order:
        """Create an order to a client, with a greater serial than all earlier orders."""
        return Order(task, round, 0, 0.0, to, client, self.encode(message), run=self.run, serial=serial())

    def encode(self, message: Message) -> bytes:
        """Encode a message, or return the stored encoding of one that shares its tensors."""

        def compute() -> tuple[tuple[Message, bytes], int]:
            body = serialization.encode(message)
            # The message is stored, too, so that the ids of its tensors are not reused.
            return (message, body), len(body) + sum(value.nbytes for value in message.tensors.values())

        return self._encodings.get_or_compute(_identify(message), compute)[1]


class ClientLostState(ValueError):
    """Raised for a client that lost its stored state."""


def open_reply(envelope: Envelope | str) -> Reply:
    """Decode the reply in an envelope.

    Raises:
        ValueError: If the reply cannot be decoded or reports a failure; ``ClientLostState`` if the client lost its
            stored state.
    """
    if isinstance(envelope, str):
        raise ValueError(envelope)
    reply = decode_reply(envelope)
    if reply.lost:
        raise ClientLostState(reply.failed or "its stored state is lost")
    if reply.failed is not None:
        raise ValueError(reply.failed)
    return reply
