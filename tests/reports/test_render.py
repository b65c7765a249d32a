"""A page in one file, and what cannot be rendered."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import fedspan
from fedspan import FedspanError
from helpers import tiny

pytest.importorskip("plotly", reason="the extra fedspan[report] is not installed")

from helpers.compared_runs import body


def test_nothing_is_loaded_from_elsewhere(text: str) -> None:
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=[\"'](?!data:)", body(text))
    assert text.count("plotly.js v") == 1


def test_mistakes(series: Path, tiny_folder: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    assert "the folder of a run, or a folder with runs in it" in refused("report", tmp_path)
    other = tmp_path / "other"
    fedspan.run(tiny.config(tiny_folder, evaluation={"metric": "macro_f1"}, federation={"rounds": 1}), other)
    with pytest.raises(
        FedspanError,
        match=r"is judged by accuracy, and other by macro_f1\. Expected runs that are judged by one metric",
    ):
        fedspan.report([series, other], tmp_path / "page.html")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(FedspanError, match=r"`out`: '.*file' cannot be used: File exists\. Choose another file\."):
        fedspan.report(series, blocked / "page.html", data=False)
