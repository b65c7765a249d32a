"""Runs of two methods."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def series(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods under two seeds, three rounds each."""
    import fedspan
    from helpers import tiny

    folder = tmp_path_factory.mktemp("pages") / "series"
    values = tiny.settings(tiny_folder, federation={"rounds": 3})
    fedspan.compare(values, folder, ["fedit", "ffa-lora"], [0, 1])
    return folder
