"""``fedspan report``: its options, and what it prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedspan


def test_options_are_passed_on_and_the_file_is_named(
    call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    def report(runs: list[Path], out: Path, *, diagnostics: bool, data: bool) -> Path:
        calls.append((runs, out, diagnostics, data))
        (tmp_path / "page.html").write_bytes(bytes(2_340_000))
        return tmp_path / "page.html"

    monkeypatch.setattr(fedspan, "report", report)
    result = call("report", "runs/first")
    assert result.exit_code == 0, result.output
    assert "".join(result.output.split()).startswith("wrote" + str(tmp_path / "page.html"))
    assert "(2.3 MB)" in " ".join(result.output.split())
    assert call("report", "a", "b", "--out", "both.html", "--diagnose", "--no-data").exit_code == 0
    assert calls == [
        ([Path("runs/first")], Path("report.html"), False, True),
        ([Path("a"), Path("b")], Path("both.html"), True, False),
    ]


def test_a_run_that_is_missing_is_named(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "there is no folder" in refused("report", tmp_path / "missing", "--out", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
