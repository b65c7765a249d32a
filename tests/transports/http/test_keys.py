"""Certificates, keys and signatures: what they are good for, and who may read them."""

import itertools
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedspan.federation.protocol import Envelope
from fedspan.transports.http import keys, signing
from helpers.refusals import refused


def handshake(folder: Path, authority: Path, name: str) -> None:
    """Connect to a server with the folder's certificate, as a client that trusts an authority and expects a name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / keys.CERTIFICATE, folder / keys.KEY)
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            context.wrap_socket(theirs, server_side=True).close()
        except (ssl.SSLError, OSError):
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        ssl.create_default_context(cafile=str(authority)).wrap_socket(ours, server_hostname=name).close()
    finally:
        ours.close()
        thread.join()


def test_the_certificate_is_good_for_its_names_and_no_others(tmp_path: Path) -> None:
    keys.make_authority(tmp_path / "a", ["fl.example.org", "192.0.2.7"])
    for name in ("fl.example.org", "192.0.2.7", "127.0.0.1", "localhost"):
        handshake(tmp_path / "a", tmp_path / "a" / keys.AUTHORITY, name)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path / "a", tmp_path / "a" / keys.AUTHORITY, "other.example.org")


def test_a_first_start_that_was_interrupted_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever file or folder was about to be opened, renamed or removed."""
    for steps in itertools.count():
        left = iter(range(steps))
        folder = tmp_path / str(steps)
        folder.mkdir()

        def interrupt(call: Callable[..., Any], left: Iterator[int] = left) -> Callable[..., Any]:
            def run(*args: Any, **options: Any) -> Any:
                if next(left, None) is None:
                    raise KeyboardInterrupt
                return call(*args, **options)

            return run

        try:
            with monkeypatch.context() as patched:
                for name in ("open", "rename", "replace", "rmdir"):
                    patched.setattr(os, name, interrupt(getattr(os, name)))
                keys.ensure_authority(folder, [])
            break
        except KeyboardInterrupt:
            keys.ensure_authority(folder, [])
            handshake(folder, folder / keys.AUTHORITY, "localhost")
    assert steps >= 4
    assert sorted(os.listdir(folder)) == sorted((keys.AUTHORITY, keys.CERTIFICATE, keys.KEY, keys.ORDER_KEY))


def test_certificates_without_their_authority_are_not_replaced(tmp_path: Path) -> None:
    keys.make_authority(tmp_path, [])
    (tmp_path / keys.AUTHORITY).unlink()
    with refused("certificates", "already has certificates"):
        keys.ensure_authority(tmp_path, [])


def test_another_authority_is_not_trusted(tmp_path: Path) -> None:
    for name in ("a", "b"):
        keys.make_authority(tmp_path / name, [])
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path / "a", tmp_path / "b" / keys.AUTHORITY, "localhost")


def test_what_is_secret_is_only_its_owner_s_and_nothing_is_overwritten(tmp_path: Path) -> None:
    keys.make_authority(tmp_path / "a", [])
    public = keys.make_node_key(tmp_path / "node.key")
    for path in (tmp_path / "a" / keys.KEY, tmp_path / "node.key"):
        assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    assert b"PRIVATE" not in public.read_bytes()
    with refused("certificates", "already has certificates"):
        keys.make_authority(tmp_path / "a", [])
    with refused("key", r"node\.key' already exists"):
        keys.make_node_key(tmp_path / "node.key")


def test_a_key_is_read_back_unless_others_can_read_it_or_it_is_none(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    public = keys.make_node_key(path)
    found = keys.load_node_key(path).public_key()
    assert found.curve.name == "secp384r1"
    path.chmod(0o644)
    with refused("key", "chmod 600"):
        keys.load_node_key(path)
    for content in (b"", b"nonsense", public.read_bytes()):
        path.write_bytes(content)
        path.chmod(0o600)
        with refused("key", "a private key"):
            keys.load_node_key(path)
    with refused("key", "a private key"):
        keys.load_node_key(tmp_path / "nothing")


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="there is no ssh-keygen here")
def test_ssh_keygen_s_keys_do_as_well_but_no_others_of_its_kinds(tmp_path: Path) -> None:
    for kind, bits in (("ecdsa", "384"), ("ed25519", "256")):
        made = ["ssh-keygen", "-q", "-t", kind, "-b", bits, "-N", "", "-f", str(tmp_path / kind)]
        subprocess.run(made, check=True, env={**os.environ, "HOME": str(tmp_path)})
    assert keys.load_node_key(tmp_path / "ecdsa")
    with refused("key", "elliptic-curve"):
        keys.load_node_key(tmp_path / "ed25519")


