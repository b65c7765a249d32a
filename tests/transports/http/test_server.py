"""A server's folder, its nodes, which are admitted and revoked, and who owns a connection within the machine."""

import json
import os
import socket
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner

from fedspan.errors import FedspanError
from fedspan.transports.http.local_peer import get_peer_uid
from helpers.another_user import as_another_user
from helpers.command_line import get_program
from helpers.refusals import refused

pytest.importorskip("flwr", reason="the extra fedspan[deploy] is not installed")

from flwr.app import Context, Message, RecordDict

from fedspan.transports.http import admissions, app
from fedspan.transports.http import server as servers
from fedspan.transports.http.adapter import set_identity

SAID = [
    {"node-id": "11", "status": "online", "online-elapsed": 75.4, "offline-at": "N/A"},
    {"node-id": "12", "status": "offline", "online-elapsed": 9.0, "offline-at": "2026-01-02 03:04:05Z"},
    {"node-id": "13", "status": "registered", "online-elapsed": 0.0, "offline-at": "N/A"},
    {"node-id": "14", "status": "unregistered", "online-elapsed": 0.0, "offline-at": "N/A"},
]


def test_a_name_that_the_certificate_is_not_good_for_is_refused(tmp_path: Path) -> None:
    servers.prepare_folder(tmp_path, 9092, ["fl.example.org"], insecure=False)
    servers.prepare_folder(tmp_path, 9093, ["fl.example.org"], insecure=False)
    servers.prepare_folder(tmp_path, 9093, [], insecure=False)
    servers.prepare_folder(tmp_path, 9093, ["127.0.0.1", "localhost"], insecure=False)
    with refused("--name"):
        servers.prepare_folder(tmp_path, 9093, ["other.example.org"], insecure=False)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "server"
    servers.prepare_folder(folder, 9092, [], insecure=True)

    def flower(link: Any, *arguments: str) -> dict[str, Any]:
        return {"nodes": SAID}

    monkeypatch.setattr(servers, "call_flower", flower)
    return folder


