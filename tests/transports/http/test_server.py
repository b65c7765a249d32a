"""A server's folder, and its nodes, which are admitted and revoked."""

import json
import os
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner

from fedspan import processes
from fedspan.errors import FedspanError
from fedspan.processes import hold_folder
from fedspan.transports.http import admissions
from fedspan.transports.http import server as servers
from fedspan.transports.http.keys import make_node_key
from fedspan.transports.http.requests import RequestLimits
from fedspan.transports.http.store import Store
from fedspan.transports.http.supervision import create_server
from helpers.command_line import get_program
from helpers.http_server import LocalServer, free_port
from helpers.refusals import refused


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
    link = servers.prepare_folder(tmp_path, 9092, [], insecure=False)
    with hold_folder(tmp_path, "server", "--folder"), refused("--folder", "as its server"):
        servers.prepare_folder(tmp_path, 9093, [], insecure=True)
    assert servers.read_link(tmp_path) == link


@pytest.mark.parametrize("kept", [0, 63])
def test_a_server_with_a_damaged_secret_does_not_start(kept: int, tmp_path: Path) -> None:
    link = servers.prepare_folder(tmp_path, 9092, [], insecure=True)
    link.secret.write_text(link.secret.read_text()[:kept])
    with refused("secret", "Remove it"):
        servers.prepare_folder(tmp_path, 9092, [], insecure=True)
    with closing(Store(tmp_path)) as store, refused("secret", "Remove it"):
        create_server(link, store, RequestLimits())
    link.secret.unlink()
    servers.prepare_folder(tmp_path, 9092, [], insecure=True)
    assert len(servers.read_secret(link)) == 64
    assert link.secret.stat().st_mode & 0o777 == 0o600


def test_a_secret_is_written_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    for name in ("fdopen", "fsync"):
        monkeypatch.setattr(os, name, fail)
    with pytest.raises(OSError, match="full"):
        servers.prepare_folder(tmp_path, 9092, [], insecure=True)
    assert not (tmp_path / "secret").exists()


@pytest.fixture
def link(tmp_path: Path) -> Any:
    return servers.prepare_folder(tmp_path / "server", free_port(), [], insecure=True)


@pytest.fixture
def key(tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        path = tmp_path / f"{name}.key"
        return path.with_name(f"{name}.key.pub") if path.exists() else make_node_key(path)

    return make


def id_of(path: Path) -> int:
    return admissions.compute_node_id(path.read_text().strip())


def names(link: Any) -> list[str]:
    return sorted(one.name for one in admissions.read_admissions(link).values())


def test_a_revoked_node_is_out_for_good_and_logged(link: Any, key: Callable[[str], Path]) -> None:
    admissions.admit_node(link, key("a"), "clinic-a")
    admissions.admit_node(link, key("b"), "clinic-b")
    assert admissions.revoke_node(link, "clinic-a", "stolen") == [id_of(key("a"))]
    assert names(link) == ["clinic-b"]
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


def test_a_key_is_replaced_under_its_name(link: Any, key: Callable[[str], Path]) -> None:
    admissions.admit_node(link, key("old"), "clinic-a")
    with pytest.raises(FedspanError, match=r"'clinic-a' has another key\. Use --replace"):
        admissions.admit_node(link, key("new"), "clinic-a")
    admissions.admit_node(link, key("new"), "clinic-a", replace=True)
    assert {id: one.key for id, one in admissions.read_admissions(link).items()} == {
        id_of(key("new")): key("new").read_text().strip()
    }


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


def test_admissions_end(link: Any, key: Callable[[str], Path]) -> None:
    admissions.admit_node(link, key("a"), "clinic-a", days=10)
    admissions.admit_node(link, key("b"), "clinic-b", days=0)
    assert admissions.end_admissions(link) == []
    assert 9 <= admissions.read_admissions(link)[id_of(key("a"))].days_left <= 10
    path = link.folder / "nodes.json"
    content = json.loads(path.read_text())
    content[str(id_of(key("a")))]["until"] = (datetime.now(UTC) - timedelta(days=1)).date().isoformat()
    path.write_text(json.dumps(content))
    assert admissions.end_admissions(link) == [id_of(key("a"))]
    assert names(link) == ["clinic-b"]
    assert "the admission ended on" in str(admissions.open_audit_log(link).read()[-1]["reason"])


def test_a_limit_on_examples_stays_with_the_name_until_it_is_changed(link: Any, key: Callable[[str], Path]) -> None:
    def most() -> int | None:
        (one,) = (one for one in admissions.read_admissions(link).values() if one.name == "clinic-a")
        return one.max_examples

    admissions.admit_node(link, key("a"), "clinic-a", max_examples=500)
    assert most() == 500
    admissions.admit_node(link, key("b"), "clinic-a", replace=True)
    assert most() == 500
    (link.folder / "nodes.json").unlink()
    assert most() == 500
    assert {id: one.name for id, one in admissions.read_revocations(link).items()} == {id_of(key("a")): "clinic-a"}
    runner, server = CliRunner(env={"COLUMNS": "140", "TERM": "dumb"}), ["--server", str(link.folder)]
    with LocalServer(link):
        assert "max examples" in runner.invoke(get_program(), ["status", *server]).output
        shown = json.loads(runner.invoke(get_program(), ["status", "--json", *server]).stdout)
    assert shown["nodes"][0]["max_examples"] == 500
    done = runner.invoke(get_program(), ["admit", str(key("b")), "--as", "clinic-a", "--max-examples", "20", *server])
    assert "with the weight of at most 20 examples" in done.output
    assert most() == 20
    admissions.admit_node(link, key("b"), "clinic-a", max_examples=0)
    assert most() is None
    content = json.loads((link.folder / "nodes.json").read_text())
    content[str(id_of(key("b")))]["max_examples"] = -1
    (link.folder / "nodes.json").write_text(json.dumps(content))
    with pytest.raises(FedspanError, match=r"nodes\.json is damaged"):
        admissions.read_admissions(link)


def test_a_limit_on_examples_outlives_a_revoked_and_an_ended_key(link: Any, key: Callable[[str], Path]) -> None:
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
    path.write_text(path.read_text().replace(admissions.read_admissions(link)[id_of(key("b"))].until, "2020-01-01"))
    assert admissions.end_admissions(link) == [id_of(key("b"))]
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
    with LocalServer(link):
        shown = runner.invoke(get_program(), ["status", *server])
    assert "the admission of clinic-a expires in 2 days" in shown.stderr
    gone = runner.invoke(get_program(), ["revoke", "clinic-a", "--reason", "over", *server])
    assert gone.output == f"revoked the key of clinic-a (node {id_of(key('AAAA'))})\n"
    with LocalServer(link):
        shown = runner.invoke(get_program(), ["status", *server])
    assert "revoked" in next(line for line in shown.stdout.splitlines() if "clinic-a" in line), shown.output
    audited = runner.invoke(get_program(), ["audit", str(link.folder)])
    assert f"revoked  node={id_of(key('AAAA'))} name=clinic-a" in audited.output
    assert runner.invoke(get_program(), ["revoke", "clinic-a", *server]).exit_code == 2
    runner.invoke(get_program(), ["admit", str(key("AAAB")), "--as", "clinic-a", *server])
    with LocalServer(link):
        shown = runner.invoke(get_program(), ["status", *server])
    assert "clinic-a" in shown.stdout
    assert "revoked" not in shown.stdout  # the name has another key
