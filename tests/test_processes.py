"""Processes that belong together: children of killed parents, and two processes in one folder."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedspan import processes
from fedspan.errors import FedspanError
from fedspan.processes import hold_folder, read_process_start

CHILD = """
    import os, sys, time
    from functools import partial
    from fedspan.processes import end_with_parent
    end_with_parent(partial(os.read, 0, 1))
    print("started", flush=True)
    time.sleep(600)
"""
WORKER = """
    import sys, time
    from pathlib import Path
    from fedspan.processes import hold_folder, read_process_start
    with hold_folder(Path(sys.argv[1]), "worker", "folder"):
        print("started", flush=True)
        time.sleep(600)
"""


@contextmanager
def start(code: str, *arguments: str) -> Generator[subprocess.Popen[bytes]]:
    """Run a process until the end of the context."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"started\n"
            yield process
        finally:
            process.kill()


def test_a_child_ends_when_the_other_end_of_its_input_is_gone() -> None:
    with start(CHILD) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(30) == 1


def test_a_second_process_is_refused_with_the_first_one_s_id_and_let_in_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_ENDING", 0.2)
    with start(WORKER, str(tmp_path)) as other:
        with (
            pytest.raises(FedspanError, match=rf"process {other.pid} works in .* or stop it: kill {other.pid}"),
            hold_folder(tmp_path, "worker", "folder"),
        ):
            pass
        with hold_folder(tmp_path, "node", "folder"):  # another role
            pass
        other.kill()
    with hold_folder(tmp_path, "worker", "folder"):
        assert (tmp_path / "worker.lock").read_text().startswith(f"{os.getpid()}\n")


def test_a_process_that_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    with start(WORKER, str(tmp_path)) as other:
        os.kill(other.pid, signal.SIGKILL)
        with hold_folder(tmp_path, "worker", "folder"):
            pass


def test_what_a_lock_file_says_is_only_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_ENDING", 0.1)
    for content, name in {"rubbish": "another process", "12\nelsewhere\n": "process 12 on elsewhere"}.items():
        with start(WORKER, str(tmp_path)) as other:
            (tmp_path / "worker.lock").write_text(content)
            with (
                pytest.raises(FedspanError, match=rf"{name} works in .*, or stop it\.?$"),
                hold_folder(tmp_path, "worker", "folder"),
            ):
                pass
            other.kill()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc on this machine")
def test_the_start_of_a_process_is_its_own() -> None:
    start = read_process_start(os.getpid())
    assert start is not None
    process = subprocess.Popen(["sleep", "60"])
    try:
        child = read_process_start(process.pid)
        assert child is not None
        assert start < child <= time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
    finally:
        process.kill()
        process.wait()
    assert read_process_start(process.pid) is None
