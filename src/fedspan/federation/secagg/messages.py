"""The messages between a server and its clients in a round under secure aggregation, besides the training orders.

    keys:    server -> all: a session begins;               client -> server: its public keys, signed
    shares:  server -> all: all clients' keys and           client -> server: shares of two secrets, sealed for each
             the agreement on the round
    (train:  ``protocol.Order`` with its ``secure`` part;   client -> server: a masked vector)
    confirm: server -> client: who replied, who did not,    client -> server: its signature of both sets
             and what the others sealed for it
    unmask:  server -> client: the others' signatures;      client -> server: one share of each of them

All data is in headers; these envelopes have no bodies.

The agreement holds everything that decides what the clients' vectors are: config, round, model, learning rate, the
facts about each client (weight, rank, the state that it stores), and how the sum is encoded; and how many shares open a
secret. The transcript is the digest of the agreement and of all clients'
keys, and part of every secret that two clients share. So clients that were told different things neither cancel each
other's masks nor open each other's shares, and the server learns nothing from their vectors. A client compares the
agreement with the order to train, and confirms no sum if the others' shares do not open.

The vectors of a secure sum: tensor changes flattened into one vector, whose layout both sides know.

A change is relative to values that all clients of a round share. The server can compute ``validation.compute_origin``,
the contribution of a client without memory, but a client that receives only the tensors it lacks cannot. So the origin
here follows the contract of ``Contribution``: the initial value for a tensor that has the name of one of the job's
tensors, and 0 for any other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Literal, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ConfigDict, Field
from torch import Tensor

from fedspan.core.tensors import Tensors
from fedspan.federation.protocol import (
    FORMAT,
    ClientFacts,
    Count,
    Envelope,
    HeaderPart,
    Name,
    Order,
    OrderKind,
    Reason,
    decode_order,
    read_header,
    read_task,
)

A = TypeVar("A", bound="PhaseReply")

MASKED = "masked"
"""Name of the one tensor of a masked reply."""

_Key = Annotated[bytes, Field(min_length=32, max_length=32)]
_Sealed = Annotated[bytes, Field(min_length=92, max_length=256)]
_Share = Annotated[bytes, Field(min_length=34, max_length=34)]
_Signature = Annotated[bytes, Field(min_length=64, max_length=64)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class BinaryPart(HeaderPart):
    """A part of a header that encodes bytes as base64."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")


class PublicKeys(BinaryPart):
    """A client's public keys of a session."""

    sealing: _Key
    """Key with which other clients seal shares for this client."""
    masking: _Key
    own: _Key
    """Commitment to the seed of its own mask, with which shares of it are checked."""
    signing: _Key
    """Key of its signatures in the session."""
    identity: Annotated[str, Field(max_length=1024)] = ""
    """The client's lasting public key in OpenSSH's format; empty: it has none."""
    signature: Annotated[bytes, Field(max_length=256)] = b""
    """Signature by the lasting key (``crypto.identity``)."""

    def list_keys(self) -> tuple[bytes, bytes, bytes]:
        """Return the keys, of which no two clients have one in common."""
        return self.sealing, self.masking, self.signing

    def build_statement(self, context: str, id: str) -> bytes:
        """Return what the signature covers: the keys, the client, and the session in which they are used."""
        parts = (context.encode(), id.encode(), self.sealing, self.masking, self.own, self.signing)
        return b"".join(len(part).to_bytes(8, "big") + part for part in (b"fedspan session keys 1", *parts))


class Agreement(HeaderPart):
    """What all clients of a secure sum agree on before any of them trains."""

    config: Annotated[str, Field(max_length=64)]
    """Digest of the config that the server sent to all nodes; empty in a simulation."""
    task: Literal["train", "second", "statistics"]
    round: Count
    lr: Annotated[float, Field(ge=0)]
    model: _Digest
    """SHA-256 of the order's message, which is the same for all clients."""
    clients: Annotated[int, Field(ge=2, lt=2**24)]
    """Number of clients that sent keys, and largest number of vectors in the sum."""
    threshold: Annotated[int, Field(ge=2, lt=2**16)]
    """Number of shares that reconstruct a secret."""
    clip: Annotated[float, Field(gt=0)]
    """Largest norm of a change."""
    bits: Literal[32, 64]
    """Bits of the summed integers."""
    top: Annotated[float, Field(gt=0)]
    """Largest weight that counts in the sum; weights are expressed as fractions of it."""
    layout: _Digest
    """Digest of the names and shapes of the summed tensors."""
    facts: _Digest
    """Digest of the facts about all these clients (``compute_facts_digest``)."""

    def build_transcript(self, context: str, keys: Mapping[str, PublicKeys]) -> str:
        """Return the text that binds secrets to this agreement, the session and its clients."""
        digest = hashlib.sha256(f"{context}\n{self.model_dump_json()}\n".encode())
        for id, public in sorted(keys.items()):
            digest.update(public.build_statement(context, id))
        return digest.hexdigest()


class _Order(BinaryPart):
    format: Literal[1] = FORMAT
    run: Annotated[str, Field(max_length=256)] = ""
    serial: Count = 0
    round: Count
    attempt: Count
    to: Name
    session: Count


class KeysOrder(_Order):
    """Begins a session; session numbers increase within a run."""

    task: Literal["keys"] = "keys"


class SharesOrder(_Order):
    """Requests the shares of a client's secrets."""

    task: Literal["shares"] = "shares"
    peers: dict[Name, PublicKeys]
    """Public keys of all clients, by client id."""
    agreement: Agreement
    """What all clients of the sum agree on."""
    facts: tuple[ClientFacts, ...]
    """The facts about each of them, which it will be ordered to train with, sorted by id."""


