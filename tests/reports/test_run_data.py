"""Data of runs at work, and of runs whose data are gone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fedspan

pytest.importorskip("plotly", reason="the extra fedspan[report] is not installed")

from helpers.compared_runs import body


def test_a_run_at_work_and_data_that_are_gone(series: Path, tmp_path: Path) -> None:
    run = tmp_path / "<b>run"
    run.mkdir()
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "ledger.jsonl", "partition.json"):
        (run / name).write_bytes((series / "fedit-seed0" / name).read_bytes())
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("corpus.csv", "gone.csv"))
    text = fedspan.report(run, tmp_path / "page.html").read_text()
    assert "after round 3" in text
    assert "Labels by client" not in text
    assert "Singular values" not in text
    assert "<b>run" not in body(text)
    (run / "metrics.jsonl").write_text("")
    text = fedspan.report(run, tmp_path / "page.html").read_text()
    assert "after round 0" in text
    assert "nan" not in re.findall(r"\w+", body(text))
