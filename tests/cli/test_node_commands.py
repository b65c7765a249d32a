"""``fedspan approve``, ``audit`` and ``health``: what a data owner's commands show and decide."""

import os
import time
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

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
