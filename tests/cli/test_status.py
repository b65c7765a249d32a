"""``fedspan status`` on a server's nodes and its run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fedspan.deployment.status import store_named_run
from fedspan.logs import JsonLines
from helpers.command_line import get_program

servers = pytest.importorskip("fedspan.transports.flower.server", reason="the extra fedspan[flower] is not installed")


SAID = [
    {"node-id": "11", "status": "online", "online-elapsed": 75.4, "offline-at": "N/A"},
    {"node-id": "12", "status": "offline", "online-elapsed": 9.0, "offline-at": "2026-01-02 03:04:05Z"},
    {"node-id": "13", "status": "registered", "online-elapsed": 0.0, "offline-at": "N/A"},
    {"node-id": "14", "status": "unregistered", "online-elapsed": 0.0, "offline-at": "N/A"},
]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "server"
    servers.prepare_folder(folder, 9092, [], insecure=True)

    def flower(link: Any, *arguments: str) -> dict[str, Any]:
        return {"nodes": SAID}

    monkeypatch.setattr(servers, "call_flower", flower)
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
    for words in ("north", "now, for 1:15", "round 2: no reply within 5 s", "2 of 5, stopped", "--resume", "never"):
        assert words in shown.output
    printed = json.loads(runner.invoke(get_program(), ["status", "--server", str(server), "--json"]).stdout)
    assert [node["client"] for node in printed["nodes"]] == ["north", "south", None]
    assert printed["run"]["round"] == 2
    done = runner.invoke(get_program(), ["status", "--server", str(server), "--run", str(tmp_path)])
    assert done.exit_code == 2
