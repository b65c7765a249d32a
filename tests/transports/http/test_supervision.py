"""The serving process: its port, its log, its certificates, its end with the server, and a message on its whole way."""

import os
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread

import httpx
import pytest

from fedspan import processes
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from fedspan.processes import hold_folder
from fedspan.transports.http import keys, supervision
from fedspan.transports.http.connections import ConnectionLimits
from fedspan.transports.http.invitations import invite
from fedspan.transports.http.server import ServerLink, attach, list_nodes, prepare_folder, read_link
from fedspan.transports.http.transport import ServerTransport
from helpers.http_server import free_port, run_server, serve_here
from helpers.reply_transport import exchanged


@pytest.mark.parametrize("insecure", [True, False])
def test_a_port_that_is_taken_is_named(insecure: bool, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        link = prepare_folder(tmp_path, port, [], insecure=insecure)
        with pytest.raises(
            FedspanError, match=rf"`--port`: {port} is not accepted\. Expected a port that is not in use"
        ):
            supervision.supervise(tmp_path, link, "127.0.0.1", Event(), lambda: None)
    with pytest.raises(FedspanError, match="--host"):
        supervision.supervise(tmp_path, link, "192.0.2.1", Event(), lambda: None)
    with pytest.raises(FedspanError, match="--proxy"):
        supervision.supervise(tmp_path, link, "127.0.0.1", Event(), lambda: None, proxies=["proxy.example.org"])
    assert not (tmp_path / "server.log").exists()


def test_many_nodes_behind_a_proxy_that_the_operator_names_connect_at_once(tmp_path: Path) -> None:
    most = ConnectionLimits().per_address
    with run_server(tmp_path, proxies=("127.0.0.1",)) as link, ExitStack() as stack:
        host, _, port = link.address.rpartition(":")
        for _ in range(most):
            stack.enter_context(socket.create_connection((host, int(port))))
        assert httpx.get(f"http://{link.address}/v1/health").text == "ok"


def test_a_large_log_is_moved_while_the_serving_process_has_it_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "_LOG_BYTES", 100)
    path = tmp_path / "server.log"
    supervision._rotate_log(path)
    with path.open("ab", buffering=0) as log:
        log.write(b"a" * 100)
        supervision._rotate_log(path)
        assert path.stat().st_size == 100
        for line in (b"b", b"c"):
            log.write(line * 101)
            supervision._rotate_log(path)
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
            greet(port, new)
        keys.activate_authority(folder)
        until = time.monotonic() + 120
        while True:
            try:
                greet(port, new)
                break
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.5)


def greet(port: int, authority: Path) -> None:
    """Shake hands as a node that trusts an authority."""
    with socket.create_connection(("127.0.0.1", port), 10) as plain:
        ssl.create_default_context(cafile=str(authority)).wrap_socket(plain, server_hostname="localhost").close()


def test_a_serving_process_imports_no_torch() -> None:
    code = "import sys, fedspan.transports.http.supervision; print(sorted({'torch', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


NODE = """
import sys, threading
from fedspan.transports.http.client import Link
from fedspan.transports.http.node import serve
serve(Link(sys.argv[1], None, None, 2**22), lambda envelope: envelope, threading.Event())
"""


