"""Runs submitted to a server with nodes as processes: starting them, and waiting for what they do."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from .stage import Deployment, build_command, build_environment


def rounds(run: Path) -> list[dict[str, Any]]:
    """The rows that a run has written of its rounds so far."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_round(run: Path, number: int, process: subprocess.Popen[str]) -> None:
    """Wait until so many rounds of a run that a process makes have ended."""
    until = time.monotonic() + 240
    while len(rounds(run)) < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


def submitted(made: Deployment, config: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    """A process that submits a run to the deployment's server, or resumes one."""
    arguments = ("submit", *options, "--server", str(made.server))
    if "--resume" not in options:
        arguments = ("submit", str(config), "--out", str(out), *options, "--server", str(made.server))
    return subprocess.Popen(
        build_command(*arguments), env=build_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], made: Deployment) -> str:
    """What a process has printed in the end, which must be a good one."""
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said + made.logs()
    return said


def was_asked_twice(made: Deployment, site: str) -> bool:
    """Whether a node got an order of the last run twice: the same one, or, if it was away too long, another attempt."""
    rows = [json.loads(line) for line in (made.folder / f"{site}-state" / "audit.jsonl").read_text().splitlines()]
    asked = [(row["run"], row["round"]) for row in rows if row["event"] == "asked" and row.get("task") == "train"]
    return any(asked.count(one) == 2 for one in asked if one[0] == asked[-1][0])