ORDER = Envelope('{"task":"train"}', b"weights")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A server's folder, the server's signer and the one of node 7."""
    folder = tmp_path_factory.mktemp("signing")
    keys.make_authority(folder / "server", [])
    public = keys.make_node_key(folder / "node.key")
    private = keys.load_node_key(folder / "node.key")
    server = signing.ServerSigner(folder / "server", lambda: {7: public.read_bytes()})
    return folder, server, signing.NodeSigner(private, folder / "server" / keys.AUTHORITY)


def order_of(server: Any, node: Any, id: int = 7, envelope: Envelope = ORDER) -> tuple[bytes, bytes]:
    """An order to a node as it is transmitted, and its nonce."""
    body = server.encrypt(envelope.body)
    head, nonce = server.seal(envelope.header, body, id, node.sign_sealing_key())
    return head + body.data, nonce


@pytest.mark.parametrize("size", [0, 7, 2**20, 2**21 + 1])
def test_an_order_and_its_reply_are_opened(made: tuple[Path, Any, Any], size: int) -> None:
    _, server, node = made
    envelope = Envelope('{"task":"train"}', bytes(size))
    message, nonce = order_of(server, node, envelope=envelope)
    order = node.open_order(message, 7)
    assert order.envelope == envelope
    reply = node.seal_reply(Envelope("{}", bytes(size)), 7, order)
    assert server.open(reply, 7, nonce) == Envelope("{}", bytes(size))
    assert len(message) < size + 2**10 + 16 * (size // 2**20)


def test_nothing_of_a_message_is_readable_on_its_way(made: tuple[Path, Any, Any]) -> None:
    _, server, node = made
    message, _ = order_of(server, node)
    reply = node.seal_reply(ORDER, 7, node.open_order(message, 7))
    for text in (b"weights", b"train", b"task"):
        assert text not in message
        assert text not in reply


def test_whatever_is_changed_is_noticed(made: tuple[Path, Any, Any]) -> None:
    """One bit anywhere, a byte more, or any end cut off."""
    _, server, node = made
    message, nonce = order_of(server, node)
    reply = node.seal_reply(ORDER, 7, node.open_order(message, 7))
    for sent, open_it in (
        (message, lambda data: node.open_order(data, 7)),
        (reply, lambda data: server.open(data, 7, nonce)),
    ):
        flipped = (bytes([*sent[:place], sent[place] ^ 1, *sent[place + 1 :]]) for place in range(len(sent)))
        cut = (sent[:end] for end in range(len(sent)))
        for changed in (*flipped, *cut, sent + b"\0", b""):
            with pytest.raises(ValueError, match=r"."):
                open_it(changed)


def test_an_order_to_another_node_and_a_reply_to_another_order_are_refused(made: tuple[Path, Any, Any]) -> None:
    _, server, node = made
    message, nonce = order_of(server, node)
    _, second = order_of(server, node)
    reply = node.seal_reply(ORDER, 7, node.open_order(message, 7))
    with pytest.raises(ValueError, match="not valid"):
        node.open_order(message, 8)
    with pytest.raises(ValueError, match="not valid"):
        server.open(reply, 7, second)
    with pytest.raises(ValueError, match="not sealed to this receiver"):
        node.open_order(reply, 7)  # a reply is no order
    with pytest.raises(ValueError, match="not admitted"):
        server.open(reply, 8, nonce)


def test_the_key_of_one_node_signs_for_no_other(made: tuple[Path, Any, Any], tmp_path: Path) -> None:
    folder, server, node = made
    keys.make_node_key(tmp_path / "other.key")
    private = keys.load_node_key(tmp_path / "other.key")
    other = signing.NodeSigner(private, folder / "server" / keys.AUTHORITY)
    message, nonce = order_of(server, node)
    with pytest.raises(ValueError, match="not valid"):
        server.open(other.seal_reply(ORDER, 7, node.open_order(message, 7)), 7, nonce)
    with pytest.raises(ValueError, match="not sealed to this receiver"):
        other.open_order(message, 7)
    with pytest.raises(ValueError, match="sealing key is not signed"):
        order_of(server, other)


def test_a_challenge_is_signed_for_its_own_server_only(made: tuple[Path, Any, Any], tmp_path: Path) -> None:
    """A hostile server that passes on another one's challenge gets no signature of it."""
    folder, _, node = made
    keys.make_authority(tmp_path / "other", [])
    own, other = (
        keys.fingerprint_order_key(keys.load_order_key(place).public_key())
        for place in (folder / "server", tmp_path / "other")
    )
    sealing, public = node.sign_sealing_key(), (folder / "node.key.pub").read_bytes()
    signature = keys.sign_join(node.key, node.order_keys, b"challenge", own, sealing)
    keys.verify_join(public, signature, b"challenge", own, sealing)
    for facts in ((b"another", own, sealing), (b"challenge", other, sealing)):
        with pytest.raises(ValueError, match="not valid"):
            keys.verify_join(public, signature, *facts)
    with pytest.raises(ValueError, match=r"not in this node's ca\.crt"):
        keys.sign_join(node.key, node.order_keys, b"challenge", other, sealing)


