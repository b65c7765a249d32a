"""``fedspan run`` that is killed or stopped with Ctrl-C continues with ``--resume`` to the very same adapter."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from fedspan.progress.view import RunView
from fedspan.run_folder import RunFolder


@pytest.fixture(scope="module")
def config(write: Callable[..., Path]) -> Path:
    return write(federation={"rounds": 8}, training={"optimizer_state": "keep"}, evaluation={"every": 2})


def adapter(folder: Path) -> bytes:
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


def test_ctrl_c_between_rounds_says_how_to_continue(
    config: Path, call: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, folder, finished = tmp_path / "whole", tmp_path / "my run", RunView.on_round_finish
    rounds = ("--set", "federation.rounds=4")
    assert call("run", config, *rounds, "--out", whole).exit_code == 0

    def interrupt(self: RunView, row: Mapping[str, Any]) -> None:
        finished(self, row)
        if row["round"] == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunView, "on_round_finish", interrupt)
        stopped = call("run", config, *rounds, "--out", folder)
    assert stopped.exit_code == 130, stopped.output
    done = int(stopped.stderr.partition("stopped; ")[2].partition(" of 4 rounds are saved")[0])
    assert done in (2, 3)
    assert stopped.stderr.endswith(f"Resume with:\n  fedspan run --resume '{folder}'\n")
    resumed = call("run", "--resume", folder)
    assert resumed.exit_code == 0, resumed.output
    assert f"resumed after round {done} of 4" in resumed.output
    assert adapter(folder) == adapter(whole)


@pytest.mark.slow
def test_killed_at_moments_spread_over_a_run(config: Path, call: Callable[..., Result], tmp_path: Path) -> None:
    """The interpreter itself is killed: while loading, and after so many rounds."""
    folder, metrics = tmp_path / "run", RunFolder(tmp_path / "run").metrics
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}

    def start() -> subprocess.Popen[bytes]:
        begun = (folder / "config.yaml").exists()
        what = ["--resume", str(folder)] if begun else [str(config), "--out", str(folder)]
        return subprocess.Popen([sys.executable, "-m", "fedspan", "run", *what], env=environment)

    for round in (0, 2, 5):
        with start() as process:
            while process.poll() is None and (metrics.read_bytes() if metrics.exists() else b"").count(b"\n") < round:
                time.sleep(0.02)
            time.sleep(0.1)
            process.kill()
    with start() as process:
        assert process.wait() == 0
    assert call("run", config, "--out", tmp_path / "whole").exit_code == 0
    assert adapter(folder) == adapter(tmp_path / "whole")
