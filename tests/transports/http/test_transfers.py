"""A node's transfers over links that break, with limited bandwidth, and through proxies that relay or inspect TLS."""

import logging
import os
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from fedspan.federation.transport import Orders
from fedspan.transports.http import client
from fedspan.transports.http.admissions import admit_node, read_admissions
from fedspan.transports.http.client import Link, NodeConnection, RefusedError
from fedspan.transports.http.keys import load_node_key, make_authority, make_node_key
from fedspan.transports.http.node import check_server, serve
from fedspan.transports.http.server import ServerLink, attach, prepare_folder
from fedspan.transports.http.signing import ServerSigner, UnsignedSigner
from fedspan.transports.http.store import MESSAGES
from fedspan.transports.http.transport import ServerTransport
from helpers.captured_log import CapturedLog
from helpers.families import others_slow
from helpers.http_server import LocalServer, join, send_order, serve_here
from helpers.ports import free_port
from helpers.proxies import RunningProxy, run_proxy
from helpers.refusals import refused
from helpers.reply_transport import exchanged
from helpers.slow_link import SlowLink

SIZE, RATE, CUT_AFTER = 1_500_000, 1_500_000, 0.4
"""Bytes of a message, and bytes per second of the link: it is cut about every fourth of a message."""
MAX_RATIO = 1.1
"""Maximum of the bytes on the link over the size of a message."""
UPLOAD = "a" * 32


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalServer]:
    monkeypatch.setattr(client, "_PAUSE", 0.05)
    with serve_here(tmp_path / "server") as made:
        yield made


def get_port(server: LocalServer) -> int:
    return int(server.link.address.rpartition(":")[2])


def test_an_order_and_its_reply_over_a_link_that_breaks_are_sent_once(server: LocalServer) -> None:
    body, message = os.urandom(SIZE), os.urandom(SIZE)
    with (
        SlowLink(get_port(server), RATE, CUT_AFTER, is_cut=False) as link,
        join(f"127.0.0.1:{link.port}") as node,
        attach(server.link, SIZE) as run,
    ):
        id = send_order(run, node.node, Envelope("{}", body), SIZE)
        link.cutting.set()
        order = node.take_order()
        assert UnsignedSigner().open_order(order[2], node.node).envelope == Envelope("{}", body)
        assert link.cuts >= 2
        assert link.received < MAX_RATIO * SIZE
        cuts = link.cuts
        node.send_reply(id, message, UPLOAD)
        assert link.cuts >= cuts + 2
        assert link.up < MAX_RATIO * SIZE
        (taken,) = run.take_replies([id])
        assert taken.read() == message


