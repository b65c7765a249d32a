"""The folder that a run chooses."""

from __future__ import annotations

from pathlib import Path

from fedspan.cli.live_run import find_unused_folder


def test_run_chooses_a_new_folder(tmp_path: Path) -> None:
    assert find_unused_folder(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    assert find_unused_folder(tmp_path / "demo") == tmp_path / "demo-2"
    (tmp_path / "demo-2").mkdir()
    assert find_unused_folder(tmp_path / "demo") == tmp_path / "demo-3"
