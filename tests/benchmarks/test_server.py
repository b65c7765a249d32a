"""benchmarks/server.py at a size of seconds: every method that can be measured is, and is judged only at full size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fedspan.methods.registry import METHODS

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "server.py"

WITHOUT_A_ROW = {"fed-sb", "fedavg", "fedhm", "pfedlora", "slora"}
"""Those that send whole weights or gradients, and SLoRA, whose clients draw masks of the whole model."""


def test_every_method_is_measured_or_left_out_for_a_reason(tmp_path: Path) -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}  # other tests run beside it
    sizes = ["--layers", "2", "--size", "24", "--rank", "2", "--clients", "3", "--threads", "1"]
    command = [sys.executable, str(SCRIPT), *sizes, "--page", str(tmp_path / "page.md")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.md").read_text()
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in page.splitlines() if line.startswith("| ")}
    left_out = next(line for line in page.splitlines() if line.startswith("Left out:"))
    for key in METHODS:
        assert (key in rows) != (f"{key} (" in left_out)
    assert set(METHODS) - set(rows) == WITHOUT_A_ROW
    assert "averages" in rows["fedit"]
    assert "60 s" in rows["flora"]
    assert "FAIL" not in page
    assert "pass" not in page
