"""``fedspan health``: its exit status and its words."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from fedspan.deployment.health import Heartbeat, find_problem
from helpers.command_line import get_program


def age(folder: Path, seconds: float) -> None:
    """Make a heartbeat older."""
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