def test_transfers_are_continued_over_another_connection(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the end of the link for so long that a request is given up."""
    monkeypatch.setattr(client, "_RETRIES", 0)
    monkeypatch.setattr(
        "fedspan.transports.http.node_requests.secrets.randbits", lambda bits: 7
    )  # the same node, without keys
    body, message, attempts = os.urandom(SIZE), os.urandom(SIZE), 0
    with SlowLink(get_port(server), RATE, CUT_AFTER, is_cut=False) as link:
        order, before, arrived = None, None, False
        with join(f"127.0.0.1:{link.port}"), attach(server.link, SIZE) as run:
            id = send_order(run, 7, Envelope("{}", body), SIZE)
            link.cutting.set()
            while not arrived:
                attempts += 1
                assert attempts < 40
                with suppress(httpx.TransportError), join(f"127.0.0.1:{link.port}") as node:
                    if order is None:
                        node.incoming, before = (before.incoming if before else None), node
                        order = node.take_order()
                        attempts = 0
                    node.send_reply(id, message, UPLOAD, is_continued=True)
                    arrived = True
            assert attempts > 1
            assert max(link.up, link.received) < MAX_RATIO * SIZE
            (taken,) = run.take_replies([id])
            assert taken.read() == message


def test_a_run_holds_one_of_the_replies_that_arrived_together(server: LocalServer) -> None:
    with ExitStack() as stack:
        nodes = {f"c{number}": stack.enter_context(join(server.link.address)) for number in range(8)}
        run = stack.enter_context(attach(server.link, SIZE))
        waiting = ServerTransport(run, {id: node.node for id, node in nodes.items()})
        waiting.send_orders(Orders("train", nodes, Envelope), 60.0)
        for node in nodes.values():
            order = node.take_order()
            opened = UnsignedSigner().open_order(order[2], node.node)
            reply = Envelope(opened.envelope.header, bytes(SIZE))
            node.send_reply(order[0], UnsignedSigner().seal_reply(reply, node.node, opened), UPLOAD)
        left = set(nodes)
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        while (received := waiting.receive_reply()) is not None:
            id, reply = received
            left.remove(id)
            assert reply == Envelope(id, bytes(SIZE))
        assert not left
        assert tracemalloc.get_traced_memory()[1] < 4.5 * SIZE  # two copies, one before it, and one of this test
        assert waiting.retain_orders(()) == frozenset()
        run.cancel(())
        assert not list((server.link.folder / MESSAGES).iterdir())


@pytest.mark.parametrize("status", others_slow([408, 429, 500, 503], [503]))
def test_a_reply_that_was_not_taken_for_the_moment_is_continued(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server answers so that waited too long for the rest of a body, is stopped, or has a full disk."""
    monkeypatch.setattr(client, "_PAUSE", 0.01)
    asked = list[tuple[str, str]]()

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.params.get("start", "")))
        request.read()
        if len(asked) == 1:
            return httpx.Response(status)
        return httpx.Response(200, json={"bytes": 10 if len(asked) == 2 else 30})

    connections = httpx.Client(base_url="http://server/v1/", transport=httpx.MockTransport(answer))
    node = NodeConnection(Link("server", None, None, 100), UnsignedSigner(), connections)
    node.send_reply("0", bytes(30), UPLOAD)
    assert asked == [("PUT", "0"), ("GET", ""), ("PUT", "10")]


def test_an_answer_of_more_than_was_asked_for_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_RETRIES", 0)
    headers = {"fedspan-order": "0", "fedspan-bytes": "100", "fedspan-reply": "100"}
    content = bytes(client.CHUNK + 1)
    connections = httpx.Client(
        base_url="http://server/v1/",
        transport=httpx.MockTransport(lambda _: httpx.Response(200, headers=headers, stream=httpx.ByteStream(content))),
    )
    node = NodeConnection(Link("server", None, None, 2**30), UnsignedSigner(), connections)
    for fetch, error in (
        (node.take_order, ValueError),
        (lambda: node.fetch_base("a", "b", 0), httpx.RemoteProtocolError),
    ):
        with pytest.raises(error, match="more than was requested"):
            fetch()


