"""Secure aggregation of a round: the server receives masked vectors and learns only their sum.

An attempt of a round has five exchanges: keys, shares, training, confirming, unmasking (``federation.secagg.session``).
All clients are sent the same complete message, whatever they store, so that they can agree on it before they train. A
client whose vector does not arrive in the third is excluded from the sum; one that drops out later is included. If too
few clients remain, the attempt ends and the next one starts a new session with the whole cohort, because masks are used
once; only clients that certainly sealed wrong shares are left out. Once clients have revealed shares, they accept only
a sum of the same clients (``clients.secagg``), so the next attempts are of these: without those that had dropped out,
and with those that revealed wrong shares. A second exchange, whose sum is of the same training as the first one, needs
all clients of the first one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedspan.core.tensors import Tensors, compute_norm
from fedspan.core.values import Client, Reduced
from fedspan.crypto.masks import Integers, Ring
from fedspan.errors import FedspanError
from fedspan.federation import serialization
from fedspan.federation.changes import apply_change
from fedspan.federation.config import MAX_SECURE_CLIENTS, MIN_SECURE_CLIENTS, SecureSettings
from fedspan.federation.privacy import create_central_privacy
from fedspan.federation.progress import TooFew, Transfer
from fedspan.federation.protocol import ClientFacts, Masking, OrderEncoder, Reply
from fedspan.federation.round_context import RoundContext, Tally
from fedspan.federation.secagg.messages import (
    MASKED,
    Agreement,
    compute_facts_digest,
    compute_layout_digest,
    compute_share,
    create_initial_values,
    unflatten_change,
)
from fedspan.federation.secagg.session import SecureSession
from fedspan.federation.validation import compute_origin, require_requested

_VECTOR_HEADER = 1024
"""Maximum size of what an encoded message with one vector has beside its numbers, in bytes."""


class SecureAggregation:
    """Aggregation of replies of which the server sees only the sum.

    Replies are reduced by their mean. They are not checked for outliers, because their norms are unknown to the server.

    Raises:
        FedspanError: If too few clients were selected to hide among, or too many for their shares, or the method's
            replies cannot be summed.
    """

    def __init__(self, context: RoundContext, tally: Tally, secure: SecureSettings) -> None:
        if len(context.ids) < MIN_SECURE_CLIENTS:
            expected = f"at least {MIN_SECURE_CLIENTS} clients a round, so that no client is alone in a sum"
            raise FedspanError("federation.secure", len(context.ids), expected)
        if len(context.ids) > MAX_SECURE_CLIENTS:
            remedy = "model.head_init: random" if context.task == "statistics" else "federation.clients_per_round"
            expected = f"at most {MAX_SECURE_CLIENTS} clients, because each masks with all others ({remedy})"
            raise FedspanError("federation.secure", len(context.ids), expected)
        self.context, self.tally, self.secure = context, tally, secure
        self._fewest = len(context.ids)
        if context.task != "second":
            self._fewest = max(MIN_SECURE_CLIENTS, context.settings.compute_quorum(len(context.ids)))
        self.quorum = self._fewest
        self.replies: dict[str, Reply] = {}
        self.clipped: Mapping[str, float] = {}  # by the clients themselves, which the server cannot see
        self._origin = self._build_initial_contribution()
        self._privacy = create_central_privacy(
            context.settings, len(context.clients), context.state.round, lambda: self._origin
        )
        self._clip = secure.clip if self._privacy is None else self._privacy.privacy.clip
        self._session: SecureSession | None = None
        self._clients: dict[str, Client] = {}
        self._total: Integers = np.zeros(0, np.uint32)
        self._ring = Ring(secure.bits, self._clip, len(context.ids))
        selected = {id: context.clients[id] for id in context.ids}
        self._limit = self._top = max(context.limit_weights().values())
        self.lowered: Mapping[str, float] = {
            id: self._limit / data.client.weight for id, data in selected.items() if data.client.weight > self._limit
        }
        self._note: str | None = None
        self._wrong = set[str]()
        self._revealed = frozenset[str]()

    def get_missing(self) -> tuple[str, ...]:
        """``Aggregation.get_missing``: masks are used once, so every attempt involves all whom the others accept."""
        return tuple(id for id in self.context.ids if id in (self._revealed or set(self.context.ids) - self._wrong))

    def open(self, clients: Mapping[str, Client], attempt: int, encoder: OrderEncoder) -> Mapping[str, Masking | None]:
        """``Aggregation.open``: exchange keys and shares."""
        context = self.context
        session = self._session = SecureSession(
            *(context.transport, context.settings.deadline, context.run, context.state.round, attempt, self._fewest),
            {id: context.clients[id].identity for id in clients},
        )
        self.replies.clear()
        with self._record_exchanges(session):
            session.begin(
                {id: ClientFacts.from_client(client) for id, client in clients.items()},
                lambda ids: self._agree([clients[id] for id in ids], encoder),
                () if attempt else context.absent,
            )
        self.quorum = session.quorum
        self._clients = {id: clients[id] for id in session.present}
        self._total = np.zeros(sum(value.numel() for value in self._origin.values()), self._ring.dtype)
        return dict.fromkeys(session.present, Masking(session=session.number, peers=session.present))

    def _agree(self, clients: Sequence[Client], encoder: OrderEncoder) -> Agreement:
        """Return what clients are to agree on, and set up the sum for them."""
        context, round = self.context, self.context.state.round
        if not self._revealed:
            self._top = min(self._limit, max(client.weight for client in clients))
        if not self._top > 0:
            raise FedspanError("federation.secure", self._top, "clients with examples")
        self._ring = Ring(self.secure.bits, self._clip, len(clients))
        return Agreement(
            config=context.settings.agreed,
            task=context.task,
            round=round,
            lr=context.training.compute_lr(round, context.settings.rounds),
            model=self._compute_model_digest(clients, encoder),
            clients=len(clients),
            threshold=self.secure.compute_threshold(len(clients)),
            clip=self._clip,
            bits=self.secure.bits,
            top=self._top,
            layout=compute_layout_digest(self._origin),
            facts=compute_facts_digest(map(ClientFacts.from_client, clients)),
        )

    def _compute_model_digest(self, clients: Sequence[Client], encoder: OrderEncoder) -> str:
        """Return the digest of the message that all clients are sent, whatever they store of earlier rounds."""
        common: bytes | None = None
        for client in clients:
            body = encoder.encode(self.context.method.sync(self.context.state, replace(client, last_round=None)))
            if common is not None and body != common:
                problem = (
                    "the method sends its clients different models; secure aggregation needs one that all can check"
                )
                raise FedspanError("federation.secure", None, problem=problem)
            common = body
        assert common is not None
        return hashlib.sha256(common).hexdigest()

    def compute_reply_bytes(self, client: Client) -> int:
        """``Aggregation.compute_reply_bytes``: a vector of a fixed length, with a short header."""
        return self._total.nbytes + _VECTOR_HEADER

    def add(self, client: Client, reply: Reply, attempt: int) -> bool:
        """``Aggregation.add``: add a masked vector to the sum."""
        require_requested(reply, client.id, self.context.state.round, attempt, self.context.task)
        vector = _decode_vector(reply, self._total)
        self._total += vector
        self.tally.transfers.append(Transfer(client.id, "up", len(reply.body), vector.nbytes))
        self.replies[client.id] = replace(reply, body=b"")
        return False

    def close(self, attempt: int) -> Reduced:
        """``Aggregation.close``: remove the masks."""
        session, ring, replies = self._session, self._ring, self.replies
        assert session is not None
        with self._record_exchanges(session):
            session.require(replies)
            try:
                session.end(self._total, replies.keys())
            finally:
                self._wrong |= session.wrong
                self._revealed = session.revealed or self._revealed
            share = sum(compute_share(self._clients[id].weight, self._top) for id in replies)
            if not share > 0:
                raise FedspanError("federation.secure", share, "replies of positive weight")
            mean, error = ring.decode(self._total) / share, ring.bound_error(len(replies)) / share
            self._note = (
                f"secure aggregation: every client sends {len(self._total)} masked integers of {ring.bits} bits a "
                f"round, and an entry of their mean is off by at most {error:.2g}"
            )
            change = unflatten_change(mean, self._origin)
            norm = compute_norm(change)
            if norm > self._clip * (1 + 1e-9) + error * len(mean) ** 0.5:
                reason = f"the sum has a mean with a norm of {norm:.3g}, above federation.secure.clip"
                for id in sorted(replies):  # one of them caused it, and the server cannot tell which
                    session.fail(id, reason)
                raise TooFew
        return self._reduce(change, share)

    def get_counted(self) -> Collection[str]:
        return self.replies

    def get_succeeded(self) -> Collection[str]:
        """``Aggregation.get_succeeded``: the clients without a failure in the last attempt."""
        attempts = [failure.attempt for failure in self.tally.failures]
        failed = {failure.client for failure in self.tally.failures if failure.attempt == max(attempts)}
        return [id for id in self.context.ids if id not in failed]

    def get_note(self) -> str | None:
        """``Aggregation.get_note``: the cost of masking, and the clients whose declared weights are limited."""
        if self._note is None or not self.lowered:
            return self._note
        return (
            f"{self._note}. {', '.join(sorted(self.lowered))} declared more examples than federation.max_weight_ratio "
            f"allows, and all clients agreed that {self._limit:g} count. Admit nodes with --max-examples, or set "
            "federation.weights: uniform, if these numbers are right"
        )

    @contextmanager
    def _record_exchanges(self, session: SecureSession) -> Generator[None]:
        transfers, failures = len(session.transfers), len(session.failures)
        try:
            yield
        finally:
            self.tally.transfers += session.transfers[transfers:]
            self.tally.failures += session.failures[failures:]

    def _build_initial_contribution(self) -> Tensors:
        """Return the initial values, common to all clients of a round, of the tensors that they contribute."""
        method, new_client = self.context.method, self.context.new_client
        order = method.sync(self.context.state, new_client)
        try:
            contributed = compute_origin(method, order, new_client, self.context.state.round)
        except ValueError as error:
            problem = (
                f"not all tensors of a reply can be summed: {error}. If they are batch counts of normalization layers, "
                "set model.extras to local or frozen"
            )
            raise FedspanError("federation.secure", None, problem=problem) from error
        return create_initial_values(contributed, method.start(order, new_client, {}, self.context.state.round).tensors)

    def _reduce(self, change: Mapping[str, Tensor], share: float) -> Reduced:
        """Return the mean that belongs to a summed change; with central privacy, after adding noise to the sum."""
        if self._privacy is None:
            return Reduced(mean=apply_change(change, self._origin), count=len(self.replies))
        # A client rounds each entry by up to a step after it has clipped, so it moves the sum by that much more.
        moves = self._clip * (1 + len(self._total) ** 0.5 / self._ring.levels)
        privacy = replace(self._privacy, privacy=self._privacy.privacy.model_copy(update={"clip": moves}))
        return privacy.release({name: value * share for name, value in change.items()})


def _decode_vector(reply: Reply, total: Integers) -> Integers:
    """Return the masked vector of a reply; ValueError: it is missing or does not match the layout of the sum."""
    message = serialization.decode(reply.body)
    dtype = torch.int32 if total.itemsize == 4 else torch.int64
    value = message.tensors.get(MASKED)
    if message.base is not None or message.scalars or len(message.tensors) != 1 or value is None:
        raise ValueError(f"a reply of {sorted(message.tensors)[:3]}, not of one masked vector")
    if value.dtype != dtype or value.shape != (len(total),):
        raise ValueError(f"a masked vector {list(value.shape)} of {value.dtype}, not [{len(total)}] of {dtype}")
    return value.numpy().view(total.dtype)
