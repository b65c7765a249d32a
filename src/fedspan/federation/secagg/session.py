"""The server half of a secure aggregation session: keys and shares before training, confirming and unmasking after."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fedspan.crypto.identity import compute_fingerprint, verify_signature
from fedspan.crypto.keys import (
    compute_commitment,
    compute_masking_public,
    compute_share_commitment,
    derive_pair_seed,
    read_commitments,
    require_public_key,
    verify_session_signature,
)
from fedspan.crypto.masks import Integers, add_mask
from fedspan.crypto.shares import combine
from fedspan.federation.absences import Awaited
from fedspan.federation.progress import Failure, TooFew, Transfer
from fedspan.federation.protocol import ClientFacts, Envelope, read_header, serial
from fedspan.federation.secagg.messages import (
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
)
from fedspan.federation.transport import Orders, Transport


@dataclass(frozen=True)
class Masked:
    """The masking partners of a session."""

    transcript: str
    """Digest of the session and the agreement of its clients."""
    present: tuple[str, ...]
    """The clients that were ordered to train."""
    needed: int
    """Number of shares that reconstruct a secret."""
    keys: Mapping[str, PublicKeys]
    sealed: Mapping[str, Mapping[str, bytes]]
    """The shares that every client sealed for each other one, with commitments to them."""
    survivors: Collection[str]
    """Clients whose vectors are in the sum."""
    unopened: Mapping[str, Collection[str]]
    """Clients whose shares cannot be opened, by the client that claims so."""


class SharesError(ValueError):
    """Shares that do not reveal a client's secret.

    Args:
        faults: Clients that certainly broke the protocol, with what they did.
        disputes: Other clients that are involved, with what happened: each of them may be honest.
    """

    def __init__(self, faults: Mapping[str, str], disputes: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{id}: {reason}" for id, reason in sorted({**disputes, **faults}.items())))
        self.faults, self.disputes = faults, disputes


def require_openable(present: Collection[str], needed: int, unopened: Mapping[str, Collection[str]]) -> None:
    """Check that enough clients can open the shares of each other one.

    A client that cannot open the shares of another one claims that their owner sealed wrong ones. That convicts the
    owner if more than half of the clients claim it.

    Args:
        unopened: The clients whose shares cannot be opened, by the client that claims so.

    Raises:
        SharesError: If too few can open the shares of a client.
    """
    faults, disputes = dict[str, str](), dict[str, str]()
    for id in present:
        claiming = sorted(receiver for receiver, owners in unopened.items() if id in owners)
        if not claiming or len(unopened) - len(claiming) >= needed:
            continue
        names = ", ".join(map(repr, claiming))
        if 2 * len(claiming) > len(present):
            faults[id] = f"what it sealed for {names} does not open"
        else:
            reason = f"{id!r} sealed shares that do not open, or {names} can open them; it takes {needed} shares"
            disputes.update(dict.fromkeys([id, *claiming], reason))
    if faults or disputes:
        raise SharesError(faults, disputes)


def unmask(total: Integers, masked: Masked, revealed: Mapping[str, Mapping[str, bytes]]) -> dict[str, str]:
    """Remove all masks from a sum, in place.

    A revealed share counts if it is the one that its owner committed itself to when it sealed the shares. Honest
    clients open no other shares, so another one convicts the client that revealed it; shares that count and give
    another secret than that of the owner's public keys convict the owner. A client that can open a share and withholds
    it is convicted, too.

    Args:
        masked: The masking partners of the session.
        revealed: Shares by the client that stored them and the client whose secret they share: a survivor's own mask, a
            dropout's masking key.

    Returns:
        The clients that revealed a wrong share, with the reason; the others' sufficed.

    Raises:
        SharesError: If the shares of a client are too few or not of its secret; the sum is unchanged.
    """
    secrets, faults, disputes = dict[str, bytes | None](), dict[str, str](), dict[str, str]()
    for id in masked.present:
        secrets[id] = _open(id, masked, revealed, faults, disputes)
    if None in secrets.values():
        raise SharesError(faults, disputes)
    for id, secret in secrets.items():
        assert secret is not None
        if id in masked.survivors:
            add_mask(total, secret, -1)
            continue
        for peer in masked.survivors:
            seed = derive_pair_seed(secret, masked.keys[peer].masking, masked.transcript, id, peer)
            add_mask(total, seed, -1 if peer < id else 1)
    return faults


def _open(
    id: str,
    masked: Masked,
    revealed: Mapping[str, Mapping[str, bytes]],
    faults: dict[str, str],
    disputes: dict[str, str],
) -> bytes | None:
    """Return a client's secret, or None, and add what is found to ``faults`` and ``disputes``."""
    stays, needed = id in masked.survivors, masked.needed
    shares = {receiver: given[id] for receiver, given in sorted(revealed.items()) if id in given}
    for receiver in revealed.keys() - shares.keys():
        if id not in masked.unopened[receiver]:
            faults[receiver] = f"it withholds its share of {id!r}, which it can open"
    right = list[bytes]()
    for receiver, share in shares.items():
        of_own_mask, of_masking_key = read_commitments(masked.sealed[id][receiver])
        if compute_share_commitment(share) == (of_own_mask if stays else of_masking_key):
            right.append(share)
        else:
            faults[receiver] = f"its share of {id!r} is not the one that {id!r} sealed for it"
    if len(right) >= needed:
        try:
            secret = combine(right, needed)
        except ValueError:  # of another length, or with the number of another one
            secret = None
        public = masked.keys[id].own if stays else masked.keys[id].masking
        if secret and (compute_commitment if stays else compute_masking_public)(secret) == public:
            return secret
        faults[id] = "the shares that it sealed are not of its secret"
        return None
    if len(right) == len(shares):
        disputes.update(dict.fromkeys(shares, f"{len(right)} right shares of {id!r}; it takes {needed}"))
    return None


