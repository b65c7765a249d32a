"""How a node reaches a server: its certificate, and proxies as processes that relay, terminate or inspect TLS."""

import os
import socket
import ssl
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from fedspan.transports.http.admissions import admit_node, read_admissions
from fedspan.transports.http.client import Link
from fedspan.transports.http.keys import load_node_key, make_authority, make_node_key
from fedspan.transports.http.node import check_server, serve
from fedspan.transports.http.server import ServerLink, attach, prepare_folder
from fedspan.transports.http.signing import ServerSigner
from fedspan.transports.http.transport import ServerTransport
from helpers.http_server import LocalServer, free_port, serve_here
from helpers.proxies import RunningProxy, run_proxy
from helpers.reply_transport import exchanged

LARGE = Envelope("{}", os.urandom(3 * 2**20))


class Scene(NamedTuple):
    """A server with keys, and a node that it has admitted."""

    server: ServerLink
    link: Link
    id: int

    @property
    def port(self) -> int:
        return int(self.server.address.rpartition(":")[2])

    @contextmanager
    def connect(self, link: Link) -> Generator[ServerTransport]:
        """Be a node with these connection data; yields a transport to it."""
        stop = threading.Event()
        node = threading.Thread(target=serve, args=(link, lambda envelope: envelope, stop))
        node.start()
        signer = ServerSigner(
            self.server.folder, lambda: {id: one.key.encode() for id, one in read_admissions(self.server).items()}
        )
        try:
            with attach(self.server, 2**24) as run:
                until = time.monotonic() + 30
                while self.id not in run.list_online():
                    assert time.monotonic() < until
                    time.sleep(0.1)
                yield ServerTransport(run, {"a": self.id}, signer=signer)
        finally:
            stop.set()
            node.join()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("proxies")
    link = prepare_folder(folder / "server", free_port(), [], insecure=False)
    admit_node(link, make_node_key(folder / "node.key"), "a")
    (id,) = read_admissions(link)
    with LocalServer(link):
        yield Scene(link, Link(link.address, link.authority, load_node_key(folder / "node.key"), 2**24), id)


def test_a_server_is_reached_by_a_certificate_of_its_authority_for_its_address(scene: Scene, tmp_path: Path) -> None:
    assert f"is reached, with a certificate of {scene.link.authority}" in check_server(scene.link)
    make_authority(tmp_path / "other", [])
    with pytest.raises(FedspanError, match="is not signed by the authority in"):
        check_server(scene.link._replace(authority=tmp_path / "other" / "ca.crt"))
    with (
        run_proxy("pass", scene.port, tmp_path) as proxy,
        pytest.raises(FedspanError, match=r"is not valid for 127\.0\.0\.2"),
    ):
        check_server(scene.link._replace(address=f"127.0.0.2:{proxy.port}"))


def test_certificates_hold_under_strict_rules(scene: Scene) -> None:
    """Python 3.13 sets this flag for every default context."""
    context = ssl.create_default_context(cafile=str(scene.link.authority))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    with (
        socket.create_connection(("127.0.0.1", scene.port), 5) as connection,
        context.wrap_socket(connection, server_hostname="127.0.0.1") as encrypted,
    ):
        assert encrypted.getpeercert()


