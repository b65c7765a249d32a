"""The client half of secure aggregation: keys, shares, a masked vector, and finally one share of each neighbor.

    y_i = x_i + PRG(b_i) + sum_{j > i} PRG(s_ij) - sum_{j < i} PRG(s_ij)    (in the ring)

over the neighbors j that are still present; b_i is the client's own seed, s_ij the secret that it shares with j.
Everything is derived from one random secret of the session, which is on the client's disk between the phases, so any
process can continue. Phases only advance, each once a session, and session numbers grow; so a message that is repeated
or out of order gets no second reply. For each neighbor, a client reveals either the share of its own mask or that of
its key, never both.

The seeds s_ij and the sealed shares depend on the transcript of the client's agreement (``Agreement``): with a client
of another agreement, neither do masks cancel nor can shares be opened.

The session store of secure aggregation on a client's disk: one file a client, readable by its owner only.

``<folder>/<digest of the client's id>/session.json``, next to the client's stored state, is replaced as a whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from pydantic import Field, ValidationError

from fedspan.core.tensors import Tensors
from fedspan.core.values import Contribution, Message
from fedspan.crypto.identity import Identity, compute_fingerprint, verify_signature
from fedspan.crypto.keys import SessionKeys, compute_commitment, derive_pair_seed, draw_secret, open_sealed, seal
from fedspan.crypto.masks import Integers, Ring, add_mask
from fedspan.crypto.shares import SHARE, split
from fedspan.errors import FedspanError
from fedspan.federation.changes import clip_change, compute_change
from fedspan.federation.protocol import Count, Masking, Name, Order
from fedspan.federation.secagg.messages import (
    MASKED,
    Agreement,
    BinaryPart,
    KeysOrder,
    KeysReply,
    Phase,
    PhaseReply,
    PublicKeys,
    SharesOrder,
    SharesReply,
    UnmaskOrder,
    UnmaskReply,
    build_session_context,
    compute_layout_digest,
    compute_share,
    create_initial_values,
    flatten,
)
from fedspan.files import convert_disk_errors, read_bytes, write_atomic

__all__ = ["DiskSessionStore", "MemorySessionStore", "SecureClient", "Session", "SessionStore"]


class Session(BinaryPart):
    """A client's state between the phases of a session.

    Args:
        run: The run of the session.
        number: The session's number.
        phase: The last phase that was answered.
        secret: The secret that the keys are derived from; empty once the session has ended.
        peers: Keys of the client's neighborhood, as received in the phase of shares.
        agreement: The agreement of that phase.
        threshold: Number of shares that reconstruct a secret.
        present: The clients with which the vector was masked.
    """

    run: str
    number: Count
    phase: Literal["keys", "shares", "masked", "unmasked"]
    secret: bytes
    peers: dict[Name, PublicKeys] = Field(default_factory=dict)
    agreement: Agreement | None = None
    threshold: Count = 0
    present: tuple[Name, ...] = ()


class SessionStore(Protocol):
    """Store of the clients' sessions."""

    def load(self, client: str) -> Session | None:
        """Load a client's last session."""
        ...

    def store(self, client: str, session: Session) -> None:
        """Replace the last session by a new one, which is durable on return.

        Raises:
            FedspanError: If the disk is full or refuses to write.
        """
        ...


