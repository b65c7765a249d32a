"""benchmarks/cluster.py without peers, at a size of seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
def test_the_page_judges_nothing_of_a_quick_try(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra fedspan[cluster] is not installed")
    rows = [f"how do I change the {'limit' if number % 2 else 'address'} {number},{number % 2}" for number in range(96)]
    (tmp_path / "train.csv").write_text("\n".join(["text,category", *rows]) + "\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    places = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--page", str(tmp_path / "page.md")]
    command = [sys.executable, str(BENCHMARKS / "cluster.py"), *places, "--quick"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.md").read_text()
    assert page.count("| not judged |") == 3
    for line in ("| 1 worker, float32 |", "| 2 workers, float32 |", "| 1 |", "| 2 |"):
        assert f"\n{line}" in page
