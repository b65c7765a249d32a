"""benchmarks/server.py on tiny layers: every method has a row or a reason; limits are judged only at full size."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fedspan.methods.registry import METHODS
from helpers.scripts import load_script

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "server.py"
SIZES = ("--layers", "2", "--size", "24", "--rank", "2", "--clients", "3", "--threads", "1")
WITHOUT_A_ROW = {"fed-sb", "fedavg", "fedhm", "pfedlora", "slora"}
"""Those that send whole weights or gradients, and SLoRA, whose clients draw masks of the whole model."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("benchmarks/server.py")


def test_every_method_has_a_row_or_a_reason(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: a process for each method takes seconds to start, and the memory of this one is not judged."""
    monkeypatch.setattr(script, "measure_alone", script.measure)
    monkeypatch.setattr(script, "free_memory", lambda: None)
    monkeypatch.setattr(sys, "argv", ["server.py", *SIZES, "--page", str(tmp_path / "page.md")])
    script.main()
    page = (tmp_path / "page.md").read_text()
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in page.splitlines() if line.startswith("| ")}
    not_measured = next(line for line in page.splitlines() if line.startswith("Not measured:"))
    for key in METHODS:
        assert (key in rows) != (f"{key} (" in not_measured)
    assert set(METHODS) - set(rows) == WITHOUT_A_ROW
    assert "averages" in rows["fedit"]
    assert "60 s" in rows["flora"]
    assert "FAIL" not in page
    assert "pass" not in page


@pytest.mark.slow
def test_a_method_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, str(SCRIPT), *SIZES, "--methods", "fedit", "flora", "--page", str(tmp_path / "page.md")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith(("| fedit", "| flora"))]
    assert len(rows) == 2
    assert all(row.endswith("| not judged |") for row in rows)
