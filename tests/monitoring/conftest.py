"""The folder of a run, and what the page shows of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from helpers.written_run import PretendRun


@pytest.fixture
def pretend_run(tmp_path: Path) -> PretendRun:
    """A run whose files are written without training."""
    from helpers.written_run import PretendRun

    return PretendRun(tmp_path / "first")


@pytest.fixture
def collect(pretend_run: PretendRun) -> Callable[[], dict[str, Any]]:
    """The state of the pretend run, as ``fedspan watch`` serves it."""
    from fedspan.monitoring.run_monitor import RunMonitor, build_page_state

    monitor = RunMonitor(pretend_run.folder.path)
    return lambda: build_page_state(monitor)
