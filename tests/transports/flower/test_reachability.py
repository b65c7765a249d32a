"""A node's check of its server before it joins."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest

from fedspan.errors import FedspanError
from fedspan.transports.flower.keys import CERTIFICATE, KEY, ensure_authority
from fedspan.transports.flower.reachability import check_server


@contextmanager
def listening(folder: Path | None) -> Iterator[int]:
    """A server that completes one TLS handshake with the certificate of a folder, or (None) accepts a connection."""
    with socket.create_server(("0.0.0.0", 0)) as server:

        def accept() -> None:
            connection, _ = server.accept()
            with connection:
                if folder is None:
                    return
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
                with suppress(ssl.SSLError):
                    context.wrap_socket(connection, server_side=True).close()

        thread = Thread(target=accept, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join(5)


def make_authority(folder: Path, host: str = "127.0.0.1") -> Path:
    folder.mkdir()
    ensure_authority(folder, [host])
    return folder


def test_the_certificate_of_the_authority_is_accepted(tmp_path: Path) -> None:
    folder = make_authority(tmp_path / "a")
    with listening(folder) as port:
        assert "is reached, with a certificate of" in check_server(f"127.0.0.1:{port}", str(folder / "ca.crt"))


def test_the_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    folder, other = make_authority(tmp_path / "a"), make_authority(tmp_path / "b")
    with listening(folder) as port, pytest.raises(FedspanError, match="the server's certificate is not one of"):
        check_server(f"127.0.0.1:{port}", str(other / "ca.crt"))


def test_a_certificate_for_another_address_is_refused(tmp_path: Path) -> None:
    folder = make_authority(tmp_path / "a", "fl.example.org")
    with listening(folder) as port, pytest.raises(FedspanError, match="for this address"):
        check_server(f"127.0.0.2:{port}", str(folder / "ca.crt"))


def test_certificates_hold_under_strict_rules(tmp_path: Path) -> None:
    """Python 3.13 sets this flag for every default context."""
    folder = make_authority(tmp_path / "a")
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    with (
        listening(folder) as port,
        socket.create_connection(("127.0.0.1", port), 5) as connection,
        context.wrap_socket(connection, server_hostname="127.0.0.1") as encrypted,
    ):
        assert encrypted.getpeercert()


def test_a_damaged_authority_is_named(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("no certificate")
    for path in (tmp_path / "ca.crt", tmp_path / "missing.crt"):
        with pytest.raises(FedspanError, match="authority"):
            check_server("127.0.0.1:1", str(path))


def test_an_insecure_server_is_reached_without_encryption() -> None:
    with listening(None) as port:
        assert "without encryption" in check_server(f"127.0.0.1:{port}", None)


@pytest.mark.parametrize(
    "address", ["localhost", ":9092", "localhost:port", "localhost:99999", "no-such-host.invalid:1"]
)
def test_what_is_not_reached_is_named(address: str) -> None:
    with pytest.raises(FedspanError, match="server"):
        check_server(address, None)