def test_nodes_have_the_names_that_they_were_admitted_as(server: Path) -> None:
    first, second, third = servers.list_nodes(servers.read_link(server), {11: "clinic-a"})
    assert (first.name, first.status, first.online_seconds, first.offline_since) == ("clinic-a", "online", 75.4, None)
    assert second.offline_since == 1767323045.0
    assert (third.status, third.offline_since) == ("registered", None)
    assert [one.status for one in servers.list_nodes(servers.read_link(server), {14: "clinic-b"})][3:] == ["revoked"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (subprocess.TimeoutExpired("flwr", 120), "flwr list x took more than 120 seconds"),
        (OSError(28, "No space left on device"), "flwr list x could not be run: .*No space left"),
    ],
)
def test_a_command_of_flower_that_cannot_be_run_is_an_error_of_the_server(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = servers.prepare_folder(tmp_path / "server", 9092, [], insecure=True)

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(servers.subprocess, "run", fail)
    with pytest.raises(FedspanError, match=said):
        servers.call_flower(link, "list", "x")


class Flower:
    """Flower's side: registered keys, of which none is ever registered twice."""

    def __init__(self) -> None:
        self.nodes: dict[str, tuple[int, bool]] = {}
        self.failures = 0

    def call(self, link: Any, *arguments: str) -> dict[str, Any]:
        if "register" in arguments:
            key = Path(arguments[2]).read_text().strip()
            if key in self.nodes:
                raise FedspanError("server", "flwr supernode register", problem="Public key already in use")
            self.nodes[key] = (len(self.nodes) + 1, True)
            if self.failures:
                self.failures -= 1
                raise KeyboardInterrupt
            return {"node-id": str(self.nodes[key][0])}
        if "unregister" in arguments:
            for key, (id, _) in self.nodes.items():
                if str(id) == arguments[2]:
                    self.nodes[key] = (id, False)
            return {}
        status = {True: "online", False: "unregistered"}
        return {"nodes": [{"node-id": str(id), "status": status[active]} for id, active in self.nodes.values()]}

    def look_up(self, database: Path, key: bytes) -> tuple[int | None, bool]:
        return self.nodes.get(key.decode().strip(), (None, False))


@pytest.fixture
def flower(monkeypatch: pytest.MonkeyPatch) -> Flower:
    made = Flower()
    for module in (servers, admissions):
        monkeypatch.setattr(module, "call_flower", made.call)
    monkeypatch.setattr(admissions, "read_node_id", made.look_up)
    return made


@pytest.fixture
def link(tmp_path: Path, flower: Flower) -> Any:
    return servers.prepare_folder(tmp_path / "server", 9092, [], insecure=True)


@pytest.fixture
def key(tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        path = tmp_path / f"{name}.pub"
        path.write_text(f"ecdsa-sha2-nistp384 {name}\n")
        return path

    return make


def names(link: Any) -> list[str]:
    return sorted(one.name for one in admissions.read_admissions(link).values())


def test_a_revoked_node_is_out_for_good_and_logged(link: Any, flower: Flower, key: Callable[[str], Path]) -> None:
    admissions.admit_node(link, key("a"), "clinic-a")
    admissions.admit_node(link, key("b"), "clinic-b")
    assert admissions.revoke_node(link, "clinic-a", "stolen") == [1]
    assert names(link) == ["clinic-b"]
    assert flower.nodes["ecdsa-sha2-nistp384 a"] == (1, False)
    rows = admissions.open_audit_log(link).read()
    assert [(row["event"], row["name"]) for row in rows] == [
        ("admitted", "clinic-a"),
        ("admitted", "clinic-b"),
        ("revoked", "clinic-a"),
    ]
    assert rows[-1]["reason"] == "stolen"
    with pytest.raises(FedspanError, match="this key was revoked, and stays so"):
        admissions.admit_node(link, key("a"), "clinic-a")
    with pytest.raises(FedspanError, match="no node 'clinic-a' was admitted"):
        admissions.revoke_node(link, "clinic-a")
    with pytest.raises(FedspanError, match="no node '' was admitted"):
        admissions.revoke_node(link, "")


def test_a_name_has_no_invisible_characters(link: Any, key: Callable[[str], Path]) -> None:
    with refused("--as"):
        admissions.admit_node(link, key("a"), "clinic\u200d-a")
    assert names(link) == []


def test_a_key_is_replaced_under_its_name(link: Any, flower: Flower, key: Callable[[str], Path]) -> None:
    admissions.admit_node(link, key("old"), "clinic-a")
    with pytest.raises(FedspanError, match=r"'clinic-a' has another key\. Use --replace"):
        admissions.admit_node(link, key("new"), "clinic-a")
    admissions.admit_node(link, key("new"), "clinic-a", replace=True)
    assert {id: one.key for id, one in admissions.read_admissions(link).items()} == {2: "ecdsa-sha2-nistp384 new"}
    assert flower.nodes["ecdsa-sha2-nistp384 old"] == (1, False)


def test_a_lost_list_is_rebuilt_and_a_damaged_one_stops_the_server(link: Any, key: Callable[[str], Path]) -> None:
    for name in ("a", "b", "c"):
        admissions.admit_node(link, key(name), name)
    admissions.revoke_node(link, "b")
    before = admissions.read_admissions(link)
    (link.folder / "nodes.json").unlink()
    assert admissions.read_admissions(link) == before
    admissions.admit_node(link, key("d"), "d")
    assert names(link) == ["a", "c", "d"]
    for content in ("{", "[]", '{"a": {}}', '{"11": "clinic-a"}'):
        (link.folder / "nodes.json").write_text(content)
        with pytest.raises(FedspanError, match=r"nodes\.json is damaged .* Remove it: it is rebuilt"):
            admissions.read_admissions(link)
    (link.folder / "nodes.json").unlink()
    log = link.folder / "audit.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"name": "c"', b'"name": "x"', 1))
    with pytest.raises(FedspanError, match=r"audit\.jsonl, line 3"):
        admissions.read_admissions(link)


def test_parallel_admissions_lose_none(link: Any, key: Callable[[str], Path]) -> None:
    made = [key(str(number)) for number in range(12)]
    threads = [Thread(target=admissions.admit_node, args=(link, path, path.stem)) for path in made]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(admissions.read_admissions(link)) == 12


def test_an_admission_that_was_killed_halfway_is_finished_by_the_same_command(
    link: Any, flower: Flower, key: Callable[[str], Path]
) -> None:
    flower.failures = 1
    with pytest.raises(KeyboardInterrupt):
        admissions.admit_node(link, key("a"), "clinic-a")
    assert names(link) == []
    admissions.admit_node(link, key("a"), "clinic-a")
    assert names(link) == ["clinic-a"]


def test_admissions_end(link: Any, flower: Flower, key: Callable[[str], Path]) -> None:
    admissions.admit_node(link, key("a"), "clinic-a", days=10)
    admissions.admit_node(link, key("b"), "clinic-b", days=0)
    assert admissions.end_admissions(link) == []
    assert 9 <= admissions.read_admissions(link)[1].days_left <= 10
    path = link.folder / "nodes.json"
    content = json.loads(path.read_text())
    content["1"]["until"] = (datetime.now(UTC) - timedelta(days=1)).date().isoformat()
    path.write_text(json.dumps(content))
    assert admissions.end_admissions(link) == [1]
    assert names(link) == ["clinic-b"]
    assert "the admission ended on" in str(admissions.open_audit_log(link).read()[-1]["reason"])


def test_a_limit_on_examples_stays_with_the_name_until_it_is_changed(
    link: Any, flower: Flower, key: Callable[[str], Path]
) -> None:
    def most() -> int | None:
        (one,) = (one for one in admissions.read_admissions(link).values() if one.name == "clinic-a")
        return one.max_examples

    admissions.admit_node(link, key("a"), "clinic-a", max_examples=500)
    assert most() == 500
    admissions.admit_node(link, key("b"), "clinic-a", replace=True)
    assert most() == 500
    (link.folder / "nodes.json").unlink()
    assert most() == 500
    assert {id: one.name for id, one in admissions.read_revocations(link).items()} == {1: "clinic-a"}
    runner, server = CliRunner(env={"COLUMNS": "140", "TERM": "dumb"}), ["--server", str(link.folder)]
    assert "max examples" in runner.invoke(get_program(), ["status", *server]).output
    assert (
        json.loads(runner.invoke(get_program(), ["status", "--json", *server]).stdout)["nodes"][0]["max_examples"]
        == 500
    )
    done = runner.invoke(get_program(), ["admit", str(key("b")), "--as", "clinic-a", "--max-examples", "20", *server])
    assert "with the weight of at most 20 examples" in done.output
    assert most() == 20
    admissions.admit_node(link, key("b"), "clinic-a", max_examples=0)
    assert most() is None
    content = json.loads((link.folder / "nodes.json").read_text())
    content["2"]["max_examples"] = -1
    (link.folder / "nodes.json").write_text(json.dumps(content))
    with pytest.raises(FedspanError, match=r"nodes\.json is damaged"):
        admissions.read_admissions(link)


def test_a_limit_on_examples_outlives_a_revoked_and_an_ended_key(
    link: Any, flower: Flower, key: Callable[[str], Path]
) -> None:
    def most() -> int | None:
        (one,) = admissions.read_admissions(link).values()
        return one.max_examples

    admissions.admit_node(link, key("a"), "clinic", max_examples=500)
    admissions.revoke_node(link, "clinic")
    admissions.admit_node(link, key("b"), "clinic")
    assert most() == 500
    (link.folder / "nodes.json").unlink()  # the order of admissions is rebuilt, too
    admissions.admit_node(link, key("b"), "clinic", max_examples=70)
    path = link.folder / "nodes.json"
    path.write_text(path.read_text().replace(admissions.read_admissions(link)[2].until, "2020-01-01"))
    assert admissions.end_admissions(link) == [2]
    admissions.admit_node(link, key("c"), "clinic")
    assert most() == 70


def test_a_lost_list_is_read_from_the_audit_log_once(link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run asks for it at every poll, and the log has an entry for every order."""
    assert admissions.read_admissions(link) == {}
    monkeypatch.setattr(admissions, "open_audit_log", None)
    assert admissions.read_revocations(link) == {}


def test_the_commands_warn_of_expiry_and_say_what_they_did(link: Any, key: Callable[[str], Path]) -> None:
    runner, server = CliRunner(env={"COLUMNS": "140", "TERM": "dumb"}), ["--server", str(link.folder)]
    done = runner.invoke(get_program(), ["admit", str(key("AAAA")), "--as", "clinic-a", "--days", "3", *server])
    assert done.exit_code == 0, done.output
    shown = runner.invoke(get_program(), ["status", *server])
    assert "the admission of clinic-a expires in 2 days" in shown.stderr
    gone = runner.invoke(get_program(), ["revoke", "clinic-a", "--reason", "over", *server])
    assert gone.output == "revoked the key of clinic-a (node 1)\n"
    shown = runner.invoke(get_program(), ["status", *server])
    assert "revoked" in next(line for line in shown.stdout.splitlines() if "clinic-a" in line), shown.output
    audited = runner.invoke(get_program(), ["audit", str(link.folder)])
    assert "revoked  node=1 name=clinic-a" in audited.output
    assert runner.invoke(get_program(), ["revoke", "clinic-a", *server]).exit_code == 2
    runner.invoke(get_program(), ["admit", str(key("AAAB")), "--as", "clinic-a", *server])
    assert "revoked" not in runner.invoke(get_program(), ["status", *server]).stdout  # the name has another key


CONTEXT = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})
GRID: Any = None


def test_a_superexec_is_told_to_stop() -> None:
    with pytest.raises(FedspanError, match=r"only fedspan submit may serve\. Stop the SuperExec"):
        app.server(GRID, CONTEXT)


def test_the_client_app_handles_no_message() -> None:
    set_identity(1, 1, 1)
    message = Message(RecordDict(), dst_node_id=2, message_type="train")
    with pytest.raises(ValueError, match="No train function registered"):
        app.client(message, CONTEXT)


needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="this system has no /proc/net/tcp")


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@needs_proc
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_connection_of_this_process_is_of_this_user(host: str) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as client,
    ):
        accepted, address = server.accept()
        with accepted:
            ends = address[:2], server.getsockname()[:2]
            assert client.getsockname()[:2] == ends[0]
            assert get_peer_uid(*ends) == os.getuid()
            if ":" not in host:
                assert get_peer_uid((f"::ffff:{host}", address[1]), ends[1]) == os.getuid()
            assert get_peer_uid(ends[0], (host, 1)) is None


@needs_proc
def test_a_connection_of_another_user_is_that_user_s() -> None:
    code = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.recv(1)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = subprocess.Popen([*as_another_user(), "-c", code, str(server.getsockname()[1])])
        try:
            server.settimeout(30)
            accepted, address = server.accept()
            with accepted:
                assert get_peer_uid(address, server.getsockname()) == 65534
        finally:
            process.kill()
            process.wait()


@needs_proc
@pytest.mark.parametrize("ends", [(None, None), (("", 1), ("", 2)), (("127.0.0.1", 1), ("127.0.0.1", 2))])
def test_no_connection_has_no_owner(ends: tuple[tuple[str, int] | None, tuple[str, int] | None]) -> None:
    assert get_peer_uid(*ends) is None
