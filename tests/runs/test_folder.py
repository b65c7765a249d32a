"""The run folder: what it refuses, who may use it, and files that are whole or absent."""

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fedspan
from fedspan.deployment.status import read_status
from fedspan.errors import FedspanError
from fedspan.reports.run_data import read_runs
from fedspan.run_folder import RunFolder, describe_missing_run, suggest_folder
from fedspan.runs.report import read_report

CONFIG = "seed: 1  # ключ\n"


def test_a_new_folder_is_made_with_its_parents_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er run"
    with RunFolder.create(path, CONFIG) as run:
        assert run.read_config_text() == CONFIG
    with RunFolder.resume(path) as again:
        assert again.read_config_text() == CONFIG


def test_what_a_killed_creation_leaves_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text("1\nelsewhere\n")
    (tmp_path / "config.yaml.tmp-77").write_text("seed")
    with RunFolder.create(tmp_path, CONFIG) as run:
        assert sorted(file.name for file in run.path.iterdir()) == ["config.yaml", "run.lock"]


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, CONFIG).close()
    with pytest.raises(
        FedspanError, match=r"already holds a run. Choose another folder, or continue this run with --resume"
    ):
        RunFolder.create(tmp_path, "seed: 2\n")
    assert RunFolder(tmp_path).read_config_text() == CONFIG


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(FedspanError, match=r"thesis\.tex"):
        RunFolder.create(tmp_path, CONFIG)
    with pytest.raises(FedspanError, match="Leave --resume out"):
        RunFolder.resume(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_similar_folder_is_suggested(tmp_path: Path) -> None:
    for name, file in (("first", "config.yaml"), ("frist-notes", "notes.txt"), ("export", "fedspan.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    missing, meant = tmp_path / "firsst", tmp_path / "first"
    described = f"there is no folder {str(missing)!r}. Did you mean {str(meant)!r}?"
    assert describe_missing_run(missing) == described
    for read in (RunFolder.resume, read_report, read_status, lambda path: read_runs([path]), fedspan.diagnose):
        with pytest.raises(FedspanError, match=re.escape(described)):
            read(missing)
    with pytest.raises(FedspanError, match=re.escape(f"Did you mean {str(tmp_path / 'export')!r}? Expected a run")):
        fedspan.predict(tmp_path / "exprt", ["word1"])
    assert suggest_folder(tmp_path / "frist-notes") == ""
    assert suggest_folder(tmp_path / "no" / "first") == ""


LOCK_HOLDER = """
import sys
from fedspan.run_folder import (RunFolder)
with RunFolder.resume(sys.argv[1]):
    print("holding", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, CONFIG).close()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", LOCK_HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as other:
        assert other.stdout.readline() == "holding\n"
        with pytest.raises(FedspanError, match=f"process {other.pid} is working on this run"):
            RunFolder.resume(tmp_path)
        with pytest.raises(FedspanError, match="is working on this run"):  # being refused costs the holder no lock
            RunFolder.resume(tmp_path)
        other.send_signal(signal.SIGTERM if os.name == "nt" else signal.SIGKILL)
    RunFolder.resume(tmp_path).close()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"x\ny\n"])
def test_a_lock_holder_that_left_no_name(tmp_path: Path, content: bytes) -> None:
    with RunFolder.create(tmp_path, CONFIG) as run:
        run.lock.write_bytes(content)
        with pytest.raises(FedspanError, match="another process is working on this run"):
            RunFolder.resume(tmp_path)


def test_a_lock_holder_on_another_machine(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, CONFIG) as run:
        run.lock.write_text("12\nhospital-3\n")
        with pytest.raises(FedspanError, match="process 12 on hospital-3"):
            RunFolder.resume(tmp_path)


def test_a_failed_creation_gives_the_lock_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refusing(errno.ENOSPC))
        with pytest.raises(FedspanError, match=r"the disk is full\. Choose another folder"):
            RunFolder.create(tmp_path, CONFIG)
    RunFolder.create(tmp_path, CONFIG).close()


def refusing(code: int) -> Callable[..., None]:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.mark.parametrize("step", ["write", "fsync"])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    with RunFolder.create(tmp_path, CONFIG) as run:
        run.write_json(run.report, {"score": 1})
        with monkeypatch.context() as patch:
            patch.setattr(os, step, refusing(errno.ENOSPC))
            with pytest.raises(FedspanError, match=r"the disk is full\. The last finished round is intact") as caught:
                run.write_json(run.report, {"score": 2})
        assert str(tmp_path) in str(caught.value)
        assert run.read_json(run.report) == {"score": 1}
        assert not list(tmp_path.glob("*.tmp-*"))


def test_json_files_are_strict(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, CONFIG) as run:
        run.write_json(
            run.report, {"loss": float("nan"), "bound": [float("inf"), -1.5], "by_round": {3: (1, 2)}, "s": "é"}
        )
        assert run.read_json(run.report) == {"loss": None, "bound": [None, -1.5], "by_round": {"3": [1, 2]}, "s": "é"}
        with pytest.raises(TypeError):
            run.write_json(run.report, {"tensor": torch.ones(1)})


@pytest.mark.parametrize("content", [b"\xff", b"{", b"[" * 100_000, None])
def test_json_files_that_cannot_be_read_are_named(tmp_path: Path, content: bytes | None) -> None:
    run = RunFolder(tmp_path)
    if content is not None:
        run.partition.write_bytes(content)
    with pytest.raises(FedspanError, match=r"partition\.json"):
        run.read_json(run.partition)