class MemorySessionStore:
    """Sessions in this process."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def load(self, client: str) -> Session | None:
        """``SessionStore.load``."""
        return self._sessions.get(client)

    def store(self, client: str, session: Session) -> None:
        """``SessionStore.store``."""
        self._sessions[client] = session


class SecureClient:
    """Client of secure aggregation, which answers its phases.

    Args:
        id: Id of the client.
        sessions: The store of its session.
        min_clients: Smallest number of clients of its neighborhood, itself included, that must be present in a sum.
        identity: Long-term key that signs the session keys; None: they are not signed.
        known: Fingerprints of the long-term keys of the other clients of a sum; None: the server is trusted with the
            keys.
        check: Function that raises ``FedspanError`` for an agreement, and a number of clients in the neighborhood,
            that differ from the run's config; None: all agreements are accepted.
    """

    def __init__(
        self,
        id: str,
        sessions: SessionStore,
        min_clients: int = 2,
        identity: Identity | None = None,
        known: Mapping[str, str] | None = None,
        check: Callable[[Agreement, int], None] | None = None,
    ) -> None:
        self.id, self.sessions, self.min_clients = id, sessions, min_clients
        self.identity, self.known, self.check = identity, known, check

    def answer(self, order: Phase) -> PhaseReply:
        """Carry out a phase.

        Raises:
            FedspanError: If the phase is out of order, or asks for shares that would reveal a client's reply.
            ValueError: If the phase is not addressed to this client.
        """
        if order.to != self.id:
            raise ValueError(f"the order is addressed to {order.to!r}, and this client is {self.id!r}")
        match order:
            case KeysOrder():
                return self._answer_keys(order)
            case SharesOrder():
                return self._answer_shares(order)
            case UnmaskOrder():
                return self._answer_unmask(order)

    def _load_session(self, run: str, number: int, after: str) -> Session:
        """Load the session, and check that ``after`` is its last completed phase."""
        session = self.sessions.load(self.id)
        if session is None or (session.run, session.number) != (run, number):
            raise FedspanError("message.session", number, "the client's last session")
        if session.phase != after:
            raise FedspanError(
                "message.session",
                session.phase,
                problem=f"phases must come in order, each once. This one follows {after!r}, not {session.phase!r}",
            )
        return session

    def _answer_keys(self, order: KeysOrder) -> KeysReply:
        last = self.sessions.load(self.id)
        if last is not None and order.session <= last.number:
            raise FedspanError(
                "message.session", order.session, f"a number above {last.number}, because every session is new"
            )
        session = Session(run=order.run, number=order.session, phase="keys", secret=draw_secret())
        self.sessions.store(self.id, session)
        return KeysReply(id=self.id, session=order.session, keys=self._sign_keys(session))

    def _sign_keys(self, session: Session) -> PublicKeys:
        keys = _get_public_keys(_derive_keys(session))
        if self.identity is None:
            return keys
        keys = keys.model_copy(update={"identity": self.identity.public})
        statement = keys.build_statement(build_session_context(session.run, session.number), self.id)
        return keys.model_copy(update={"signature": self.identity.sign(statement)})

    def _require_known_keys(self, peers: Mapping[str, PublicKeys], context: str) -> None:
        """Check that the keys of the neighborhood are signed by clients whose fingerprints are known.

        Raises:
            FedspanError: If a client is unknown, or its keys are not signed by its long-term key.
        """
        for id, keys in peers.items() if self.known is not None else ():
            if id == self.id:
                continue
            assert self.known is not None
            try:
                if id not in self.known:
                    raise ValueError("it is not in this node's file")
                if compute_fingerprint(keys.identity) != self.known[id]:
                    raise ValueError("its key has another fingerprint than in this node's file")
                verify_signature(keys.identity, keys.signature, keys.build_statement(context, id))
            except ValueError as error:
                problem = f"{id!r} cannot share a sum with this node: {error}"
                raise FedspanError("federation.secure", id, problem=problem) from error

    def _answer_shares(self, order: SharesOrder) -> SharesReply:
        session = self._load_session(order.run, order.session, "keys")
        keys, peers = _derive_keys(session), order.peers
        own_keys = peers.get(self.id)
        if own_keys is None or (own_keys.sealing, own_keys.masking) != (keys.sealing_public, keys.masking_public):
            raise FedspanError("message.peers", sorted(peers), "this client's own keys among them")
        if len({key for peer in peers.values() for key in (peer.sealing, peer.masking)}) < 2 * len(peers):
            raise FedspanError("message.peers", sorted(peers), "different keys for different clients")
        if not len(peers) < 2 * order.threshold <= 2 * len(peers):
            expected = f"more than half of the {len(peers)} clients of the neighborhood, and no more than all"
            raise FedspanError("message.threshold", order.threshold, expected)
        self._require_min_clients(len(peers), order.threshold)
        ids, context = sorted(peers), build_session_context(order.run, order.session)
        self._require_known_keys(peers, context)
        if order.agreement.round != order.round:
            raise FedspanError("message.agreement.round", order.agreement.round, f"the order's, {order.round}")
        if self.check is not None:
            self.check(order.agreement, len(peers))
        update = {"phase": "shares", "peers": peers, "threshold": order.threshold, "agreement": order.agreement}
        self.sessions.store(self.id, session.model_copy(update=update))
        transcript = order.agreement.build_transcript(context)
        shared = zip(
            split(keys.own, order.threshold, len(ids)), split(keys.masking, order.threshold, len(ids)), strict=True
        )
        sealed = {
            id: seal(keys.sealing, peers[id].sealing, self.id, id, transcript, own_keys + masking)
            for id, (own_keys, masking) in zip(ids, shared, strict=True)
        }
        return SharesReply(id=self.id, session=order.session, sealed=sealed)

    def require_maskable(self, order: Order, masking: Masking) -> None:
        """Check, before any training, that the reply to an order can be masked as requested.

        Raises:
            FedspanError: If it can't be masked.
        """
        self._load_maskable_session(order, masking)

    def _load_maskable_session(self, order: Order, masking: Masking) -> Session:
        session = self._load_session(order.run, masking.session, "shares")
        present = set(masking.peers)
        if self.id not in present or len(present) < len(masking.peers) or not present <= session.peers.keys():
            raise FedspanError("message.peers", masking.peers, "this client, and clients to which it sent shares")
        self._require_min_clients(len(present), session.threshold)
        agreement = _get_agreement(session)
        if self.check is not None:
            self.check(agreement, len(session.peers))
        ordered = {"task": order.task, "round": order.round, "lr": order.lr, "model": _compute_digest(order.body)}
        for name, value in ordered.items():
            if value != getattr(agreement, name):
                problem = f"the order's {name} differs from the agreement of the sum's clients"
                raise FedspanError("message.agreement", name, problem=problem)
        return session

    def mask(
        self, order: Order, masking: Masking, contribution: Contribution, started: Tensors, factor: float = 1.0
    ) -> tuple[Message, float]:
        """Mask a contribution for the sum, and return the factor by which its change was clipped beside it.

        Args:
            order: The order to train.
            masking: The ``secure`` part of the order.
            contribution: The contribution of the client's reply.
            started: The tensors at the start of the client's training.
            factor: Factor on the change before it is clipped: that of the round's first exchange, in the second one.

        Raises:
            FedspanError: If the phase is out of order, or the contribution does not fit into the sum.
        """
        session = self._load_maskable_session(order, masking)
        agreement = _get_agreement(session)
        ring = Ring(agreement.bits, agreement.clip, agreement.clients)
        assert order.client is not None
        change = self._compute_change(agreement, contribution, started)
        change = {name: value * factor for name, value in change.items()}
        clipped, clip_factor = clip_change(change, agreement.clip)
        total = ring.encode(flatten(clipped) * compute_share(order.client.weight, agreement.top))
        keys, transcript = _derive_keys(session), _get_transcript(session)
        self.sessions.store(self.id, session.model_copy(update={"phase": "masked", "present": masking.peers}))
        add_mask(total, keys.own)
        for peer in masking.peers:
            if peer != self.id:
                seed = derive_pair_seed(keys.masking, session.peers[peer].masking, transcript)
                add_mask(total, seed, 1 if self.id < peer else -1)
        return Message({MASKED: torch.from_numpy(_reinterpret_as_signed(total))}), clip_factor

    def _compute_change(
        self, agreement: Agreement, contribution: Contribution, started: Tensors
    ) -> Mapping[str, torch.Tensor]:
        if contribution.weight is not None or contribution.stack:
            raise FedspanError("reply", self.id, "a contribution to a sum, with the client's own weight")
        origin = create_initial_values(contribution.sum, started)
        if compute_layout_digest(origin) != agreement.layout:
            raise FedspanError("reply", self.id, "tensors with the same names and shapes as the other clients'")
        try:
            return compute_change(contribution, origin)
        except ValueError as error:
            raise FedspanError("reply", self.id, problem=f"the numbers cannot be summed: {error}") from error

    def _answer_unmask(self, order: UnmaskOrder) -> UnmaskReply:
        session = self._load_session(order.run, order.session, "masked")
        if self.check is not None:
            self.check(_get_agreement(session), len(session.peers))
        survivors, dropped = set(order.survivors), set(order.dropped)
        if survivors & dropped or (survivors | dropped) != set(session.present):
            expected = "each client of the mask exactly once, either as a survivor or as dropped"
            raise FedspanError(
                "message.survivors", sorted(survivors & dropped) or sorted(survivors | dropped), expected
            )
        if self.id not in survivors:
            raise FedspanError("message.survivors", sorted(survivors), "this client, because it sent its vector")
        self._require_min_clients(len(survivors), session.threshold)
        shares = self._open_shares(session, order.sealed)
        if len(shares) < session.threshold:
            problem = (
                f"only the shares of {len(shares)} of {len(session.present)} clients can be opened, so the other "
                "clients have another agreement than this client"
            )
            raise FedspanError("message.agreement", len(shares), f"at least {session.threshold}", problem=problem)
        self.sessions.store(self.id, session.model_copy(update={"phase": "unmasked", "secret": b"", "peers": {}}))
        revealed = {id: pair[:SHARE] if id in survivors else pair[SHARE:] for id, pair in shares.items()}
        return UnmaskReply(id=self.id, session=order.session, shares=revealed)

    def _open_shares(self, session: Session, sealed: Mapping[str, bytes]) -> dict[str, bytes]:
        """Decrypt both shares of every peer; peers whose shares cannot be decrypted are skipped."""
        keys, context = _derive_keys(session), _get_transcript(session)
        decrypted: dict[str, bytes] = {}
        for id in session.present:
            try:
                pair = open_sealed(keys.sealing, session.peers[id].sealing, id, self.id, context, sealed.get(id, b""))
            except ValueError:
                continue
            if len(pair) == 2 * SHARE:
                decrypted[id] = pair
        return decrypted

    def _require_min_clients(self, present: int, threshold: int) -> None:
        if present < max(threshold, self.min_clients):
            expected = f"at least {self.min_clients} clients, and at least {threshold} to unmask the sum"
            problem = f"a sum of {present} clients is too small"
            raise FedspanError("limits.secure_clients", present, expected, problem=problem)


def _derive_keys(session: Session) -> SessionKeys:
    return SessionKeys.derive(session.secret, build_session_context(session.run, session.number))


def _get_agreement(session: Session) -> Agreement:
    """Return a client's agreement, which is stored since the phase of shares."""
    assert session.agreement is not None
    return session.agreement


