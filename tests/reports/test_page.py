"""The page of a run and of a series: every section and figure is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason="the extra fedspan[report] is not installed")

from helpers.compared_runs import body, figures


def test_every_section_is_there_and_every_figure_has_a_place(text: str) -> None:
    own = body(text)
    for title in ("Runs", "Score", "Training loss", "Clients", "Labels by client", "Traffic", "Participation"):
        assert f"<h2>{title}</h2>" in own
    for title in ("Diagnostics", "Singular values of the update", "Configuration"):
        assert f"<h2>{title}</h2>" in own
    made = figures(text)
    assert len(made) == own.count('class="figure"') == 8
    assert all(figure["data"] for figure in made)


def test_the_command(series: Path, tmp_path: Path, call: Callable[..., Any]) -> None:
    result = call("report", series, "--out", tmp_path / "page.html", "--no-data")
    assert result.exit_code == 0, result.output
    assert "wrote" in result.output
    assert "MB)" in result.output
