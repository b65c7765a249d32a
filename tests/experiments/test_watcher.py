"""What watches a series: one view of all runs of a comparison."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

import fedspan
from fedspan.experiments.series import Step
from fedspan.experiments.watcher import Watcher
from helpers import tiny


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_comparison_shows_one_view_of_all_its_runs(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal, finished = _Terminal(), list[str]()
    monkeypatch.setattr("sys.stderr", terminal)

    class Own(Watcher):
        def on_run_finish(self, step: Step, metric: str, value: float | None, seconds: float, is_new: bool) -> None:
            finished.append(step.name)

    values = tiny.settings(tiny_folder, federation={"rounds": 1})
    fedspan.compare(values, tmp_path / "two", ["fedit", "rolora"], seeds=[0], listener=Own())
    assert finished == ["fedit-seed0", "rolora-seed0"]
    assert "2 runs in 0:" in terminal.getvalue()
    assert "rounds in" not in terminal.getvalue(), "the runs have no bars of their own"
    terminal.truncate(0)
    fedspan.compare(values, tmp_path / "two", ["fedit", "rolora"], seeds=[0], progress=False)
    assert terminal.getvalue() == ""
