"""A node's connection to its server: an absent server is an error, and a message makes the whole way."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from threading import Event, Thread

import pytest

from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from helpers.flower_names import broken
from helpers.reply_transport import exchanged

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")


def test_a_node_without_a_server_raises_and_does_not_end() -> None:
    httpx = pytest.importorskip("httpx")
    from fedspan.transports.flower.adapter import connect_node

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(httpx.ConnectError), connect_node(f"127.0.0.1:{port}", None, None, 0):
        broken("a server where there is none", "reconnecting instead of ending")


NODE = """
import sys, threading
from fedspan.transports.flower.supernode import Link, serve
serve(Link(sys.argv[1], None, None, 2**22), lambda envelope: envelope, threading.Event())
"""


@pytest.mark.slow  # processes of Flower's own
def test_a_message_goes_to_a_node_and_back_through_a_superlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SuperLink's arguments, Flower's commands, the run that is taken over, both ends of the messages."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in the kernel of a notebook
    from fedspan.transports.flower.grid import attach
    from fedspan.transports.flower.server import call_flower, list_nodes, prepare_folder
    from fedspan.transports.flower.superlink import supervise
    from fedspan.transports.flower.transport import GridTransport, invite

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    link = prepare_folder(tmp_path / "server", port, [], insecure=True)
    stop, ready = Event(), Event()
    server = Thread(target=supervise, args=(tmp_path / "server", link, "127.0.0.1", stop, ready.set))
    server.start()
    node = subprocess.Popen([sys.executable, "-c", NODE, link.address])  # it tries until there is a server
    try:
        assert ready.wait(60), (tmp_path / "server" / "superlink.log").read_text()
        written = {path.name: path.stat().st_mode & 0o077 for path in (tmp_path / "server").iterdir()}
        assert {name: mode for name, mode in written.items() if name != "server.json"} == dict.fromkeys(
            written.keys() - {"server.json"}, 0
        )
        assert {"flower.db", "superlink.log"} <= written.keys()
        with attach(link, 2**23) as grid:
            [(id, reply)] = [next(invite(grid, Envelope("hello"), 60.0))]
            assert reply == Envelope("hello")
            assert [one.status for one in list_nodes(link, {})] == ["online"]
            transport = GridTransport(grid, {"a": id})
            for size in (2**10, 3 * 2**20):
                order = Envelope("{}", bytes(size))
                assert exchanged(transport, {"a": order}, 60.0)["a"] == order
            reply = exchanged(transport, {"a": Envelope("{}", bytes(2**22))}, 60.0)["a"]
            assert "exceeds the size limit of this node" in str(reply)
            grid.limit = 2**10
            reply = exchanged(transport, {"a": Envelope("{}", bytes(2**12))}, 60.0)["a"]
            assert "the reply has more than 0.000976562 MiB, the maximum" in str(reply)

        def send_an_order_of_a_run_that_was_stopped() -> None:
            with attach(link, 2**23) as grid:
                for run in call_flower(link, "ls", "@")["runs"]:
                    if not run["status"].startswith("finished"):
                        call_flower(link, "stop", str(run["run-id"]), "@")
                exchanged(GridTransport(grid, {"a": id}), {"a": Envelope("{}", b"1")}, 20.0)

        with pytest.raises(FedspanError, match=r"does not know this run: .* Continue with --resume"):
            send_an_order_of_a_run_that_was_stopped()
    finally:
        stop.set()
        node.kill()
        node.wait()
        server.join()