def test_a_refusal_is_repeated_in_few_words_and_not_tried_again() -> None:
    asked = list[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(404, json={"reason": "gone" * 1000} if len(asked) == 1 else [1])

    connections = httpx.Client(base_url="http://server/v1/", transport=httpx.MockTransport(answer))
    node = NodeConnection(Link("server", None, None, 100), UnsignedSigner(), connections)
    for _ in range(2):
        with pytest.raises(RefusedError, match="404") as caught:
            node.send_failure("0", "a reason")
        assert len(str(caught.value)) < 300
    assert len(asked) == 2


def test_a_transfer_stays_below_its_bandwidth(server: LocalServer) -> None:
    rate = 3_000_000.0
    with join(server.link.address, up=rate, down=rate) as node, attach(server.link, SIZE) as run:
        id = send_order(run, node.node, Envelope("{}", bytes(SIZE)), SIZE)
        began = time.monotonic()
        assert node.take_order() is not None
        received = time.monotonic()
        node.send_reply(id, bytes(SIZE), UPLOAD)
        sent = time.monotonic()
    assert received - began >= SIZE / rate
    assert sent - received >= SIZE / rate


def test_transfers_share_a_rate_and_a_pause_is_not_made_up_for() -> None:
    pacer, began = client.Pacer(1e5), time.monotonic()
    threads = [Thread(target=lambda: [pacer.wait(1000) for _ in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began >= 0.2
    pacer = client.Pacer(1e5)
    pacer.wait(1000)
    time.sleep(0.1)
    began = time.monotonic()
    for _ in range(10):
        pacer.wait(1000)
    assert time.monotonic() - began >= 0.1


def test_a_node_logs_progress_after_some_seconds(monkeypatch: pytest.MonkeyPatch, caplog: CapturedLog) -> None:
    now = [100.0]
    monkeypatch.setattr(client.time, "monotonic", lambda: now[0])
    blocks = list[int]()
    progress = client.TransferProgress("reply sent", lambda: blocks.append(1))
    with caplog.at_level(logging.INFO, "fedspan.node"):
        progress.show(1)  # nothing has begun
        progress.begin(20_000_000)
        for now[0], current in ((102.0, 9_000_000), (103.5, 10_000_000), (105.0, 11_000_000), (109.0, 12_000_000)):
            progress.show(current)
        progress.begin(7_000_000)
        now[0] = 113.0
        progress.show(5_000_000)
    assert caplog.messages == [
        "reply sent: 10.0 of 20.0 MB",
        "reply sent: 12.0 of 20.0 MB",
        "reply sent: 5.0 of 7.0 MB",
    ]
    assert len(blocks) == 6  # every block renews the node's heartbeat


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


@pytest.mark.slow
def test_a_message_crosses_a_server_over_a_link_that_breaks(scene: Scene) -> None:
    size = 6_000_000
    message = Envelope("{}", os.urandom(size))
    with SlowLink(scene.port, 500_000, 4.0, is_cut=False) as slow:
        with scene.connect(scene.link._replace(address=f"127.0.0.1:{slow.port}")) as transport:
            slow.cutting.set()
            before = slow.received, slow.up
            assert exchanged(transport, {"a": message}, 220.0, wait_for_offline=True) == {"a": message}
        assert slow.cuts > 3
        assert slow.received - before[0] < MAX_RATIO * size
        assert slow.up - before[1] < MAX_RATIO * size


def test_a_server_is_reached_by_a_certificate_of_its_authority_for_its_address(scene: Scene, tmp_path: Path) -> None:
    said = f"is reached, with a certificate of {scene.link.authority}; its operator has"
    assert f"{said} admitted this node's key" in check_server(scene.link)
    stranger = scene.link._replace(key=ec.generate_private_key(ec.SECP384R1()))
    assert f"{said} not admitted this node's key" in check_server(stranger)
    make_authority(tmp_path / "other", [])
    with refused("server", "is not signed by the authority in"):
        check_server(scene.link._replace(authority=tmp_path / "other" / "ca.crt"))
    with (
        run_proxy("pass", scene.port, tmp_path) as proxy,
        refused("server", r"is not valid for 127\.0\.0\.2"),
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
        with refused("authority", "authority"):
            check_server(Link("127.0.0.1:1", path, None, 2**20))


def test_an_insecure_server_is_reached_without_encryption(tmp_path: Path) -> None:
    with serve_here(tmp_path) as server:
        assert "without encryption" in check_server(Link(server.link.address, None, None, 2**20))


@pytest.mark.parametrize(
    "address", ["localhost", ":9092", "localhost:port", "localhost:99999", "no-such-host.invalid:1"]
)
def test_what_is_not_reached_is_named(address: str) -> None:
    with refused("server", "server"):
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
        with refused("server", "If a proxy of your network inspects TLS, ask for an exception"):
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
    assert "413 PUT" not in seen  # no body is larger than such proxies take
    with refused("server", "is not signed by the authority"):
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
