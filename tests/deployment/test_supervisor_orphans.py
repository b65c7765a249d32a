"""A node that is killed leaves no process that trains on."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from fedspan import processes
from fedspan.deployment import deploy
from fedspan.deployment.node_folder import WORKER
from fedspan.errors import FedspanError
from fedspan.processes import hold_folder

NODE = """
    import sys
    from pathlib import Path
    from fedspan.deployment.supervisor import Supervisor
    if __name__ == "__main__":
        supervisor = Supervisor(Path(sys.argv[1]), 600)
        line = supervisor._connect()
        print(supervisor._process.pid, flush=True)
        supervisor._wait(line, 600)
"""


def write_node(folder: Path) -> Path:
    node = {"id": "a", "server": "h:1", "data": {"train": "own.csv"}, "folder": str(folder / "state")}
    (folder / "node.yaml").write_text(yaml.safe_dump(node))
    (folder / "state").mkdir(mode=0o700)
    return folder / "node.yaml"


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.slow  # starts processes that import torch
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")
def test_the_process_that_trains_ends_with_a_killed_node(tmp_path: Path) -> None:
    script = tmp_path / "node.py"
    script.write_text(textwrap.dedent(NODE))
    command = [sys.executable, str(script), str(write_node(tmp_path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as node:
        assert node.stdout is not None
        child = int(node.stdout.readline())
        lock = tmp_path / "state" / f"{WORKER}.lock"
        until = time.monotonic() + 120
        while not lock.exists():  # it trains in the folder
            assert is_running(child)
            assert time.monotonic() < until
            time.sleep(0.05)
        os.kill(node.pid, signal.SIGKILL)
        node.wait()
    try:
        until = time.monotonic() + 10
        while is_running(child):
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("role", ["node", WORKER])
def test_a_second_node_does_not_start_in_the_folder(role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_node(tmp_path)
    monkeypatch.setattr(processes, "_ENDING", 0.1)
    with (
        hold_folder(tmp_path / "state", role, "folder"),
        pytest.raises(FedspanError, match=rf"process {os.getpid()} works in .* as its {role}.*kill {os.getpid()}"),
    ):
        deploy.join(path, insecure=True)
