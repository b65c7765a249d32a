"""Commands on a server and of a data owner: admissions, certificates, runs, status, approvals, health and doctor."""

import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

from fedspan.assembly.run import Prepared
from fedspan.assembly.server import build_server_clients, connect
from fedspan.cli import doctor
from fedspan.cli.admission import warn_of_expiry
from fedspan.config import load_config
from fedspan.deployment.approval import Approvals
from fedspan.deployment.audit import AUDIT
from fedspan.deployment.flower_simulation import get_nodes_folder, reply_as
from fedspan.deployment.health import Heartbeat, find_problem
from fedspan.deployment.node import NodeService
from fedspan.deployment.status import store_named_run
from fedspan.federation.protocol import Envelope, decode_order, decode_reply
from fedspan.logs import AuditLog, JsonLines, read_lines
from fedspan.run_folder import RunFolder
from fedspan.runs import start
from fedspan.runs.report import RunReport, read_report
from helpers import tiny
from helpers.command_line import Call, get_program
from helpers.node_service import introduced, node, values
from helpers.reply_transport import Replies, ReplyingTransport

admissions = pytest.importorskip(
    "fedspan.transports.http.admissions", reason="the extra fedspan[deploy] is not installed"
)
keys = pytest.importorskip("fedspan.transports.http.keys")
servers = pytest.importorskip("fedspan.transports.http.server")


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    found = SimpleNamespace(folder=tmp_path, authority=tmp_path / "ca.crt")
    monkeypatch.setattr(servers, "read_link", lambda folder: found)
    return found