def _get_transcript(session: Session) -> str:
    return _get_agreement(session).build_transcript(build_session_context(session.run, session.number))


@lru_cache(maxsize=1)
def _compute_digest(body: bytes) -> str:
    """Compute the digest of a message; the clients of a simulation share the message."""
    return hashlib.sha256(body).hexdigest()


def _get_public_keys(keys: SessionKeys) -> PublicKeys:
    return PublicKeys(sealing=keys.sealing_public, masking=keys.masking_public, own=compute_commitment(keys.own))


def _reinterpret_as_signed(total: Integers) -> Integers:
    """Reinterpret the bits in an integer format that every version of torch supports."""
    return total.view(np.int32 if total.itemsize == 4 else np.int64)


class DiskSessionStore:
    """Sessions on a disk.

    Args:
        folder: The folder of one run, as in ``DiskClientStore``; created when something is stored.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, client: str) -> Session | None:
        """``SessionStore.load``.

        Raises:
            FedspanError: If the file is damaged, so that the phases answered so far are unknown.
        """
        path = self._get_path(client)
        if not path.is_file():
            return None
        try:
            return Session.model_validate_json(read_bytes(path))
        except ValidationError as error:
            problem = "the file is damaged. Remove it while no round runs"
            raise FedspanError(str(path), None, problem=problem) from error

    def store(self, client: str, session: Session) -> None:
        """``SessionStore.store``."""
        path = self._get_path(client)
        with convert_disk_errors(self.folder, "free some space; the round can be run again"):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomic(path, session.model_dump_json().encode(), 0o600)

    def _get_path(self, client: str) -> Path:
        return self.folder / hashlib.sha256(client.encode()).hexdigest()[:32] / "session.json"