A = TypeVar("A", bound=PhaseReply)


class SecureSession:
    """The secure aggregation session of one attempt of a round.

    Args:
        seconds: Time limit of a phase for the clients, in seconds.
        identities: Public keys in OpenSSH's format that have to sign the clients' session keys, by client; others need
            no signature.
    """

    def __init__(
        self,
        transport: Transport,
        seconds: float,
        run: str,
        round: int,
        attempt: int,
        quorum: int,
        identities: Mapping[str, str] | None = None,
    ) -> None:
        self.transport, self.seconds = transport, seconds
        self.run, self.round, self.attempt, self.quorum = run, round, attempt, quorum
        self.number = serial()
        self.identities = identities or {}
        self.transfers: list[Transfer] = []
        self.failures: list[Failure] = []
        self._keys: dict[str, PublicKeys] = {}
        self._sent_keys = set[bytes]()
        self._needed = 0
        self._sealed: dict[str, Mapping[str, bytes]] = {}
        self._transcript = ""
        self.present: tuple[str, ...] = ()
        """The clients that may train, after ``begin``: the masking partners of each."""
        self.wrong = set[str]()
        """Clients that certainly sealed wrong shares, of a sum for which nobody was asked to reveal any."""
        self.revealed = frozenset[str]()
        """Clients of the sum for which shares were requested; those that revealed some accept no other one."""

    def fail(self, client: str, reason: str) -> None:
        """Record why a client's reply is rejected."""
        self.failures.append(Failure(client, self.attempt, reason))

    def require(self, clients: Collection[str]) -> None:
        """Check that enough clients remain."""
        if len(clients) < self.quorum:
            raise TooFew

    def begin(
        self,
        clients: Mapping[str, ClientFacts],
        agree: Callable[[Collection[str]], Agreement],
        absent: Collection[str] = frozenset(),
    ) -> None:
        """Exchange keys and shares.

        Args:
            agree: Returns what the clients that sent keys are to agree on.
            absent: Clients whose keys are not waited for if the others suffice.
        """
        first = {id: self._order(KeysOrder, id) for id in clients}
        self._exchange(KeysReply, first, absent, wait_for_offline=self.attempt > 0)
        self.require(self._keys)
        agreement, peers = agree(self._keys), dict(sorted(self._keys.items()))
        self._needed, self.quorum = agreement.threshold, max(self.quorum, agreement.threshold)
        self._transcript = agreement.build_transcript(build_session_context(self.run, self.number), peers)
        parts = {"peers": peers, "agreement": agreement, "facts": tuple(clients[id] for id in peers)}
        orders = {id: self._order(SharesOrder, id, **parts) for id in peers}
        for id, reply in self._exchange(SharesReply, orders).items():
            if reply.sealed.keys() != peers.keys():
                self.fail(id, "shares: not one for each client")
            else:
                self._sealed[id] = reply.sealed
        self.require(self._sealed)
        self.present = tuple(sorted(self._sealed))

    def end(self, total: Integers, survivors: Collection[str]) -> None:
        """Have the clients confirm whose vectors are in the sum, collect the shares, and unmask the sum in place.

        A client that does not reply in these phases is still included in the sum.

        Raises:
            TooFew: If too few clients replied, or their shares are wrong.
        """
        failures_before = len(self.failures)
        try:
            confirmed = self._confirm(survivors)
            if len(confirmed) < self._needed:
                raise TooFew
            unopened = {id: reply.unopened for id, reply in confirmed.items()}
            require_openable(self.present, self._needed, unopened)
            masked = Masked(self._transcript, self.present, self._needed, self._keys, self._sealed, survivors, unopened)
            signatures = {id: reply.signature for id, reply in confirmed.items()}
            self.revealed = frozenset(survivors)
            orders = {id: self._order(UnmaskOrder, id, signatures=signatures) for id in confirmed}
            revealed = {id: reply.shares for id, reply in self._exchange(UnmaskReply, orders).items()}
            faults = unmask(total, masked, revealed)
        except SharesError as error:
            explained = {failure.client for failure in self.failures[failures_before:]}  # by the clients themselves
            if not self.revealed:
                self.wrong |= error.faults.keys()
            for id, reason in sorted({**error.disputes, **error.faults}.items()):
                if id not in explained:
                    self.fail(id, f"unmask: {reason}")
            raise TooFew from error
        del self.failures[failures_before:]
        for id, reason in sorted(faults.items()):
            self.fail(id, f"unmask: {reason}; it was not needed")

    def _confirm(self, survivors: Collection[str]) -> dict[str, ConfirmReply]:
        """Have the survivors sign whose vectors are in the sum, and return the replies with valid signatures."""
        dropped = tuple(peer for peer in self.present if peer not in survivors)
        sorted_survivors = tuple(sorted(survivors))
        orders = {
            id: self._order(
                ConfirmOrder,
                id,
                survivors=sorted_survivors,
                dropped=dropped,
                sealed={peer: self._sealed[peer][id] for peer in self.present},
            )
            for id in sorted_survivors
        }
        statement = build_confirmation(self._transcript, survivors, dropped)
        confirmed = dict[str, ConfirmReply]()
        for id, reply in sorted(self._exchange(ConfirmReply, orders).items()):
            try:
                verify_session_signature(self._keys[id].signing, reply.signature, statement)
            except ValueError as error:
                self.fail(id, f"confirm: {error}")
            else:
                confirmed[id] = reply
        return confirmed

    def _order(self, kind: Callable[..., Phase], to: str, **parts: Any) -> Phase:
        return kind(
            run=self.run,
            serial=serial(),
            round=self.round,
            attempt=self.attempt,
            to=to,
            session=self.number,
            **parts,
        )

    def _exchange(
        self,
        kind: type[A],
        orders: Mapping[str, Phase],
        absent: Collection[str] = frozenset(),
        *,
        wait_for_offline: bool = False,
    ) -> dict[str, A]:
        """Send every client its order and return the valid replies; the reasons against other replies are recorded."""
        replies, awaited = dict[str, A](), Awaited(orders, absent)

        def create_order(id: str) -> Envelope:
            envelope = orders[id].to_envelope()
            self.transfers.append(Transfer(id, "down", envelope.size, 0))
            return envelope

        def take_reply(id: str, reply: Envelope | str) -> bool:
            try:
                replies[id] = self._read(kind, id, reply)
            except ValueError as error:
                self.fail(id, f"{orders[id].task}: {error}")
            if isinstance(reply, Envelope):
                self.transfers.append(Transfer(id, "up", reply.size, 0))
            return awaited.is_over(id, lambda: replies, self.quorum)

        task = next(iter(orders.values())).task if orders else ""
        lazy_orders = Orders(task, orders, create_order, lambda _: 0)
        self.transport.exchange(lazy_orders, take_reply, self.seconds, wait_for_offline=wait_for_offline)
        return replies

    def _read(self, kind: type[A], id: str, envelope: Envelope | str) -> A:
        if isinstance(envelope, str):
            raise ValueError(envelope)
        reply = read_header(kind, envelope)
        if (reply.id, reply.session) != (id, self.number):
            raise ValueError(f"an answer of {reply.id!r} in session {reply.session}; this is {self.number}")
        if reply.failed is not None:
            raise ValueError(reply.failed)
        if isinstance(reply, KeysReply):
            self._store_keys(id, reply.keys)
        return reply

    def _store_keys(self, id: str, keys: PublicKeys | None) -> None:
        """Check and store a client's keys.

        The other clients refuse the same keys, but a refusal does not tell the server whose keys are the reason.

        Raises:
            ValueError: If the other clients would refuse them.
        """
        if keys is None:
            raise ValueError("it sent none")
        sent = set(keys.list_keys())
        if len(sent) < 3:
            raise ValueError("two of its keys are the same")
        if sent & self._sent_keys:
            raise ValueError("another client has sent one of its keys")
        for key in (keys.sealing, keys.masking):
            require_public_key(key)
        expected = self.identities.get(id, "")
        if expected and (not keys.identity or compute_fingerprint(keys.identity) != compute_fingerprint(expected)):
            raise ValueError("they are not signed by the key with which it was admitted")
        if keys.identity or keys.signature:
            context = build_session_context(self.run, self.number)
            verify_signature(keys.identity, keys.signature, keys.build_statement(context, id))
        self._sent_keys |= sent
        self._keys[id] = keys
