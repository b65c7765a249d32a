"""The server's half of a session: whose keys it accepts, and headers with mistakes."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedspan.core.values import Client
from fedspan.federation.progress import TooFew
from fedspan.federation.protocol import ClientFacts, Envelope, read_header
from fedspan.federation.secagg import messages

pytest.importorskip("cryptography", reason="the extra fedspan[secagg] is not installed")
pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from fedspan.clients.refusals import refuse_any
from fedspan.clients.secagg import SecureClient
from fedspan.clients.secagg_store import MemorySessionStore
from fedspan.crypto.identity import Identity, compute_fingerprint, load_identity
from fedspan.federation.secagg.messages import build_session_context
from fedspan.federation.secagg.session import SecureSession

HONEST, HOSTILE = ("a", "b", "c"), "d"
Change = Callable[[messages.PublicKeys, str, Identity], messages.PublicKeys]


def make_identity(path: Path) -> Identity:
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    return load_identity(path)


class Clients:
    """Clients that sign their session keys, and join sums only with the keys that they know; one changes its own."""

    def __init__(self, identities: Mapping[str, Identity], change: Change, stranger: Identity) -> None:
        known = {id: compute_fingerprint(one.public) for id, one in identities.items()}
        self.clients = {
            id: SecureClient(id, MemorySessionStore(), identity=one, known=known) for id, one in identities.items()
        }
        self.change, self.stranger = change, stranger

    def exchange(self, orders: Any, on_reply: Callable[[str, Envelope], bool], *_: object, **__: object) -> None:
        for id in orders:
            order = messages.decode_phase(orders[id])
            try:
                reply = self.clients[id].answer(order).to_envelope()
            except Exception as error:
                reply = refuse_any(order, error)
            if (id, order.task) == (HOSTILE, "keys"):
                decoded = read_header(messages.KeysReply, reply)
                assert decoded.keys is not None
                keys = self.change(decoded.keys, build_session_context(order.run, order.session), self.stranger)
                reply = decoded.model_copy(update={"keys": keys}).to_envelope()
            on_reply(id, reply)


def leave(keys: messages.PublicKeys, context: str, stranger: Identity) -> messages.PublicKeys:
    return keys


def remove_signature(keys: messages.PublicKeys, context: str, stranger: Identity) -> messages.PublicKeys:
    return keys.model_copy(update={"identity": "", "signature": b""})


def sign_by_another(keys: messages.PublicKeys, context: str, stranger: Identity) -> messages.PublicKeys:
    signature = stranger.sign(keys.build_statement(context, HOSTILE))
    return keys.model_copy(update={"identity": stranger.public, "signature": signature})


def name_no_key(keys: messages.PublicKeys, context: str, stranger: Identity) -> messages.PublicKeys:
    return keys.model_copy(update={"identity": "key"})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (leave, None),
        (remove_signature, "not signed by the key with which it was admitted"),
        (sign_by_another, "not signed by the key with which it was admitted"),
        (name_no_key, "not a public key"),
    ],
)
def test_keys_that_the_admitted_key_did_not_sign_fail_their_sender_alone(
    change: Change, reason: str | None, tmp_path: Path
) -> None:
    """The other nodes know this key by its fingerprint, and would refuse the sum."""
    identities = {id: make_identity(tmp_path / id) for id in (*HONEST, HOSTILE)}
    transport: Any = Clients(identities, change, make_identity(tmp_path / "stranger"))
    admitted = {id: f"{one.public} {id}'s key" for id, one in identities.items()}
    session = SecureSession(transport, 10.0, "run", 0, 0, 3, admitted)

    facts = {id: ClientFacts.from_client(Client(id, 2, 1.0, 1, 1.0, None)) for id in (*HONEST, HOSTILE)}

    def agree(ids: Collection[str]) -> messages.Agreement:
        digest = "0" * 64
        return messages.Agreement(
            config="", task="train", round=0, lr=0.1, model=digest, clients=len(ids), threshold=3, clip=1.0, bits=32,
            top=1.0, layout=digest, facts=messages.compute_facts_digest(facts[id] for id in ids),
        )  # fmt: skip

    session.begin(facts, agree)
    assert set(session.present) == {*HONEST, *([HOSTILE] if reason is None else [])}
    assert [failure.client for failure in session.failures] == ([] if reason is None else [HOSTILE])
    assert all((reason or "") in failure.reason for failure in session.failures)


def test_too_few_keys_end_a_session_before_its_clients_agree(tmp_path: Path) -> None:
    identities = {id: make_identity(tmp_path / id) for id in ("a", "b")}
    transport: Any = Clients(identities, leave, make_identity(tmp_path / "stranger"))
    session = SecureSession(transport, 10.0, "run", 0, 0, 3)

    def agree(ids: Collection[str]) -> messages.Agreement:
        pytest.fail(f"{ids} were to agree")

    with pytest.raises(TooFew):
        session.begin(list(identities), agree)


def test_phases_come_back_as_they_were_sent() -> None:
    session: dict[str, Any] = {"round": 0, "attempt": 0, "to": "a", "session": 7}
    keys = messages.PublicKeys(
        sealing=bytes(range(32)),
        masking=bytes(range(100, 132)),
        own=bytes(range(60, 92)),
        signing=bytes(range(150, 182)),
        identity="a b",
        signature=b"signed",
    )
    agreement = messages.Agreement(
        config="", task="train", round=0, lr=0.1, model="0" * 64, clients=3, threshold=3, clip=1.5, bits=32, top=2.0,
        layout="0" * 64, facts="0" * 64,
    )  # fmt: skip
    phases = [
        messages.KeysOrder(**session),
        messages.SharesOrder(**session, peers={"a": keys, "b": keys}, agreement=agreement, facts=()),
        messages.ConfirmOrder(**session, survivors=("a", "b"), dropped=("c",), sealed={"a": bytes(range(96))}),
        messages.UnmaskOrder(**session, signatures={"a": bytes(range(64))}),
        messages.KeysReply(id="a", session=7, keys=keys),
        messages.SharesReply(id="a", session=7, sealed={"b": bytes(range(96))}),
        messages.ConfirmReply(id="a", session=7, signature=bytes(range(64)), unopened=("c",)),
        messages.UnmaskReply(id="a", session=7, shares={"b": bytes(range(34))}),
    ]
    for phase in phases:
        assert read_header(type(phase), phase.to_envelope()) == phase
    assert messages.refuse_phase(messages.KeysOrder(**session), "w" * 5000).failed == "w" * 4096
