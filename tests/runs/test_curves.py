"""The curve of a run."""

from __future__ import annotations

from pathlib import Path

import fedspan
from fedspan.runs.curves import read_curve
from fedspan.runs.folder import RunFolder
from helpers import tiny


def test_a_run_s_curve_is_its_metrics_and_its_ledger(tiny_folder: Path, tmp_path: Path) -> None:
    report = fedspan.run(tiny.config(tiny_folder, evaluation={"every": 2}, federation={"rounds": 3}), tmp_path / "run")
    curve = read_curve(RunFolder(tmp_path / "run"), report.metric)
    assert [point.round for point in curve] == [2, 3]
    assert curve[-1].bytes == report.bytes["down"] + report.bytes["up"]
    assert 0 < curve[0].bytes < curve[-1].bytes
    assert 0 < curve[0].seconds < curve[1].seconds
