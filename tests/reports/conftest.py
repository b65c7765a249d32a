"""Runs of two methods, and their page."""

from __future__ import annotations

from pathlib import Path

import pytest

LIMIT = 7_000_000
"""Bytes that a page takes at most: most of them are the library that draws its figures."""


@pytest.fixture(scope="session")
def series(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods under two seeds, three rounds each."""
    import fedspan
    from helpers import tiny

    folder = tmp_path_factory.mktemp("pages") / "series"
    values = tiny.settings(tiny_folder, federation={"rounds": 3})
    fedspan.compare(values, folder, ["fedit", "ffa-lora"], [0, 1])
    return folder


@pytest.fixture(scope="session")
def text(series: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of these runs."""
    import fedspan

    out = fedspan.report(series, tmp_path_factory.mktemp("pages") / "report.html", diagnostics=True)
    assert out.stat().st_size < LIMIT
    return out.read_text(encoding="utf-8")
