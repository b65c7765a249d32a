"""The SuperLink's process, its addresses, and a message on its whole way."""

import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest

from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from fedspan.transports.http import adapter, grid, keys, signing, supernode, transport
from fedspan.transports.http import server as servers
from fedspan.transports.http import superlink as superlink_process
from helpers.flower_names import broken
from helpers.reply_transport import exchanged


@contextmanager
def run_server(folder: Path, *, insecure: bool = True) -> Iterator[Any]:
    """Run a server at a free port; yields its link."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    link, stop, ready = servers.prepare_folder(folder, port, [], insecure=insecure), Event(), Event()
    server = Thread(target=superlink_process.supervise, args=(folder, link, "127.0.0.1", stop, ready.set))
    server.start()
    try:
        assert ready.wait(120), (folder / "server.log").read_text()
        yield link
    finally:
        stop.set()
        server.join()


@pytest.mark.parametrize("insecure", [True, False])
def test_a_port_that_is_taken_is_named(insecure: bool, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        link = servers.prepare_folder(tmp_path, port, [], insecure=insecure)
        with pytest.raises(
            FedspanError, match=rf"`--port`: {port} is not accepted\. Expected a port that is not in use"
        ):
            superlink_process.supervise(tmp_path, link, "127.0.0.1", Event(), lambda: None)
    with pytest.raises(FedspanError, match="--host"):
        superlink_process.supervise(tmp_path, link, "192.0.2.1", Event(), lambda: None)
    assert not (tmp_path / "server.log").exists()


def test_a_large_log_is_moved_while_the_superlink_has_it_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superlink_process, "_LOG_BYTES", 100)
    path = tmp_path / "server.log"
    superlink_process._rotate_log(path)
    with path.open("ab", buffering=0) as log:
        log.write(b"a" * 100)
        superlink_process._rotate_log(path)
        assert path.stat().st_size == 100
        for line in (b"b", b"c"):
            log.write(line * 101)
            superlink_process._rotate_log(path)
            log.write(b"next")
            assert path.read_bytes() == b"next"
    assert path.with_name("server.log.1").read_bytes() == b"next" + b"c" * 101


@pytest.mark.slow
def test_a_running_server_takes_renewed_certificates(tmp_path: Path) -> None:
    """A node that trusts the new authority alone is let in some seconds later; the old one is not presented again."""
    folder = tmp_path / "server"
    with run_server(folder, insecure=False) as link:
        port = int(link.address.rpartition(":")[2])
        end = "-----END CERTIFICATE-----\n"
        new = tmp_path / "new.crt"
        new.write_text(keys.renew_authority(folder, []).read_text().partition(end)[0] + end)
        with pytest.raises(ssl.SSLCertVerificationError):
            greeted(port, new)
        keys.activate_authority(folder)
        until = time.monotonic() + 120
        while True:
            try:
                greeted(port, new)
                break
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.5)


@pytest.mark.slow
def test_an_order_that_a_killed_superlink_was_sending_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SuperLink counts it as sent, and its node did not receive it; the exchange's deadline is far away."""
    processes = list[subprocess.Popen[Any]]()
    start = subprocess.Popen

    def started(*args: Any, **options: Any) -> Any:
        processes.append(start(*args, **options))
        return processes[-1]

    monkeypatch.setattr(superlink_process.subprocess, "Popen", started)
    order, back = Envelope("{}", b"weights"), dict[str, Any]()
    with (
        run_server(tmp_path / "server") as link,
        grid.attach(link, 2**20) as messages,
        adapter.connect_node(link.address, None, None, 10) as node,
    ):
        nodes = transport.GridTransport(messages, {"a": node.node_id})
        round = Thread(target=lambda: back.update(exchanged(nodes, {"a": order}, 600.0, wait_for_offline=True)))
        round.start()
        lost = node.take_order("")
        processes[0].kill()
        processes[0].wait()
        until = time.monotonic() + 60
        while (again := node.take_order("")) is None:
            assert time.monotonic() < until
        assert again.message.metadata.message_id == lost.message.metadata.message_id
        received = supernode._Received()
        supernode._process_order(node, again, 2**20, signing.UnsignedSigner(), lambda envelope: envelope, received)
        round.join(60)
        assert back == {"a": order}
        assert received.id == again.message.metadata.message_id


def greeted(port: int, authority: Path) -> None:
    """Shake hands as a node that trusts an authority."""
    with socket.create_connection(("127.0.0.1", port), 10) as plain:
        ssl.create_default_context(cafile=str(authority)).wrap_socket(plain, server_hostname="localhost").close()


def test_a_node_without_a_server_raises_and_does_not_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(httpx.ConnectError), adapter.connect_node(f"127.0.0.1:{port}", None, None, 0):
        broken("a server where there is none", "reconnecting instead of ending")


NODE = """
import sys, threading
from fedspan.transports.http.supernode import Link, serve
serve(Link(sys.argv[1], None, None, 2**22), lambda envelope: envelope, threading.Event())
"""


@pytest.mark.slow  # processes of Flower's own
def test_a_message_goes_to_a_node_and_back_through_a_superlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SuperLink's arguments, Flower's commands, the run that is taken over, both ends of the messages."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in the kernel of a notebook
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    link = servers.prepare_folder(tmp_path / "server", port, [], insecure=True)
    stop, ready = Event(), Event()
    server = Thread(target=superlink_process.supervise, args=(tmp_path / "server", link, "127.0.0.1", stop, ready.set))
    server.start()
    node = subprocess.Popen([sys.executable, "-c", NODE, link.address])  # it tries until there is a server
    try:
        assert ready.wait(60), (tmp_path / "server" / "server.log").read_text()
        written = {path.name: path.stat().st_mode & 0o077 for path in (tmp_path / "server").iterdir()}
        assert {name: mode for name, mode in written.items() if name != "server.json"} == dict.fromkeys(
            written.keys() - {"server.json"}, 0
        )
        assert {"flower.db", "server.log"} <= written.keys()
        with grid.attach(link, 2**23) as messages:
            [(id, reply)] = [next(transport.invite(messages, Envelope("hello"), 60.0))]
            assert reply == Envelope("hello")
            assert [one.status for one in servers.list_nodes(link, {})] == ["online"]
            nodes = transport.GridTransport(messages, {"a": id})
            for size in (2**10, 3 * 2**20):
                order = Envelope("{}", bytes(size))
                assert exchanged(nodes, {"a": order}, 60.0)["a"] == order
            reply = exchanged(nodes, {"a": Envelope("{}", bytes(2**22))}, 60.0)["a"]
            assert "exceeds the size limit of this node" in str(reply)
            messages.limit = 2**10
            reply = exchanged(nodes, {"a": Envelope("{}", bytes(2**12))}, 60.0)["a"]
            assert "the reply has more than 0.000976562 MiB, the maximum" in str(reply)

        def send_an_order_of_a_run_that_was_stopped() -> None:
            with grid.attach(link, 2**23) as messages:
                for run in servers.call_flower(link, "ls", "@")["runs"]:
                    if not run["status"].startswith("finished"):
                        servers.call_flower(link, "stop", str(run["run-id"]), "@")
                exchanged(transport.GridTransport(messages, {"a": id}), {"a": Envelope("{}", b"1")}, 20.0)

        with pytest.raises(FedspanError, match=r"does not know this run: .* Continue with --resume"):
            send_an_order_of_a_run_that_was_stopped()
    finally:
        stop.set()
        node.kill()
        node.wait()
        server.join()
