"""What a data owner's and an operator's commands show and decide: approvals, keys, audits, health, and doctor."""

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from fedspan.cli import doctor
from fedspan.deployment.approval import Approvals
from fedspan.deployment.audit import AUDIT
from fedspan.deployment.health import Heartbeat, find_problem
from fedspan.deployment.node import NodeService
from fedspan.logs import AuditLog
from helpers.command_line import get_program
from helpers.node_service import introduced, node, values

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


Call = Callable[..., Any]


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


admissions = pytest.importorskip(
    "fedspan.transports.http.admissions", reason="the extra fedspan[deploy] is not installed"
)
servers = pytest.importorskip("fedspan.transports.http.server")


@pytest.fixture
def link(tmp_path: Path) -> Any:
    return servers.prepare_folder(tmp_path / "server", 9092, [], insecure=True)


@pytest.fixture
def fingerprint(call: Callable[..., Any], tmp_path: Path) -> str:
    """The fingerprint that the data owner is shown with its new key."""
    output = call("join", "--new-key", tmp_path / "node.key").output
    (word,) = (word for word in output.split() if word.startswith("SHA256:"))
    return word


def test_the_fingerprint_is_shown_to_be_compared(
    call: Callable[..., Any], link: Any, fingerprint: str, tmp_path: Path
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
    call: Callable[..., Any], link: Any, fingerprint: str, tmp_path: Path
) -> None:
    call("join", "--new-key", tmp_path / "swapped.key")
    options = ("--as", "a", "--fingerprint", fingerprint, "--server", tmp_path / "server")
    result = call("admit", tmp_path / "swapped.key.pub", *options)
    assert result.exit_code == 2
    assert "nobody was admitted" in result.output + result.stderr
    assert admissions.read_admissions(link) == {}
    (tmp_path / "other.pub").write_text("no key")
    assert call("admit", tmp_path / "other.pub", *options).exit_code == 2
    assert admissions.read_admissions(link) == {}
    assert call("admit", tmp_path / "node.key.pub", *options).exit_code == 0
    assert [one.name for one in admissions.read_admissions(link).values()] == ["a"]