def test_a_damaged_authority_is_named(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("no certificate")
    for path in (tmp_path / "ca.crt", tmp_path / "missing.crt"):
        with pytest.raises(FedspanError, match="authority"):
            check_server(Link("127.0.0.1:1", path, None, 2**20))


def test_an_insecure_server_is_reached_without_encryption(tmp_path: Path) -> None:
    with serve_here(tmp_path) as server:
        assert "without encryption" in check_server(Link(server.link.address, None, None, 2**20))


@pytest.mark.parametrize(
    "address", ["localhost", ":9092", "localhost:port", "localhost:99999", "no-such-host.invalid:1"]
)
def test_what_is_not_reached_is_named(address: str) -> None:
    with pytest.raises(FedspanError, match="server"):
        check_server(Link(address, None, None, 2**20))


@pytest.fixture
def outbound(scene: Scene, tmp_path: Path) -> Iterator[RunningProxy]:
    with run_proxy("connect", scene.port, tmp_path) as proxy:
        yield proxy


def test_a_node_uses_the_proxy_of_its_file_also_to_check_the_server(scene: Scene, outbound: RunningProxy) -> None:
    link = scene.link._replace(proxy=f"http://127.0.0.1:{outbound.port}")
    assert "is reached" in check_server(link)
    assert outbound.read_log() == f"CONNECT {link.address} HTTP/1.1\n"
    with scene.connect(link) as transport:
        assert exchanged(transport, {"a": LARGE}, 60.0) == {"a": LARGE}
    assert outbound.read_log().count("CONNECT") > 1


def test_a_node_uses_the_proxy_of_the_environment_unless_it_names_the_server(
    scene: Scene, outbound: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{outbound.port}")
    with scene.connect(scene.link) as transport:  # the run's own process does not use it
        assert exchanged(transport, {"a": LARGE}, 60.0) == {"a": LARGE}
    seen = outbound.read_log()
    assert set(seen.splitlines()) == {f"CONNECT {scene.link.address} HTTP/1.1"}
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert "is reached" in check_server(scene.link)
    assert outbound.read_log() == seen


def test_a_proxy_that_is_not_there_is_an_error(scene: Scene) -> None:
    with pytest.raises(FedspanError, match=f"no connection to {scene.link.address}"):
        check_server(scene.link._replace(proxy=f"http://127.0.0.1:{free_port()}"))


def test_inspection_of_tls_has_an_error_of_its_own(scene: Scene, tmp_path: Path) -> None:
    make_authority(tmp_path / "inspector", [])
    with run_proxy("inspect", scene.port, tmp_path, tmp_path / "inspector") as proxy:
        with pytest.raises(FedspanError, match="If a proxy of your network inspects TLS, ask for an exception"):
            check_server(scene.link._replace(proxy=f"http://127.0.0.1:{proxy.port}"))
        assert "inspected" not in proxy.read_log()


def test_a_reverse_proxy_passes_tls_through(scene: Scene, tmp_path: Path) -> None:
    with run_proxy("pass", scene.port, tmp_path) as proxy:
        link = scene.link._replace(address=f"127.0.0.1:{proxy.port}")
        assert "is reached" in check_server(link)
        with scene.connect(link) as transport:
            assert exchanged(transport, {"a": LARGE}, 60.0) == {"a": LARGE}
        assert "connection" in proxy.read_log()


@pytest.fixture
def terminating(scene: Scene, tmp_path: Path) -> Iterator[tuple[RunningProxy, Link]]:
    """A reverse proxy with a certificate of the site's authority, and a node that trusts it."""
    make_authority(tmp_path / "site", [])
    with run_proxy("terminate", scene.port, tmp_path, tmp_path / "site") as proxy:
        link = scene.link._replace(address=f"127.0.0.1:{proxy.port}", tls_authority=tmp_path / "site" / "ca.crt")
        yield proxy, link


def test_a_reverse_proxy_that_terminates_tls_reads_no_update(
    scene: Scene, terminating: tuple[RunningProxy, Link]
) -> None:
    proxy, link = terminating
    secret = Envelope('{"patient": 7}', b"patient 7 " * 300_000)
    assert f"with a certificate of {link.tls_authority}" in check_server(link)
    with scene.connect(link) as transport:
        assert exchanged(transport, {"a": secret}, 60.0) == {"a": secret}
    seen = proxy.read_log()
    assert "PUT /v1/order/" in seen
    assert "patient" not in seen
    assert "413" not in seen  # no body is larger than such proxies take
    with pytest.raises(FedspanError, match="is not signed by the authority"):
        check_server(link._replace(tls_authority=None))


@pytest.mark.slow  # a minute, in which nothing happens
def test_a_node_waits_behind_a_proxy_that_gives_up_after_a_minute(
    scene: Scene, terminating: tuple[RunningProxy, Link]
) -> None:
    proxy, link = terminating
    with scene.connect(link) as transport:
        time.sleep(65)
        assert exchanged(transport, {"a": LARGE}, 30.0) == {"a": LARGE}
    assert "504" not in proxy.read_log()