def test_an_admission_gets_its_options(call: Callable[..., Any], link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def admit(link: Any, key: Path, name: str, **options: Any) -> Any:
        calls.append((key, name, options))
        return SimpleNamespace(key="ecdsa-sha2-nistp384 AAAA", max_examples=options["max_examples"])

    monkeypatch.setattr(admissions, "admit_node", admit)
    told, _, shown = call("admit", "a.key.pub").output.partition("\n")
    assert told == "admitted a.key.pub"
    assert shown.startswith("compare its fingerprint with the data owner's, by telephone: SHA256:")
    options = ("--as", "clinic-a", "--days", 3, "--replace", "--max-examples", 50, "--fingerprint", "SHA256:a")
    assert call("admit", "a.key.pub", *options).output == (
        "admitted a.key.pub, which must use the id clinic-a, with the weight of at most 50 examples\n"
    )
    assert calls == [
        (Path("a.key.pub"), "", {"days": 730, "replace": False, "max_examples": None, "fingerprint": None}),
        (Path("a.key.pub"), "clinic-a", {"days": 3, "replace": True, "max_examples": 50, "fingerprint": "SHA256:a"}),
    ]


def test_every_revoked_key_is_named(call: Callable[..., Any], link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admissions, "revoke_node", lambda link, node, reason: [7, 9] if reason == "stolen" else [])
    result = call("revoke", "clinic-a", "--reason", "stolen")
    assert result.output == "revoked the key of clinic-a (node 7)\nrevoked the key of clinic-a (node 9)\n"


def test_certificates_are_renewed_in_two_steps(
    call: Callable[..., Any], link: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events: list[Any] = []
    monkeypatch.setattr(keys, "renew_authority", lambda folder, names: events.append(names) or tmp_path / "new.crt")
    monkeypatch.setattr(keys, "activate_authority", lambda folder: events.append("activated"))
    monkeypatch.setattr(admissions, "open_audit_log", lambda link: SimpleNamespace(write=events.append))
    first = call("renew", "--name", "fl.example.org")
    assert f"{tmp_path / 'new.crt'}\nthen run here: fedspan renew --activate" in first.output
    assert "the renewed certificates are in use" in call("renew", "--activate").output
    assert events == [["fl.example.org"], "certificates renewed", "activated", "certificates activated"]


def test_what_expires_soon_is_named_with_the_command(
    link: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    days = {"certificates": keys.SOON - 0.5}
    monkeypatch.setattr(keys, "compute_days_left", lambda *paths: days["certificates"])
    admitted = {
        7: SimpleNamespace(name="clinic-a", days_left=2.5),
        8: SimpleNamespace(name="", days_left=-1.0),
        9: SimpleNamespace(name="clinic-b", days_left=keys.SOON),
    }
    monkeypatch.setattr(admissions, "read_admissions", lambda link: admitted)
    warn_of_expiry(link)
    assert capsys.readouterr().err.splitlines() == [
        f"warning: the server's certificates expire in {int(keys.SOON - 0.5)} days: fedspan renew",
        "warning: the admission of clinic-a expires in 2 days: fedspan admit KEY.pub --replace",
        "warning: the admission of node 8 expires in 0 days: fedspan admit KEY.pub --replace",
    ]
    days["certificates"] = keys.SOON
    admitted.clear()
    warn_of_expiry(link)
    assert capsys.readouterr().err == ""


NODES = [
    {"node": "11", "online": True, "online_seconds": 75.4, "offline_since": None, "work": ""},
    {"node": "12", "online": False, "online_seconds": 0.0, "offline_since": 1767322985.0, "work": ""},
]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "server"
    servers.prepare_folder(folder, 9092, [], insecure=True)

    monkeypatch.setattr(servers.Operator, "post", lambda operator, path: NODES)
    return folder


def test_status_shows_nodes_and_the_run(server: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "round-00002").mkdir(parents=True)
    (run / "config.yaml").write_text("federation: {rounds: 5}\n")
    failure = {"client": "south", "attempt": 0, "reason": "no reply within 5 s"}
    rows = [{"round": 1}, {"round": 2, "failures": [failure]}]
    with JsonLines(run / "metrics.jsonl") as lines:
        for row in rows:
            lines.append(row)
        lines.commit()
    runner = CliRunner(env={"COLUMNS": "140", "TERM": "dumb"})
    shown = runner.invoke(get_program(), ["status", "--server", str(server)])
    assert shown.exit_code == 0, shown.output
    assert "round" not in shown.output
    store_named_run(server, run, {"north": 11, "south": 12})
    shown = runner.invoke(get_program(), ["status", "--server", str(server)])
    assert shown.exit_code == 0, shown.output
    for words in (
        "north",
        "now, for 1:15",
        "round 2: no reply within 5 s",
        "2 of 5, stopped",
        "--resume",
        "2026-01-02",
    ):
        assert words in shown.output
    printed = json.loads(runner.invoke(get_program(), ["status", "--server", str(server), "--json"]).stdout)
    assert [node["client"] for node in printed["nodes"]] == ["north", "south"]
    assert printed["run"]["round"] == 2
    done = runner.invoke(get_program(), ["status", "--server", str(server), "--run", str(tmp_path)])
    assert done.exit_code == 2


LIAR = "south"


class Lying(ReplyingTransport):
    """A transport to clients in this process, one of whom reports what it likes after the first round."""

    def __init__(self, run: Path, lies: Mapping[str, float] | None) -> None:
        self.run, self.lies = str(run), lies

    def replies(self, envelopes: Mapping[str, Envelope], seconds: float, *, wait_for_offline: bool = False) -> Replies:
        for id, envelope in envelopes.items():
            order = decode_order(envelope)
            if id == LIAR and order.task == "evaluate" and order.round == 1:
                if self.lies is None:
                    yield id, "it is offline"
                    continue
                reply = decode_reply(reply_as(self.run, torch.get_num_threads(), envelope))
                scores = {part: {**row, **self.lies} for part, row in reply.scores.items()}
                yield id, replace(reply, scores=scores).to_envelope()
            else:
                yield id, reply_as(self.run, torch.get_num_threads(), envelope)


def submitted(
    monkeypatch: pytest.MonkeyPatch, config: Path, folder: Path, lies: Mapping[str, float] | None, known: bool = True
) -> tuple[str, RunReport]:
    """Print of ``fedspan submit`` and ``fedspan report``, and the run's report; the nodes are in this process."""
    monkeypatch.chdir(folder.parent)  # where report.html is written
    servers.prepare_folder(folder.with_suffix(".server"), 1, [], insecure=True)

    def host(place: RunFolder, prepared: Prepared, run_rounds: Any) -> RunReport:
        transport = Lying(place.path.resolve(), lies)
        counts = {id: data.client.examples for id, data in prepared.federation.clients.items()}
        clients = None if known else build_server_clients(prepared.config, prepared.engine.adapted.spec, counts)
        return run_rounds(connect(prepared, transport, nodes=get_nodes_folder(place.path), clients=clients))

    def submit(config: Path, folder: Path, *_: Any, listener: Any, **__: Any) -> RunReport:
        return start.run(load_config(config), folder, listener=listener, host=host)

    monkeypatch.setattr("fedspan.deployment.deploy.submit", submit)
    server = str(folder.with_suffix(".server"))
    result = CliRunner().invoke(get_program(), ["submit", str(config), "--out", str(folder), "--server", server])
    assert result.exit_code == 0, result.output
    shown = CliRunner().invoke(get_program(), ["report", str(folder)])
    assert shown.exit_code == 0, shown.output
    return result.output + shown.output, read_report(folder)


@pytest.mark.parametrize(("clients", "selection"), [(2, "last round"), (3, "best by validation")])
def test_the_summary_says_what_selected_the_round(
    clients: int, selection: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = tiny.settings(tiny_folder, federation={"clients_per_round": None, "rounds": 2})
    values["partition"] = {"partitioner": "iid", "clients": clients, "validation": 0.2, "test": 0.2}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    printed, report = submitted(monkeypatch, config, tmp_path / "run", {}, known=False)
    assert f"{report.best_round}, {selection}\n" in printed
    assert report.selected == (clients == 3)


def test_an_impossible_metric_is_neither_printed_as_a_score_nor_decides_between_rounds(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = tiny.settings(tiny_folder, federation={"clients_per_round": None, "rounds": 3})
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    lies = {"accuracy": 1e308, "loss": 1e308, "perplexity": 1e308}
    printed, lied = submitted(monkeypatch, config, tmp_path / "lied", lies)
    _, offline = submitted(monkeypatch, config, tmp_path / "offline", None)
    assert not re.search(r"(?i)\binf\b|\bnan\b|\d{20}|e\+?308 *%", printed), printed
    assert f"{LIAR} " in printed
    assert "not measured: no accuracy" in printed
    assert lied.best_round == offline.best_round
    assert lied.failures.keys() == {LIAR}
    assert {name: lied.failures[LIAR][name] for name in ("count", "round")} == {"count": 2, "round": 1}, (
        "one of each part"
    )
    rows = [list(read_lines(tmp_path / name / "metrics.jsonl")) for name in ("lied", "offline")]
    for mine, theirs in zip(*rows, strict=True):
        assert mine["validation"] == theirs["validation"]


ASK = {"approve": "ask"}


def test_the_commands_show_and_decide(tiny_folder: Path, tmp_path: Path) -> None:
    own = node(tiny_folder, tmp_path / "kept", limits=ASK)
    file = tmp_path / "node.yaml"
    file.write_text(yaml.safe_dump({**own.model_dump(mode="json", exclude={"key", "authority"})}))
    hostile: dict[str, Any] = {**values(tiny_folder)}
    hostile["data"] = {**hostile["data"], "labels": [*hostile["data"]["labels"], "\x1b[31mred"]}
    introduced(NodeService(own), hostile)
    runner = CliRunner(env={"COLUMNS": "140", "TERM": "dumb"})
    shown = runner.invoke(get_program(), ["approve", str(file), "--settings"])
    assert shown.exit_code == 0, shown.output
    words = ["fedit", "waits for fedspan approve", "local_steps", "secure aggregation", "lora_alpha"]
    for word in [*words, "columns             text, label"]:
        assert word in shown.output
    assert "\x1b" not in shown.output
    (request,) = Approvals(tmp_path / "kept", AuditLog(tmp_path / "kept" / AUDIT)).list_requests()
    assert runner.invoke(get_program(), ["approve", str(file), "0" * 64]).exit_code == 2
    assert runner.invoke(get_program(), ["approve", str(file), "--refuse"]).exit_code == 2
    decided = runner.invoke(get_program(), ["approve", str(file), request.job[:6]])
    assert decided.output.startswith(f"approved job {request.job[:16]}")
    again = runner.invoke(get_program(), ["approve", str(file)])
    assert again.output == f"job {request.job[:16]}  approved, requested {request.requested_at}\n"
    audited = runner.invoke(get_program(), ["audit", str(tmp_path / "kept")])
    assert audited.exit_code == 0
    assert "job approved" in audited.output
    assert "2 entries, head " in audited.output
    assert "\x1b" not in audited.output


def age(folder: Path, seconds: float) -> None:
    moment = time.time() - seconds
    os.utime(folder / "heartbeat", (moment, moment))


def call(path: Path, *options: str) -> Any:
    return CliRunner().invoke(get_program(), ["health", str(path), *options])


def test_a_heartbeat_that_is_too_old_is_a_problem(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    path = tmp_path / "node.yaml"
    path.write_text(yaml.safe_dump({"id": "a", "server": "h:1", "data": {"train": "own.csv"}, "folder": str(folder)}))
    assert "has not started" in (find_problem(folder) or "")
    assert call(path).exit_code == 1
    Heartbeat(folder).renew()
    assert call(path).exit_code == 0
    assert "healthy: waiting for orders, 0 s ago" in call(path).output
    age(folder, 1000)
    found = call(path)
    assert found.exit_code == 1
    assert "unhealthy: no progress for 1000 s, and at most 900 s are allowed (last: waiting for orders)" in found.output
    assert call(path, "--within", "2000").exit_code == 0


def test_a_line_for_everything_and_an_end_with_0(call: Call, tmp_path: Path) -> None:
    result = call("doctor", "--folder", tmp_path / "not" / "there")
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    for what in (
        "fedspan",
        "extra flower",
        "extra privacy",
        "accelerator",
        "memory",
        "disk",
        "port",
        "demo model",
        "hub",
    ):
        assert what in shown
    assert f"torch {version('torch')}" in shown
    found = json.loads(call("doctor", "--json").stdout)
    assert {one["state"] for one in found} <= {"ok", "note"}
    assert "extra dev" not in {one["name"] for one in found}


def test_a_package_that_is_missing_or_old(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(name: str) -> str:
        if name in ("opacus", "ray"):
            raise PackageNotFoundError
        return {"peft": "0.1.0"}.get(name) or version(name)

    monkeypatch.setattr(doctor, "version", other)
    result = call("doctor", "--json")
    found = {one["name"]: one for one in json.loads(result.stdout)}
    assert result.exit_code == 1
    assert found["fedspan"]["state"] == "missing"
    assert "peft is 0.1.0, not " in found["fedspan"]["finding"]
    assert found["fedspan"]["advice"] == "pip install fedspan"
    assert found["extra cluster"]["finding"] == "ray is not installed"
    assert found["extra privacy"] == {
        "name": "extra privacy",
        "state": "note",
        "finding": "opacus is not installed",
        "advice": "pip install 'fedspan[privacy]'",
    }


def test_a_port_that_is_taken_and_a_folder_that_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setattr(doctor, "_PORT", taken.getsockname()[1])
        check = {one.name: one for one in doctor.run_checks(tmp_path)}["port"]
    assert (check.state, "is taken" in check.finding) == ("note", True)
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert {one.name: one for one in doctor.run_checks(tmp_path)}["disk"].state == "missing"


@pytest.fixture
def prepared_server(tmp_path: Path) -> Any:
    return servers.prepare_folder(tmp_path / "server", 9092, [], insecure=True)


@pytest.fixture
def fingerprint(call: Callable[..., Any], tmp_path: Path) -> str:
    """The fingerprint that the data owner is shown with its new key."""
    output = call("join", "--new-key", tmp_path / "node.key").output
    (word,) = (word for word in output.split() if word.startswith("SHA256:"))
    return word


def test_the_fingerprint_is_shown_to_be_compared(
    call: Callable[..., Any], prepared_server: Any, fingerprint: str, tmp_path: Path
) -> None:
    key = tmp_path / "node.key.pub"
    result = call("admit", key, "--as", "a", "--server", tmp_path / "server")
    assert result.exit_code == 0, result.output
    assert fingerprint in result.output
    assert "by telephone" in result.output
    if (keygen := shutil.which("ssh-keygen")) is not None:
        listed = subprocess.run([keygen, "-l", "-f", str(key)], capture_output=True, text=True, check=True)
        assert listed.stdout.split()[1] == fingerprint


def test_another_key_is_refused_before_it_is_admitted(
    call: Callable[..., Any], prepared_server: Any, fingerprint: str, tmp_path: Path
) -> None:
    call("join", "--new-key", tmp_path / "swapped.key")
    options = ("--as", "a", "--fingerprint", fingerprint, "--server", tmp_path / "server")
    result = call("admit", tmp_path / "swapped.key.pub", *options)
    assert result.exit_code == 2
    assert "nobody was admitted" in result.output + result.stderr
    assert admissions.read_admissions(prepared_server) == {}
    (tmp_path / "other.pub").write_text("no key")
    assert call("admit", tmp_path / "other.pub", *options).exit_code == 2
    assert admissions.read_admissions(prepared_server) == {}
    assert call("admit", tmp_path / "node.key.pub", *options).exit_code == 0
    assert [one.name for one in admissions.read_admissions(prepared_server).values()] == ["a"]
