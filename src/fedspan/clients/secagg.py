"""The client half of secure aggregation: keys, shares, a masked vector, a signature, and one share of each client.

    y_i = x_i + PRG(b_i) + sum_{j > i} PRG(s_ij) - sum_{j < i} PRG(s_ij)    (in the ring)

over the clients j that are still present; b_i is the client's own seed, s_ij the secret that it shares with j.
Everything is derived from one random secret of the session, which is on the client's disk between the phases, so any
process can continue. Phases only advance, each once a session, and session numbers grow; so a message that is repeated
or out of order gets no second reply.

The seeds s_ij depend on the ids and keys of their two clients, so no two pairs have the same. Otherwise a client that
signed another one's key in another form, of which it lacks the private half, would get a mask that cancels with the
other's; such forms are refused, too. The seeds and the sealed shares depend on the transcript of the client's agreement
(``Agreement``): with a client of another agreement, or that was sent other keys, neither do masks cancel nor can shares
be opened.

**One sum a session.** The server decides whose vectors are in the sum. If it named different survivors to different
clients, it would get shares of both secrets of a client. So every client signs the survivors and the dropped clients,
and reveals shares only if t clients have signed the same (Bonawitz et al., CCS 2017). Of n clients, c of
which collude with the server and sign everything, two sets would need 2 (t - c) signatures of n - c honest clients,
each of which signs once. With 2 t > n + c there are not so many. For each client, an honest client then reveals either
the share of the own mask or that of the key, and the c colluders lack shares of the other one, since c < t. A sum has
at least c + 2 clients of positive weight, hence two honest ones. Clients of weight zero hide nobody; they count as
further colluders in the bound.

**One set of clients a model.** Training is deterministic, so the sums of {u, a, b} and of {a, b} over one model differ
by the vector of u. So a client that has revealed shares in a sum of a model reveals them again only in sums of exactly
the same clients, with the same clip, largest weight and facts about each of them (weight, rank, the round of its stored
state), whatever else an order says: session, round, learning rate, run. All clients agree on these facts, and each
compares its own with its order. A model has one accepted encoding, so two digests are two models. An attempt in which
nobody revealed shares gave no sum, and may be followed by one of other clients. The second exchange of a round, which
is of the same training, counts as a sum of the first one's model: ``Host`` deletes what a round trained before it
trains again or computes statistics, so that no second exchange is of another training than ``Session.trained``.

Why no combination of sums gives a single vector: let S_k be the honest clients of positive weight whose vectors the
k-th sum holds, and R_k those of them that revealed shares. Sums of one model with other clients, or other facts about
them, have disjoint R_k, because each client reveals shares for one of them only. Each R_k is more than half of its S_k:
at least t - c - z of at most n - c - z, where z honest clients have no weight, and 2 t > n + c + z. Suppose that a
combination of K such sums, each with a factor other than 0, holds only the vector of u. Every other client of a sum is
then in another one of them, too, so all R_k but u are in S_j without R_j for some j: sum |R_k| - 1 <= sum |S_k without
R_k|. Since |S_k without R_k| <= |R_k| - 1, the right side is at most sum |R_k| - K. So K = 1, and the sum would be of u
alone; but it has two honest clients.

A server that changes one bit of the model has another model. Against this, only sums of always the same clients
(``min_clients`` as large as their number) with equal weights help, or noise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch

from fedspan.clients.secagg_store import Session, SessionStore
from fedspan.core.tensors import Tensors
from fedspan.core.values import Contribution, Message
from fedspan.crypto.identity import Identity, compute_fingerprint, verify_signature
from fedspan.crypto.keys import (
    SessionKeys,
    compute_commitment,
    derive_pair_seed,
    draw_secret,
    open_sealed,
    require_public_key,
    seal,
    verify_session_signature,
)
from fedspan.crypto.masks import Ring, add_mask
from fedspan.crypto.shares import SHARE, split
from fedspan.errors import FedspanError
from fedspan.federation import serialization
from fedspan.federation.changes import clip_change, compute_change
from fedspan.federation.config import MIN_SECURE_CLIENTS
from fedspan.federation.protocol import ClientFacts, Masking, Order
from fedspan.federation.secagg.messages import (
    MASKED,
    Agreement,
    ConfirmOrder,
    ConfirmReply,
    KeysOrder,
    KeysReply,
    Phase,
    PhaseReply,
    PublicKeys,
    SharesOrder,
    SharesReply,
    UnmaskOrder,
    UnmaskReply,
    build_confirmation,
    build_session_context,
    compute_facts_digest,
    compute_layout_digest,
    compute_share,
    create_initial_values,
    flatten,
)


class SecureClient:
    """Client of secure aggregation, which answers its phases.

    Args:
        min_clients: Smallest number of clients in a sum, itself included.
        colluders: Largest number of clients that may collude with the server; sums that they could open are refused.
        identity: Long-term key that signs the session keys; None: they are not signed.
        known: Fingerprints of the long-term keys of the other clients of a sum; None: the server is trusted with the
            keys.
        check: Function that raises ``FedspanError`` for an agreement that differs from the run's config; None: all
            agreements are accepted.
    """

    def __init__(
        self,
        id: str,
        sessions: SessionStore,
        min_clients: int = MIN_SECURE_CLIENTS,
        colluders: int = 1,
        identity: Identity | None = None,
        known: Mapping[str, str] | None = None,
        check: Callable[[Agreement], None] | None = None,
    ) -> None:
        self.id, self.sessions, self.colluders = id, sessions, colluders
        self.min_clients = max(min_clients, colluders + 2)
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
            case ConfirmOrder():
                return self._answer_confirm(order)
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
        trained = None if last is None else last.trained
        session = Session(run=order.run, number=order.session, phase="keys", secret=draw_secret(), trained=trained)
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
        """Check that the clients' keys are signed by clients whose fingerprints are known."""
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
        keys, peers, agreement = _derive_keys(session), order.peers, order.agreement
        own_keys, ids = _get_public_keys(keys), sorted(peers)
        if self.id not in peers or peers[self.id].model_copy(update={"identity": "", "signature": b""}) != own_keys:
            raise FedspanError("message.peers", sorted(peers), "this client's own keys among them")
        if len({key for peer in peers.values() for key in peer.list_keys()}) < 3 * len(peers):
            raise FedspanError("message.peers", ids, "different keys for different clients")
        for id, peer in peers.items():
            try:
                require_public_key(peer.sealing)
                require_public_key(peer.masking)
            except ValueError as error:
                raise FedspanError("message.peers", id, problem=f"{id!r} cannot share secrets: {error}") from error
        if agreement.clients != len(peers):
            raise FedspanError("message.agreement.clients", agreement.clients, f"the number of keys, {len(peers)}")
        self._require_threshold(agreement, peers, order.facts)
        context = build_session_context(order.run, order.session)
        self._require_known_keys(peers, context)
        if [one.id for one in order.facts] != ids or compute_facts_digest(order.facts) != agreement.facts:
            raise FedspanError("message.facts", ids, "the facts about the clients that sent keys, as agreed on")
        if agreement.round != order.round:
            raise FedspanError("message.agreement.round", agreement.round, f"the order's, {order.round}")
        if self.check is not None:
            self.check(agreement)
        update = {"phase": "shares", "peers": peers, "agreement": agreement, "facts": order.facts}
        self.sessions.store(self.id, session.model_copy(update=update))
        transcript = agreement.build_transcript(context, peers)
        shared = zip(
            *(split(secret, agreement.threshold, len(ids)) for secret in (keys.own, keys.masking)), strict=True
        )
        sealed = {
            id: seal(keys.sealing, peers[id].sealing, self.id, id, transcript, own + masking)
            for id, (own, masking) in zip(ids, shared, strict=True)
        }
        return SharesReply(id=self.id, session=order.session, sealed=sealed)

    def require_maskable(self, order: Order, masking: Masking) -> None:
        """Check, before any training, that the reply to an order can be masked as requested."""
        self._load_maskable_session(order, masking)

    def _load_maskable_session(self, order: Order, masking: Masking) -> Session:
        session = self._load_session(order.run, masking.session, "shares")
        present = set(masking.peers)
        if self.id not in present or len(present) < len(masking.peers) or not present <= session.peers.keys():
            raise FedspanError("message.peers", masking.peers, "this client, and clients to which it sent shares")
        agreement = session.get_agreement()
        self._require_min_clients(present, session.facts, agreement.threshold)
        if self.check is not None:
            self.check(agreement)
        ordered = {"task": order.task, "round": order.round, "lr": order.lr, "model": _compute_digest(order.body)}
        for name, value in ordered.items():
            if value != getattr(agreement, name):
                problem = f"the order's {name} differs from the agreement of the sum's clients"
                raise FedspanError("message.agreement", name, problem=problem)
        if not _is_canonical(order.body):
            raise FedspanError("message.body", len(order.body), "the only encoding of its message that nodes accept")
        if order.client is None or ClientFacts.from_client(order.client) not in session.facts:
            problem = "the order's facts about this client differ from those that the sum's clients agreed on"
            raise FedspanError("message.client", self.id, problem=problem)
        if order.task != "second":
            session = session.model_copy(update={"trained": (agreement.round, agreement.model)})
        elif session.trained is None or session.trained[0] != order.round:
            raise FedspanError("message.agreement", "second", "a second exchange of the round that was trained last")
        revealed = self.sessions.load_sum(self.id, session.get_model())
        if revealed is not None and present.issuperset(revealed.clients):  # the others may drop out
            self._require_same_sum(session, revealed.clients)
        else:
            self._require_same_sum(session, present)
        return session

    def mask(
        self, order: Order, masking: Masking, contribution: Contribution, started: Tensors, factor: float = 1.0
    ) -> tuple[Message, float]:
        """Mask a contribution for the sum, and return the factor by which its change was clipped beside it.

        Args:
            masking: The ``secure`` part of the order.
            started: The tensors at the start of the client's training.
            factor: Factor on the change before it is clipped: that of the round's first exchange, in the second one.

        Raises:
            FedspanError: If the phase is out of order, or the contribution does not fit into the sum.
        """
        session = self._load_maskable_session(order, masking)
        agreement = session.get_agreement()
        ring = Ring(agreement.bits, agreement.clip, agreement.clients)
        assert order.client is not None
        change = self._compute_change(agreement, contribution, started)
        change = {name: value * factor for name, value in change.items()}
        clipped, clip_factor = clip_change(change, agreement.clip)
        total = ring.encode(flatten(clipped) * compute_share(order.client.weight, agreement.top))
        keys, transcript = _derive_keys(session), session.build_transcript()
        self.sessions.store(self.id, session.model_copy(update={"phase": "masked", "present": masking.peers}))
        add_mask(total, keys.own)
        for peer in masking.peers:
            if peer != self.id:
                seed = derive_pair_seed(keys.masking, session.peers[peer].masking, transcript, self.id, peer)
                add_mask(total, seed, 1 if self.id < peer else -1)
        signed = total.view(np.int32 if total.itemsize == 4 else np.int64)  # which every version of torch supports
        return Message({MASKED: torch.from_numpy(signed)}), clip_factor

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

    def _answer_confirm(self, order: ConfirmOrder) -> ConfirmReply:
        session = self._load_session(order.run, order.session, "masked")
        agreement = session.get_agreement()
        if self.check is not None:
            self.check(agreement)
        survivors, dropped = set(order.survivors), set(order.dropped)
        if survivors & dropped or (survivors | dropped) != set(session.present):
            expected = "each client of the mask exactly once, either as a survivor or as dropped"
            raise FedspanError(
                "message.survivors", sorted(survivors & dropped) or sorted(survivors | dropped), expected
            )
        if self.id not in survivors:
            raise FedspanError("message.survivors", sorted(survivors), "this client, because it sent its vector")
        self._require_min_clients(survivors, session.facts, agreement.threshold)
        self._require_same_sum(session, survivors)
        shares = self._open_shares(session, order.sealed)
        if len(shares) < agreement.threshold:
            problem = (
                f"only the shares of {len(shares)} of {len(session.present)} clients can be opened, so the other "
                "clients have another agreement than this client"
            )
            raise FedspanError("message.agreement", len(shares), f"at least {agreement.threshold}", problem=problem)
        update = {"phase": "confirmed", "survivors": order.survivors, "sealed": {id: order.sealed[id] for id in shares}}
        self.sessions.store(self.id, session.model_copy(update=update))
        statement = build_confirmation(session.build_transcript(), survivors, dropped)
        unopened = tuple(id for id in session.present if id not in shares)
        signature = _derive_keys(session).sign(statement)
        return ConfirmReply(id=self.id, session=order.session, signature=signature, unopened=unopened)

    def _answer_unmask(self, order: UnmaskOrder) -> UnmaskReply:
        session = self._load_session(order.run, order.session, "confirmed")
        agreement, survivors = session.get_agreement(), frozenset(session.survivors)
        if self.check is not None:
            self.check(agreement)
        statement = build_confirmation(session.build_transcript(), survivors, set(session.present) - survivors)
        signers = [id for id in survivors & order.signatures.keys() if _is_signed(session, id, order, statement)]
        if len(signers) < agreement.threshold:
            problem = f"{len(signers)} clients have signed that the sum is of the same clients as this client's"
            raise FedspanError("message.signatures", sorted(signers), f"{agreement.threshold} clients", problem=problem)
        self._require_same_sum(session, survivors)
        shares = self._open_shares(session, session.sealed)
        self.sessions.store_sum(self.id, session.get_model(), session.build_sum(survivors))
        update = {"phase": "unmasked", "secret": b"", "peers": {}, "sealed": {}}
        self.sessions.store(self.id, session.model_copy(update=update))
        revealed = {id: pair[:SHARE] if id in survivors else pair[SHARE:] for id, pair in shares.items()}
        return UnmaskReply(id=self.id, session=order.session, shares=revealed)

    def _require_same_sum(self, session: Session, survivors: Collection[str]) -> None:
        """Check that a sum has the clients, and facts about them, of the model's sums in which shares were revealed."""
        revealed, current = self.sessions.load_sum(self.id, session.get_model()), session.build_sum(survivors)
        if revealed is not None and revealed != current:
            problem = (
                "this client has revealed shares in a sum of this model with other clients or other facts about "
                "them, and the difference of two sums may be a single update"
            )
            expected = (
                f"a sum of {', '.join(revealed.clients)} with clip {revealed.clip:g} and weights up to "
                f"{revealed.top:g}, each with the same weight, rank and stored state, or a run with another seed or "
                "base model"
            )
            raise FedspanError("message.survivors", current.clients, expected, problem=problem)

    def _open_shares(self, session: Session, sealed: Mapping[str, bytes]) -> dict[str, bytes]:
        """Decrypt both shares of every peer; peers whose shares cannot be decrypted are skipped."""
        keys, context = _derive_keys(session), session.build_transcript()
        decrypted: dict[str, bytes] = {}
        for id in session.present:
            try:
                pair = open_sealed(keys.sealing, session.peers[id].sealing, id, self.id, context, sealed.get(id, b""))
            except ValueError:
                continue
            if len(pair) == 2 * SHARE:
                decrypted[id] = pair
        return decrypted

    def _require_threshold(self, agreement: Agreement, present: Collection[str], facts: Sequence[ClientFacts]) -> None:
        """Check that the number of clients that open a secret withstands the colluders."""
        clients, threshold, idle = agreement.clients, agreement.threshold, sum(not one.weight > 0 for one in facts)
        least = (clients + self.colluders + idle) / 2
        if not least < threshold <= clients:
            problem = (
                f"{threshold} of {clients} clients can open a sum, which does not withstand {self.colluders} that "
                f"collude with the server{f' and {idle} without weight' if idle else ''}"
            )
            expected = f"federation.secure.threshold such that more than {least:g} clients, and not more than all, can"
            raise FedspanError("limits.colluders", self.colluders, expected, problem=problem)
        self._require_min_clients(present, facts, threshold)

    def _require_min_clients(self, present: Collection[str], facts: Sequence[ClientFacts], threshold: int) -> None:
        counted = len(present) - sum(not one.weight > 0 for one in facts if one.id in present)
        if counted < max(threshold, self.min_clients):
            expected = (
                f"at least {self.min_clients} clients, and at least {threshold} to unmask the sum, each with a weight "
                "above 0"
            )
            problem = f"a sum of {counted} clients is too small"
            raise FedspanError("limits.secure_clients", counted, expected, problem=problem)


def _derive_keys(session: Session) -> SessionKeys:
    return SessionKeys.derive(session.secret, build_session_context(session.run, session.number))


def _is_signed(session: Session, id: str, order: UnmaskOrder, statement: bytes) -> bool:
    try:
        verify_session_signature(session.peers[id].signing, order.signatures[id], statement)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=1)
def _compute_digest(body: bytes) -> str:
    """Compute the digest of a message; the clients of a simulation share the message."""
    return hashlib.sha256(body).hexdigest()


@lru_cache(maxsize=1)
def _is_canonical(body: bytes) -> bool:
    """Return whether a message is encoded as by ``encode``, so that equal messages have equal digests.

    Like ``_compute_digest``, it runs once for all clients.
    """
    return serialization.encode(serialization.decode(body)) == body


def _get_public_keys(keys: SessionKeys) -> PublicKeys:
    return PublicKeys(
        sealing=keys.sealing_public,
        masking=keys.masking_public,
        own=compute_commitment(keys.own),
        signing=keys.signing_public,
    )
