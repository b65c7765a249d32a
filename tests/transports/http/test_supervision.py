"""The serving process, its port, log, certificates and end; its folder; and nodes, which are admitted and revoked."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from fedspan import processes
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from fedspan.processes import hold_folder
from fedspan.transports.http import admissions, keys, supervision
from fedspan.transports.http import server as servers
from fedspan.transports.http.connections import ConnectionLimits
from fedspan.transports.http.invitations import invite
from fedspan.transports.http.keys import make_node_key
from fedspan.transports.http.requests import RequestLimits
from fedspan.transports.http.server import ServerLink, attach, list_nodes, prepare_folder, read_link
from fedspan.transports.http.store import Store
from fedspan.transports.http.supervision import create_server
from fedspan.transports.http.transport import ServerTransport
from helpers.command_line import get_program
from helpers.http_server import LocalServer, run_server, run_supervised, serve_here
from helpers.ports import free_port
from helpers.refusals import refused
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
    with refused("--host"):
        supervision.supervise(tmp_path, link, "192.0.2.1", Event(), lambda: None)
    with refused("--proxy"):
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
        refused("server", r"did not answer \(ReadTimeout\).*--resume"),
        attach(server.link, 1),
    ):
        raise httpx.ReadTimeout("")


def test_a_run_without_its_server_or_with_another_secret_is_refused(tmp_path: Path) -> None:
    with serve_here(tmp_path) as server:
        secret = server.link.secret.read_text()
        server.link.secret.write_text("another")
        with refused("secret", r"`secret`.*answered 403"), attach(server.link, 1):
            pass
        server.link.secret.write_text(secret)
    with refused("server", "Is fedspan server running"), attach(server.link, 1):
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
    with run_supervised(link):
        pass


def test_a_server_serves_at_its_own_port_whatever_a_refused_start_wrote(tmp_path: Path) -> None:
    link = prepare_folder(tmp_path, free_port(), [], insecure=True)
    prepare_folder(tmp_path, free_port(), [], insecure=True)
    with run_supervised(link):
        assert list_nodes(read_link(tmp_path), {}, {}) == []


@pytest.mark.parametrize("role", ["server", "serving"])
def test_a_folder_has_one_server(role: str, link: ServerLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_ENDING", 0.1)
    with (
        hold_folder(link.folder, role, "--folder"),
        pytest.raises(FedspanError, match=rf"process {os.getpid()} works in .* as its {role}.*kill {os.getpid()}"),
    ):
        supervision.supervise(link.folder, link, "127.0.0.1", Event(), lambda: None)


def test_a_name_that_the_certificate_is_not_good_for_is_refused(tmp_path: Path) -> None:
    servers.prepare_folder(tmp_path, 9092, ["fl.example.org"], insecure=False)
    servers.prepare_folder(tmp_path, 9093, ["fl.example.org"], insecure=False)
    servers.prepare_folder(tmp_path, 9093, [], insecure=False)
    servers.prepare_folder(tmp_path, 9093, ["127.0.0.1", "localhost"], insecure=False)
    with refused("--name"):
        servers.prepare_folder(tmp_path, 9093, ["other.example.org"], insecure=False)


def test_a_second_server_changes_nothing_in_the_folder_of_a_running_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_ENDING", 0.1)
    prepared = servers.prepare_folder(tmp_path, 9092, [], insecure=False)
    with hold_folder(tmp_path, "server", "--folder"), refused("--folder", "as its server"):
        servers.prepare_folder(tmp_path, 9093, [], insecure=True)
    assert servers.read_link(tmp_path) == prepared


@pytest.mark.parametrize("kept", [0, 63])
def test_a_server_with_a_damaged_secret_does_not_start(kept: int, tmp_path: Path) -> None:
    prepared = servers.prepare_folder(tmp_path, 9092, [], insecure=True)
    prepared.secret.write_text(prepared.secret.read_text()[:kept])
    with refused("secret", "Remove it"):
        servers.prepare_folder(tmp_path, 9092, [], insecure=True)
    with closing(Store(tmp_path)) as store, refused("secret", "Remove it"):
        create_server(prepared, store, RequestLimits())
    prepared.secret.unlink()
    servers.prepare_folder(tmp_path, 9092, [], insecure=True)
    assert len(servers.read_secret(prepared)) == 64
    assert prepared.secret.stat().st_mode & 0o777 == 0o600


def test_a_secret_is_written_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    for name in ("fdopen", "fsync"):
        monkeypatch.setattr(os, name, fail)
    with pytest.raises(OSError, match="full"):
        servers.prepare_folder(tmp_path, 9092, [], insecure=True)
    assert not (tmp_path / "secret").exists()


@pytest.fixture
def prepared(tmp_path: Path) -> Any:
    return servers.prepare_folder(tmp_path / "server", free_port(), [], insecure=True)


@pytest.fixture
def key(tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        path = tmp_path / f"{name}.key"
        return path.with_name(f"{name}.key.pub") if path.exists() else make_node_key(path)

    return make


def id_of(path: Path) -> int:
    return admissions.compute_node_id(path.read_text().strip())


def names(prepared: Any) -> list[str]:
    return sorted(one.name for one in admissions.read_admissions(prepared).values())


def test_a_revoked_node_is_out_for_good_and_logged(prepared: Any, key: Callable[[str], Path]) -> None:
    admissions.admit_node(prepared, key("a"), "clinic-a")
    admissions.admit_node(prepared, key("b"), "clinic-b")
    assert admissions.revoke_node(prepared, "clinic-a", "stolen") == [id_of(key("a"))]
    assert names(prepared) == ["clinic-b"]
    rows = admissions.open_audit_log(prepared).read()
    assert [(row["event"], row["name"]) for row in rows] == [
        ("admitted", "clinic-a"),
        ("admitted", "clinic-b"),
        ("revoked", "clinic-a"),
    ]
    assert rows[-1]["reason"] == "stolen"
    with refused("key", "this key was revoked, and stays so"):
        admissions.admit_node(prepared, key("a"), "clinic-a")
    with refused("NODE", "no node 'clinic-a' was admitted"):
        admissions.revoke_node(prepared, "clinic-a")
    with refused("NODE", "no node '' was admitted"):
        admissions.revoke_node(prepared, "")


def test_a_name_has_no_invisible_characters(prepared: Any, key: Callable[[str], Path]) -> None:
    with refused("--as"):
        admissions.admit_node(prepared, key("a"), "clinic\u200d-a")
    assert names(prepared) == []


def test_a_key_is_replaced_under_its_name(prepared: Any, key: Callable[[str], Path]) -> None:
    admissions.admit_node(prepared, key("old"), "clinic-a")
    with refused("--as"):
        admissions.admit_node(prepared, key("new"), "clinic-a")
    admissions.admit_node(prepared, key("new"), "clinic-a", replace=True)
    assert {id: one.key for id, one in admissions.read_admissions(prepared).items()} == {
        id_of(key("new")): key("new").read_text().strip()
    }


def test_a_lost_list_is_rebuilt_and_a_damaged_one_stops_the_server(prepared: Any, key: Callable[[str], Path]) -> None:
    for name in ("a", "b", "c"):
        admissions.admit_node(prepared, key(name), name)
    admissions.revoke_node(prepared, "b")
    before = admissions.read_admissions(prepared)
    (prepared.folder / "nodes.json").unlink()
    assert admissions.read_admissions(prepared) == before
    admissions.admit_node(prepared, key("d"), "d")
    assert names(prepared) == ["a", "c", "d"]
    for content in ("{", "[]", '{"a": {}}', '{"11": "clinic-a"}'):
        (prepared.folder / "nodes.json").write_text(content)
        with refused("server", r"nodes\.json is damaged .* Remove it: it is rebuilt"):
            admissions.read_admissions(prepared)
    (prepared.folder / "nodes.json").unlink()
    log = prepared.folder / "audit.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"name": "c"', b'"name": "x"', 1))
    with pytest.raises(FedspanError, match=r"audit\.jsonl, line 3"):
        admissions.read_admissions(prepared)


def test_parallel_admissions_lose_none(prepared: Any, key: Callable[[str], Path]) -> None:
    made = [key(str(number)) for number in range(12)]
    threads = [Thread(target=admissions.admit_node, args=(prepared, path, path.stem)) for path in made]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(admissions.read_admissions(prepared)) == 12


def test_admissions_end(prepared: Any, key: Callable[[str], Path]) -> None:
    admissions.admit_node(prepared, key("a"), "clinic-a", days=10)
    admissions.admit_node(prepared, key("b"), "clinic-b", days=0)
    assert admissions.end_admissions(prepared) == []
    assert 9 <= admissions.read_admissions(prepared)[id_of(key("a"))].days_left <= 10
    path = prepared.folder / "nodes.json"
    content = json.loads(path.read_text())
    content[str(id_of(key("a")))]["until"] = (datetime.now(UTC) - timedelta(days=1)).date().isoformat()
    path.write_text(json.dumps(content))
    assert admissions.end_admissions(prepared) == [id_of(key("a"))]
    assert names(prepared) == ["clinic-b"]
    assert "the admission ended on" in str(admissions.open_audit_log(prepared).read()[-1]["reason"])


def test_a_limit_on_examples_stays_with_the_name_until_it_is_changed(prepared: Any, key: Callable[[str], Path]) -> None:
    def most() -> int | None:
        (one,) = (one for one in admissions.read_admissions(prepared).values() if one.name == "clinic-a")
        return one.max_examples

    admissions.admit_node(prepared, key("a"), "clinic-a", max_examples=500)
    assert most() == 500
    admissions.admit_node(prepared, key("b"), "clinic-a", replace=True)
    assert most() == 500
    (prepared.folder / "nodes.json").unlink()
    assert most() == 500
    assert {id: one.name for id, one in admissions.read_revocations(prepared).items()} == {id_of(key("a")): "clinic-a"}
    runner, server = CliRunner(env={"COLUMNS": "140", "TERM": "dumb"}), ["--server", str(prepared.folder)]
    with LocalServer(prepared):
        assert "max examples" in runner.invoke(get_program(), ["status", *server]).output
        shown = json.loads(runner.invoke(get_program(), ["status", "--json", *server]).stdout)
    assert shown["nodes"][0]["max_examples"] == 500
    done = runner.invoke(get_program(), ["admit", str(key("b")), "--as", "clinic-a", "--max-examples", "20", *server])
    assert "with the weight of at most 20 examples" in done.output
    assert most() == 20
    admissions.admit_node(prepared, key("b"), "clinic-a", max_examples=0)
    assert most() is None
    content = json.loads((prepared.folder / "nodes.json").read_text())
    content[str(id_of(key("b")))]["max_examples"] = -1
    (prepared.folder / "nodes.json").write_text(json.dumps(content))
    with refused("server", r"nodes\.json is damaged"):
        admissions.read_admissions(prepared)


def test_a_limit_on_examples_outlives_a_revoked_and_an_ended_key(prepared: Any, key: Callable[[str], Path]) -> None:
    def most() -> int | None:
        (one,) = admissions.read_admissions(prepared).values()
        return one.max_examples

    admissions.admit_node(prepared, key("a"), "clinic", max_examples=500)
    admissions.revoke_node(prepared, "clinic")
    admissions.admit_node(prepared, key("b"), "clinic")
    assert most() == 500
    (prepared.folder / "nodes.json").unlink()  # the order of admissions is rebuilt, too
    admissions.admit_node(prepared, key("b"), "clinic", max_examples=70)
    path = prepared.folder / "nodes.json"
    path.write_text(path.read_text().replace(admissions.read_admissions(prepared)[id_of(key("b"))].until, "2020-01-01"))
    assert admissions.end_admissions(prepared) == [id_of(key("b"))]
    admissions.admit_node(prepared, key("c"), "clinic")
    assert most() == 70


def test_a_lost_list_is_read_from_the_audit_log_once(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run asks for it at every poll, and the log has an entry for every order."""
    assert admissions.read_admissions(prepared) == {}
    monkeypatch.setattr(admissions, "open_audit_log", None)
    assert admissions.read_revocations(prepared) == {}


