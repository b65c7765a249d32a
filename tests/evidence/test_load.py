"""The load with a few nodes, and what it makes of the memory after each round."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the extra fedspan[deploy] is not installed")

from evidence.regression import load


def test_few_rounds_are_judged_by_the_growth_per_node_and_round() -> None:
    measured = [310.5, 315.9, 312.9, 317.2, 318.7, 314.4, 316.8, 318.5]  # 200 nodes, on a machine with 2 cores
    assert load.compare_memory(measured, 200) == ("316, 318", "+2.6 kB", True)
    steps = [200.0, 250.0, *(250.0 + 200 * step * load.BODY / load.MIB for step in range(1, 4))]
    sizes, growth, flat = load.compare_memory(steps, 200)
    assert (sizes, growth, flat) == ("250, 259", "+16.4 kB", False)  # one message of each node is kept in each round
    assert load.compare_memory([200.0, 250.0, 250.0, 290.0, 250.0, 250.0, 250.0], 200)[2]  # one out of line


def test_many_rounds_are_judged_from_the_tenth_on() -> None:
    early = [100.0 + 10 * number for number in range(10)]
    assert load.compare_memory([*early, *[199.0] * 10], 3) == ("190, 199", "+4.7%", True)
    assert load.compare_memory([*early, *[200.0] * 10], 3)[1:] == ("+5.3%", False)
    assert load.compare_memory(early[:4], 3)[1:] == ("", None)  # too few rounds


@pytest.mark.slow
def test_the_page_has_all_tables(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    sizes = ["--load", "2", "5", "--processes", "1", "--megabytes", "0"]
    command = [sys.executable, "-m", "evidence.regression.load", *sizes, "--page", str(tmp_path / "page.md")]
    subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    page = (tmp_path / "page.md").read_text()  # memory is judged, too, and two nodes are few for that
    assert "| 2 | 5 | 0 of 10 |" in page
    assert "| 2 | 2 and 5 |" in page
    assert "--load 2 5 --megabytes 0`" in page