def test_the_authority_s_file_must_certify_the_order_key(made: tuple[Path, Any, Any], tmp_path: Path) -> None:
    folder, *_ = made
    private = keys.load_node_key(folder / "node.key")
    keys.make_authority(tmp_path / "other", [])
    own, other = ((place / keys.AUTHORITY).read_text() for place in (folder / "server", tmp_path / "other"))
    begin = "-----BEGIN CERTIFICATE-----"
    parts = [f"{begin}{part}" for text in (own, other) for part in text.split(begin)[1:]]
    for name, content in (
        ("missing", None),
        ("authority only", parts[0]),
        ("another authority's", parts[0] + parts[3]),
        ("no certificates", "abc"),
        ("empty", ""),
    ):
        path = tmp_path / name.replace(" ", "-")
        if content is not None:
            path.write_text(content)
        with refused("authority", r"ca\.crt that fedspan server wrote"):
            signing.NodeSigner(private, path)


@pytest.mark.parametrize("content", [None, b"abc"])
def test_a_server_without_its_order_key_does_not_start(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / keys.ORDER_KEY).write_bytes(content)
    with refused("server", "order key"):
        signing.ServerSigner(tmp_path, dict)


def test_certificates_are_renewed_without_cutting_a_node_off(tmp_path: Path) -> None:
    """The old file and the new one accept the old server, and the new one accepts the new server, too."""
    folder = tmp_path / "server"
    keys.make_authority(folder, ["fl.example.org"])
    public = keys.make_node_key(tmp_path / "node.key")
    private = keys.load_node_key(tmp_path / "node.key")

    def node(authority: bytes) -> Any:
        (tmp_path / "given").write_bytes(authority)
        return signing.NodeSigner(private, tmp_path / "given")

    def server() -> Any:
        return signing.ServerSigner(folder, lambda: {7: public.read_bytes()})

    given = (folder / keys.AUTHORITY).read_bytes()
    old, renewed = node(given), keys.renew_authority(folder, ["new.example.org"]).read_bytes()
    new = node(renewed)
    for one in (old, new):
        assert one.open_order(order_of(server(), one)[0], 7).envelope == ORDER
    with refused("certificates", "not in use yet"):
        keys.renew_authority(folder, [])
    keys.activate_authority(folder)
    assert keys.list_certified_hosts(folder)[:2] == ["fl.example.org", "localhost"]
    assert "new.example.org" in keys.list_certified_hosts(folder)
    assert new.open_order(order_of(server(), new)[0], 7).envelope == ORDER
    with pytest.raises(ValueError, match="not valid"):
        old.open_order(order_of(server(), old)[0], 7)
    with refused("certificates", "there are no renewed certificates"):
        keys.activate_authority(folder)
    third = node(keys.renew_authority(folder, []).read_bytes())  # trusts the second and the third, not the first
    assert len(third.order_keys) == 2
    assert (folder / "next" / keys.ORDER_KEY).stat().st_mode & 0o777 == 0o600


def test_expired_certificates_open_no_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = keys.load_node_key(Path(str(keys.make_node_key(tmp_path / "node.key")).removesuffix(".pub")))
    monkeypatch.setattr(keys, "_DAYS", 20)
    keys.make_authority(tmp_path / "soon", [])
    assert 19 < keys.compute_days_left(tmp_path / "soon" / keys.AUTHORITY) < 20 < keys.SOON
    monkeypatch.setattr(keys, "_DAYS", 0)
    keys.make_authority(tmp_path / "over", [])
    assert keys.compute_days_left(tmp_path / "over" / keys.CERTIFICATE) <= 0
    with refused("authority", r"have expired\. Ask the server's operator"):
        signing.NodeSigner(private, tmp_path / "over" / keys.AUTHORITY)


def test_a_revoked_node_s_reply_counts_no_longer(tmp_path: Path) -> None:
    keys.make_authority(tmp_path, [])
    admitted = {7: keys.make_node_key(tmp_path / "node.key").read_bytes()}
    private = keys.load_node_key(tmp_path / "node.key")
    server = signing.ServerSigner(tmp_path, lambda: admitted)
    node = signing.NodeSigner(private, tmp_path / keys.AUTHORITY)
    message, nonce = order_of(server, node)
    reply = node.seal_reply(ORDER, 7, node.open_order(message, 7))
    assert server.open(reply, 7, nonce) == ORDER
    admitted.clear()
    with pytest.raises(ValueError, match="revoked"):
        server.open(reply, 7, nonce)


def test_a_sealing_key_of_zeros_is_refused(made: tuple[Path, Any, Any]) -> None:
    """Nothing can be sealed to it: a node that joined with it would end the runs that send to it."""
    folder, _, node = made
    zeros = SimpleNamespace(public_bytes_raw=lambda: bytes(keys.SEALING_BYTES))
    signed = keys.sign_sealing_key(node.key, SimpleNamespace(public_key=lambda: zeros))
    with pytest.raises(ValueError, match="shared key"):
        keys.read_sealing_key((folder / "node.key.pub").read_bytes(), signed)
