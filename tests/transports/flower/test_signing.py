"""Orders and replies are carried out and counted only if the server, or the node itself, signed every part of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope

signing = pytest.importorskip("fedspan.transports.flower.signing", reason="the extra fedspan[flower] is not installed")
keys = pytest.importorskip("fedspan.transports.flower.keys")

ORDER = Envelope('{"task":"train"}', b"weights")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A server's folder, the server's signer and the one of node 7."""
    folder = tmp_path_factory.mktemp("signing")
    keys.make_authority(folder / "server", [])
    public = keys.make_node_key(folder / "node.key")
    private, _ = keys.load_node_key(folder / "node.key")
    server = signing.ServerSigner(folder / "server", lambda: {7: public.read_bytes()})
    return folder, server, signing.NodeSigner(private, folder / "server" / keys.AUTHORITY)


def test_an_order_and_its_reply_are_opened(made: tuple[Path, Any, Any]) -> None:
    _, server, node = made
    order = server.seal(ORDER, 7)
    assert node.open(order, 7) == ORDER
    reply = node.seal(Envelope("{}", b"reply"), 7, order.nonce)
    assert server.open(reply, 7, order.nonce) == Envelope("{}", b"reply")


def forged(sealed: Any) -> dict[str, Any]:
    nonce, signature = bytearray(sealed.nonce), bytearray(sealed.signature)
    nonce[0] ^= 1
    signature[-1] ^= 1
    envelope = sealed.envelope
    return {
        "header": replace(sealed, envelope=Envelope(envelope.header + " ", envelope.body)),
        "body": replace(sealed, envelope=Envelope(envelope.header, envelope.body + b"\0")),
        "moved": replace(sealed, envelope=Envelope(envelope.header + "w", envelope.body[1:])),
        "nonce": replace(sealed, nonce=bytes(nonce)),
        "short nonce": replace(sealed, nonce=sealed.nonce[:8]),
        "signature": replace(sealed, signature=bytes(signature)),
        "none": replace(sealed, signature=b""),
    }


def test_whatever_is_changed_is_noticed(made: tuple[Path, Any, Any]) -> None:
    _, server, node = made
    order = server.seal(ORDER, 7)
    for changed in forged(order).values():
        with pytest.raises(ValueError, match=r"nonce|signature"):
            node.open(changed, 7)
    reply = node.seal(ORDER, 7, order.nonce)
    for changed in forged(reply).values():
        with pytest.raises(ValueError, match=r"nonce|signature"):
            server.open(changed, 7, order.nonce)


def test_an_order_to_another_node_and_a_reply_to_another_order_are_refused(made: tuple[Path, Any, Any]) -> None:
    _, server, node = made
    order, second = server.seal(ORDER, 7), server.seal(ORDER, 7)
    reply = node.seal(ORDER, 7, order.nonce)
    with pytest.raises(ValueError, match="not valid"):
        node.open(order, 8)
    with pytest.raises(ValueError, match="not valid"):
        server.open(reply, 7, second.nonce)
    with pytest.raises(ValueError, match="not valid"):
        node.open(reply, 7)  # a reply is no order
    with pytest.raises(ValueError, match="not admitted"):
        server.open(reply, 8, order.nonce)


def test_the_key_of_one_node_signs_for_no_other(made: tuple[Path, Any, Any], tmp_path: Path) -> None:
    folder, server, _ = made
    keys.make_node_key(tmp_path / "other.key")
    private, _ = keys.load_node_key(tmp_path / "other.key")
    other = signing.NodeSigner(private, folder / "server" / keys.AUTHORITY)
    order = server.seal(ORDER, 7)
    with pytest.raises(ValueError, match="not valid"):
        server.open(other.seal(ORDER, 7, order.nonce), 7, order.nonce)


def test_the_authority_s_file_must_certify_the_order_key(made: tuple[Path, Any, Any], tmp_path: Path) -> None:
    folder, *_ = made
    private, _ = keys.load_node_key(folder / "node.key")
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
        with pytest.raises(FedspanError, match=r"ca\.crt that fedspan server wrote"):
            signing.NodeSigner(private, path)


@pytest.mark.parametrize("content", [None, b"abc"])
def test_a_server_without_its_order_key_does_not_start(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / keys.ORDER_KEY).write_bytes(content)
    with pytest.raises(FedspanError, match="order key"):
        signing.ServerSigner(tmp_path, dict)


def test_certificates_are_renewed_without_cutting_a_node_off(tmp_path: Path) -> None:
    """The old file and the new one accept the old server, and the new one accepts the new server, too."""
    folder = tmp_path / "server"
    keys.make_authority(folder, ["fl.example.org"])
    public = keys.make_node_key(tmp_path / "node.key")
    private, _ = keys.load_node_key(tmp_path / "node.key")

    def node(authority: bytes) -> Any:
        (tmp_path / "given").write_bytes(authority)
        return signing.NodeSigner(private, tmp_path / "given")

    def server() -> Any:
        return signing.ServerSigner(folder, lambda: {7: public.read_bytes()})

    given = (folder / keys.AUTHORITY).read_bytes()
    old, renewed = node(given), keys.renew_authority(folder, ["new.example.org"]).read_bytes()
    new = node(renewed)
    for one in (old, new):
        assert one.open(server().seal(ORDER, 7), 7) == ORDER
    with pytest.raises(FedspanError, match="not in use yet"):
        keys.renew_authority(folder, [])
    keys.activate_authority(folder)
    assert keys.list_certified_hosts(folder)[:2] == ["fl.example.org", "localhost"]
    assert "new.example.org" in keys.list_certified_hosts(folder)
    assert new.open(server().seal(ORDER, 7), 7) == ORDER
    with pytest.raises(ValueError, match="not valid"):
        old.open(server().seal(ORDER, 7), 7)
    with pytest.raises(FedspanError, match="there are no renewed certificates"):
        keys.activate_authority(folder)
    third = node(keys.renew_authority(folder, []).read_bytes())  # trusts the second and the third, not the first
    assert len(third._server) == 2
    assert (folder / "next" / keys.ORDER_KEY).stat().st_mode & 0o777 == 0o600


def test_expired_certificates_open_no_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private, _ = keys.load_node_key(Path(str(keys.make_node_key(tmp_path / "node.key")).removesuffix(".pub")))
    monkeypatch.setattr(keys, "_DAYS", 20)
    keys.make_authority(tmp_path / "soon", [])
    assert 19 < keys.compute_days_left(tmp_path / "soon" / keys.AUTHORITY) < 20 < keys.SOON
    monkeypatch.setattr(keys, "_DAYS", 0)
    keys.make_authority(tmp_path / "over", [])
    assert keys.compute_days_left(tmp_path / "over" / keys.CERTIFICATE) <= 0
    with pytest.raises(FedspanError, match=r"have expired\. Ask the server's operator"):
        signing.NodeSigner(private, tmp_path / "over" / keys.AUTHORITY)


def test_a_revoked_node_s_reply_counts_no_longer(tmp_path: Path) -> None:
    keys.make_authority(tmp_path, [])
    admitted = {7: keys.make_node_key(tmp_path / "node.key").read_bytes()}
    private, _ = keys.load_node_key(tmp_path / "node.key")
    server = signing.ServerSigner(tmp_path, lambda: admitted)
    order = server.seal(ORDER, 7)
    reply = signing.NodeSigner(private, tmp_path / keys.AUTHORITY).seal(ORDER, 7, order.nonce)
    assert server.open(reply, 7, order.nonce) == ORDER
    admitted.clear()
    with pytest.raises(ValueError, match="revoked"):
        server.open(reply, 7, order.nonce)
