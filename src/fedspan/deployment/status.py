"""The status of a run, read from its folder while any process may work on it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedspan.config import load_yaml
from fedspan.errors import FedspanError
from fedspan.files import from_json, read_bytes, write_atomic
from fedspan.logs import read_lines
from fedspan.processes import read_process_start
from fedspan.run_folder import RunFolder, describe_missing_run
from fedspan.runs.warnings import count_failures

_NAMED = "run.json"
"""The file in a server's folder that names its newest run."""


@dataclass(frozen=True)
class NamedRun:
    """The newest run of a server."""

    folder: Path
    nodes: Mapping[str, str]


@dataclass(frozen=True)
class RunStatus:
    """The status of a run.

    Args:
        round: The last finished round; 0: none.
        rounds: Number of rounds of the run; None: unknown from its config.
        finished: Time when that round finished, in seconds since 1970; None: no round finished.
        failures: Failures by client (``count_failures``).
        late: Number of rounds, by client, that did not wait for the client's reply.
    """

    state: Literal["at work", "finished", "stopped"]
    round: int
    rounds: int | None
    finished: float | None
    failures: Mapping[str, Mapping[str, Any]]
    late: Mapping[str, int]


def store_named_run(server: Path, run: Path, nodes: Mapping[str, int]) -> None:
    """Record the run of a server for later status requests."""
    content = {"run": str(run.resolve()), "nodes": {id: str(node) for id, node in nodes.items()}}
    write_atomic(server / _NAMED, json.dumps(content).encode())


def load_named_run(server: Path) -> NamedRun | None:
    """Load the newest run of a server; None if there was none or its record is unreadable."""
    try:
        record = from_json(read_bytes(server / _NAMED))
    except (FedspanError, ValueError):
        return None
    match record:
        case {"run": str() as run, "nodes": dict() as nodes}:
            return NamedRun(Path(run), {str(id): str(node) for id, node in nodes.items()})
        case _:
            return None


def read_status(folder: Path) -> RunStatus:
    """Read the status of the run in a folder.

    Raises:
        FedspanError: If no run was started there, or its metrics lines are damaged.
    """
    run = RunFolder(folder)
    if not os.path.isfile(run.config):
        raise FedspanError("run folder", str(folder), problem=describe_missing_run(folder))
    rows = list(read_lines(run.metrics))
    number = rows[-1].get("round") if rows else 0
    late: dict[str, int] = {}
    for row in rows:
        clients = row.get("late")
        for client in clients if isinstance(clients, list) else ():
            late[str(client)] = late.get(str(client), 0) + 1
    round = number if isinstance(number, int) else len(rows)
    state = "finished" if run.report.is_file() else "at work" if is_at_work(run) else "stopped"
    return RunStatus(state, round, _read_rounds(run), _read_finish_time(run, round), count_failures(rows), late)


def _read_rounds(run: RunFolder) -> int | None:
    try:
        return int(load_yaml(run.read_config_text())["federation"]["rounds"])
    except (KeyError, TypeError, ValueError):
        return None


def _read_finish_time(run: RunFolder, round: int) -> float | None:
    """Return the time when a round was committed: its checkpoint is written last and never rewritten."""
    try:
        return (run.checkpoints / f"round-{round:05}").stat().st_mtime
    except OSError:
        return None


def is_at_work(run: RunFolder) -> bool:
    """Check whether the process that a run's lock names is alive; a process on another machine is assumed to be.

    A process that has the same id, but another start, is not that of the run.
    """
    try:
        pid, host, *rest = run.lock.read_text().split("\n")
        if host != socket.gethostname():
            return True
        os.kill(int(pid), 0)
        recorded, actual = rest[0] if rest else "", read_process_start(int(pid))
        if recorded and actual is not None and recorded != str(actual):
            return False
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True