class ConfirmOrder(_Order):
    """Requests a signature of the clients whose vectors are in the sum."""

    task: Literal["confirm"] = "confirm"
    survivors: tuple[Name, ...]
    """The masking partners, the client itself among them, whose vectors are in the sum."""
    dropped: tuple[Name, ...]
    sealed: dict[Name, _Sealed]
    """Shares that each of them sealed for the client."""


class UnmaskOrder(_Order):
    """Requests the shares that remove the masks."""

    task: Literal["unmask"] = "unmask"
    signatures: dict[Name, _Signature]
    """The survivors' signatures of ``build_confirmation``."""


Phase = KeysOrder | SharesOrder | ConfirmOrder | UnmaskOrder


class PhaseReply(BinaryPart):
    """Fields that all replies share."""

    format: Literal[1] = FORMAT
    id: Name
    session: Count
    failed: Reason | None = None
    """Reason of a failure in plain text; None: the order succeeded."""


class KeysReply(PhaseReply):
    """A client's public keys."""

    task: Literal["keys"] = "keys"
    keys: PublicKeys | None = None


class SharesReply(PhaseReply):
    """Shares of a client's two secrets, sealed for every client, itself included."""

    task: Literal["shares"] = "shares"
    sealed: dict[Name, _Sealed] = Field(default_factory=dict)


class ConfirmReply(PhaseReply):
    """A client's signature of the survivors and the dropped clients."""

    task: Literal["confirm"] = "confirm"
    signature: Annotated[bytes, Field(max_length=64)] = b""
    """The signature; empty if the phase failed."""
    unopened: tuple[Name, ...] = ()
    """Clients whose sealed shares the client cannot open."""


class UnmaskReply(PhaseReply):
    """A share of every client whose shares open: of a survivor's own mask, or of a dropped client's key."""

    task: Literal["unmask"] = "unmask"
    shares: dict[Name, _Share] = Field(default_factory=dict)


_PHASES: dict[str, type[Phase]] = {
    "keys": KeysOrder,
    "shares": SharesOrder,
    "confirm": ConfirmOrder,
    "unmask": UnmaskOrder,
}
_ANSWERS: dict[str, type[PhaseReply]] = {
    "keys": KeysReply,
    "shares": SharesReply,
    "confirm": ConfirmReply,
    "unmask": UnmaskReply,
}


def decode_phase(envelope: Envelope) -> Phase:
    """Decode the secure aggregation order in an envelope.

    Raises:
        ValueError: If it is no such order; no input raises any other error.
    """
    return read_header(_PHASES.get(read_task(envelope), KeysOrder), envelope)


def decode_request(envelope: Envelope) -> Order | Phase:
    """Decode any order of a server to a client.

    Raises:
        ValueError: If it is neither an ``Order`` nor a ``Phase``; no input raises any other error.
    """
    task = read_task(envelope)
    if task in _PHASES:
        return decode_phase(envelope)
    if task not in get_args(OrderKind):
        raise ValueError("not a fedspan header: no order")
    return decode_order(envelope)


def refuse_phase(order: Phase, reason: str) -> PhaseReply:
    """Create the reply of a client that could not carry out an order."""
    return _ANSWERS[order.task](id=order.to, session=order.session, failed=reason[:4096])


def build_session_context(run: str, session: int) -> str:
    """Return the text that binds keys to a session of a run."""
    return f"{run}/{session}"


def build_confirmation(transcript: str, survivors: Collection[str], dropped: Collection[str]) -> bytes:
    """Return what a client signs before it reveals shares: whose vectors are in the sum, and whose are not.

    Args:
        transcript: Text of the session and its agreement, from ``Agreement.build_transcript``.
    """
    return json.dumps(["fedspan survivors 1", transcript, sorted(survivors), sorted(dropped)]).encode()


def compute_share(weight: float, top: float) -> float:
    """Return a client's weight in a sum as a fraction of the largest one that counts; a larger weight counts as that.

    Args:
        top: The largest weight that counts (``Agreement.top``).
    """
    return min(weight, top) / top


def create_initial_values(contributed: Tensors, started: Tensors) -> dict[str, Tensor]:
    """Return the origin of a contribution in its shapes and dtypes (float64 for integers, because means are not)."""
    values: dict[str, Tensor] = {}
    for name, value in contributed.items():
        dtype = value.dtype if value.is_floating_point() else torch.float64
        start = started.get(name)
        if start is not None and start.shape == value.shape:
            values[name] = start.to("cpu", dtype)
        else:
            values[name] = torch.zeros(value.shape, dtype=dtype)
    return values


def compute_facts_digest(facts: Iterable[ClientFacts]) -> str:
    """Return the digest of the facts about some clients, in any order."""
    lines = [one.model_dump_json() for one in sorted(facts, key=lambda one: one.id)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def compute_layout_digest(origin: Tensors) -> str:
    """Return the digest of the names, shapes and dtypes of the summed tensors."""
    digest = hashlib.sha256()
    for name, value in sorted(origin.items()):
        digest.update(f"{name}\0{value.dtype}\0{list(value.shape)}\n".encode())
    return digest.hexdigest()


def flatten(change: Mapping[str, Tensor]) -> NDArray[np.float64]:
    """Flatten a change into one vector, in the order of the names."""
    parts = [change[name].detach().to("cpu", torch.float64).flatten().numpy() for name in sorted(change)]
    return np.concatenate(parts) if parts else np.zeros(0)


def unflatten_change(vector: NDArray[np.float64], origin: Tensors) -> dict[str, Tensor]:
    """Restore the change from a vector, in float64."""
    tensors: dict[str, Tensor] = {}
    start = 0
    for name, value in sorted(origin.items()):
        tensors[name] = torch.from_numpy(vector[start : start + value.numel()]).view(value.shape)
        start += value.numel()
    return tensors
