"""A server and its nodes as processes of the command line, on this machine."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer.main
import yaml
from click.testing import CliRunner

from fedspan.cli import app

from .ports import free_port

OPEN = {
    **{"models": ["*"], "approve": "auto", "head_statistics": "exact", "statistics_max_length": 2},
    **{"statistics_examples": 1, "class_examples": 1, "min_batch": 1, "train_examples": 1},
    **{"evaluation_examples": 1, "evaluation_epsilon": None},
    **{"runs": 10**6, "run_rounds": 10**6, "rounds": 10**6, "run_evaluations": 10**6, "evaluations": 10**6},
}
"""Limits of a node for runs on made-up data: all that a server asks for, as measured."""
BUSY = 0.2
"""Seconds of a processor after which a node is taken to be in the middle of its training."""


def find_child(pid: int) -> int:
    """Return the process that another process started last."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[-1])


def read_processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def build_command(*arguments: str) -> list[str]:
    """Return the command line of a fedspan command, for a process of its own."""
    return [sys.executable, "-m", "fedspan", *arguments]


def build_environment() -> dict[str, str]:
    """Return the environment of such a process: it imports what this one does, on one thread."""
    path = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "160"}


class Deployment:
    """Processes in a folder; all are ended with it. ``names`` are the server's, beside those of this machine."""

    def __init__(self, folder: Path, *, names: Sequence[str] = (), options: Sequence[str] = ()) -> None:
        self.folder, self.names, self.options = folder, names, options
        self.port = free_port()
        self.server = folder / "server"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "Deployment":
        self.start_server()
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.processes):
            self.end(name, signal.SIGTERM)

    def call(self, *arguments: str, timeout: float = 300, check: bool = True) -> subprocess.CompletedProcess[str]:
        completed = subprocess.run(
            build_command(*arguments), env=build_environment(), capture_output=True, text=True, timeout=timeout
        )
        assert not check or completed.returncode == 0, completed.stdout + completed.stderr + self.logs()
        return completed

    def call_here(self, *arguments: str) -> str:
        """Call a short command in this process, and return its output: a new one would take seconds for imports."""
        result = CliRunner(env=build_environment()).invoke(typer.main.get_command(app), arguments)
        assert result.exit_code == 0, result.output + self.logs()
        return result.output

    def start(self, name: str, *arguments: str, options: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start a command of fedspan, or whatever is given."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                options or build_command(*arguments),
                env=build_environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def end(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """End a process and all that it started."""
        process = self.processes.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def logs(self) -> str:
        logs = [*self.folder.glob("*.log"), *self.server.glob("server.log")]
        return "".join(f"\n--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in logs)

    def wait_for_training(
        self, name: str, used: float = BUSY, seconds: float = 240, *, has_worker: bool = True
    ) -> None:
        """Wait until a node is in the middle of its training: until it has used so much processor time, in seconds."""
        pid, until = self.processes[name].pid, time.monotonic() + seconds
        worker = find_child(pid) if has_worker else pid
        idle = read_processor_seconds(worker)
        while read_processor_seconds(worker) < idle + used:
            assert time.monotonic() < until, f"{name} does not train\n{self.logs()}"
            time.sleep(0.02)

    def wait_for(self, name: str, words: str, seconds: float = 240) -> None:
        until = time.monotonic() + seconds
        while words not in self.log(name):
            assert self.processes[name].poll() is None, self.logs()
            assert time.monotonic() < until, f"{name} did not say {words!r}\n{self.logs()}"
            time.sleep(0.1)

    def start_server(self) -> None:
        options = [f"--name={name}" for name in self.names]
        self.start("server", "server", "--folder", str(self.server), "--port", str(self.port), *options, *self.options)
        self.wait_for("server", "listening on")

    def node_file(self, id: str, data: Path, columns: Mapping[str, str] | None = None, **changes: Any) -> Path:
        """Write a node's file, with a key of its own that the server knows."""
        key = self.folder / f"{id}.key"
        if not key.exists():
            self.call_here("join", "--new-key", str(key))
            self.call_here("admit", f"{key}.pub", "--as", id, "--server", str(self.server))
        values = {
            "id": id,
            "server": f"127.0.0.1:{self.port}",
            "authority": str(self.server / "ca.crt"),
            "key": str(key),
            "folder": str(self.folder / f"{id}-state"),
            "data": {"train": str(data), **(columns or {})},
            "device": "cpu",
            "threads": 1,
            "validation": 0.0,
            "test": 0.0,
            **changes,
            "limits": {**OPEN, **changes.get("limits", {})},
        }
        path = self.folder / f"{id}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    def join(self, id: str, path: Path) -> None:
        self.start(id, "join", str(path))

    def submit(
        self, config: Path, out: Path, *options: str, timeout: float = 300, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        arguments = ("submit", str(config), "--out", str(out), "--server", str(self.server), *options)
        return self.call(*arguments, timeout=timeout, check=check)