def test_a_message_goes_to_a_node_and_back_through_a_server(tmp_path: Path) -> None:
    """Two processes beside the run's, and files that no other user reads."""
    folder = tmp_path / "server"
    with run_server(folder) as link:
        node = subprocess.Popen([sys.executable, "-c", NODE, link.address])
        try:
            with attach(link, 2**23) as run:
                (id, reply) = next(invite(run, Envelope("hello"), 60.0))
                assert reply == Envelope("hello")
                assert [one.status for one in list_nodes(link, {}, {})] == ["online"]
                nodes = ServerTransport(run, {"a": id})
                for size in (0, 2**10, 3 * 2**20):
                    order = Envelope("{}", bytes(size))
                    assert exchanged(nodes, {"a": order}, 60.0)["a"] == order
                modes = {path.name: path.stat().st_mode & 0o077 for path in folder.iterdir()}
                assert {"orders.db", "messages", "secret", "server.log"} <= modes.keys()
                assert not any(mode for name, mode in modes.items() if name != "server.json")
        finally:
            node.kill()
            node.wait()


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (503, "failed with status 503, perhaps because its disk is full.*--resume"),
        (404, "does not know this run"),
        (409, r"refused a request of this run with status 409 \(not there\).*--resume"),
    ],
)
def test_a_run_ends_with_the_server_s_reason(status: int, said: str, tmp_path: Path) -> None:
    answer = httpx.Response(status, text="not there")
    with serve_here(tmp_path) as server, pytest.raises(FedspanError, match=said), attach(server.link, 1):
        raise httpx.HTTPStatusError("", request=httpx.Request("POST", "http://a"), response=answer)


def test_a_run_whose_server_does_not_answer_says_so(tmp_path: Path) -> None:
    with (
        serve_here(tmp_path) as server,
        pytest.raises(FedspanError, match=r"did not answer \(ReadTimeout\).*--resume"),
        attach(server.link, 1),
    ):
        raise httpx.ReadTimeout("")


def test_a_run_without_its_server_or_with_another_secret_is_refused(tmp_path: Path) -> None:
    with serve_here(tmp_path) as server:
        secret = server.link.secret.read_text()
        server.link.secret.write_text("another")
        with pytest.raises(FedspanError, match=r"`secret`.*answered 403"), attach(server.link, 1):
            pass
        server.link.secret.write_text(secret)
    with pytest.raises(FedspanError, match="Is fedspan server running"), attach(server.link, 1):
        pass


SERVER = """
    import sys
    from pathlib import Path
    from threading import Event
    from fedspan.transports.http.server import read_link
    from fedspan.transports.http.supervision import supervise
    folder = Path(sys.argv[1])
    supervise(folder, read_link(folder), "127.0.0.1", Event(), lambda: print("ready", flush=True))
"""


@pytest.fixture
def link(tmp_path: Path) -> ServerLink:
    return prepare_folder(tmp_path / "server", free_port(), [], insecure=True)


def test_a_killed_server_takes_its_serving_process_along_and_starts_again(link: ServerLink) -> None:
    for _ in range(2):
        command = [sys.executable, "-c", textwrap.dedent(SERVER), str(link.folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n", (link.folder / "server.log").read_text()
            os.kill(server.pid, signal.SIGKILL)
    stop, ready = Event(), Event()
    again = Thread(target=supervision.supervise, args=(link.folder, link, "127.0.0.1", stop, ready.set))
    again.start()
    try:
        assert ready.wait(120), (link.folder / "server.log").read_text()
    finally:
        stop.set()
        again.join()


def test_a_server_serves_at_its_own_port_whatever_a_refused_start_wrote(tmp_path: Path) -> None:
    link, stop, ready = prepare_folder(tmp_path, free_port(), [], insecure=True), Event(), Event()
    prepare_folder(tmp_path, free_port(), [], insecure=True)
    server = Thread(target=supervision.supervise, args=(tmp_path, link, "127.0.0.1", stop, ready.set))
    server.start()
    try:
        assert ready.wait(120), (tmp_path / "server.log").read_text()
        assert list_nodes(read_link(tmp_path), {}, {}) == []
    finally:
        stop.set()
        server.join()


@pytest.mark.parametrize("role", ["server", "serving"])
def test_a_folder_has_one_server(role: str, link: ServerLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_ENDING", 0.1)
    with (
        hold_folder(link.folder, role, "--folder"),
        pytest.raises(FedspanError, match=rf"process {os.getpid()} works in .* as its {role}.*kill {os.getpid()}"),
    ):
        supervision.supervise(link.folder, link, "127.0.0.1", Event(), lambda: None)