def test_the_commands_warn_of_expiry_and_say_what_they_did(prepared: Any, key: Callable[[str], Path]) -> None:
    runner, server = CliRunner(env={"COLUMNS": "140", "TERM": "dumb"}), ["--server", str(prepared.folder)]
    done = runner.invoke(get_program(), ["admit", str(key("AAAA")), "--as", "clinic-a", "--days", "3", *server])
    assert done.exit_code == 0, done.output
    with LocalServer(prepared):
        shown = runner.invoke(get_program(), ["status", *server])
    assert "the admission of clinic-a expires in 2 days" in shown.stderr
    gone = runner.invoke(get_program(), ["revoke", "clinic-a", "--reason", "over", *server])
    assert gone.output == f"revoked the key of clinic-a (node {id_of(key('AAAA'))})\n"
    with LocalServer(prepared):
        shown = runner.invoke(get_program(), ["status", *server])
    assert "revoked" in next(line for line in shown.stdout.splitlines() if "clinic-a" in line), shown.output
    audited = runner.invoke(get_program(), ["audit", str(prepared.folder)])
    assert f"revoked  node={id_of(key('AAAA'))} name=clinic-a" in audited.output
    assert runner.invoke(get_program(), ["revoke", "clinic-a", *server]).exit_code == 2
    runner.invoke(get_program(), ["admit", str(key("AAAB")), "--as", "clinic-a", *server])
    with LocalServer(prepared):
        shown = runner.invoke(get_program(), ["status", *server])
    assert "clinic-a" in shown.stdout
    assert "revoked" not in shown.stdout  # the name has another key
