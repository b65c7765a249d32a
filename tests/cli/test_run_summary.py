"""The last screen of a run: its table of scores."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedspan.cli.run_summary import show_report
from fedspan.runs.model_card import RunReport

TEST: Mapping[str, Any] = {"accuracy": 0.75, "worst": {"client": "north", "accuracy": 0.5}}


def read_screen(scores: Mapping[str, Any]) -> list[str]:
    report = RunReport("FedIT", "sequence-classification", "accuracy", 3, 2, scores, {}, {"down": 0, "up": 0}, 1.0)
    out = io.StringIO()
    show_report(Console(file=out, width=80), report, Path("runs/first"))
    return [line.strip() for line in out.getvalue().splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("scores", "columns", "cells"),
    [
        ({"test": TEST, "validation": {"accuracy": 0.8}}, ["held-out", "held-out"], ["75.0%", "north", "50.0%"]),
        ({"clients": TEST}, ["client", "tests", "client", "tests"], ["75.0%", "north", "50.0%"]),
        ({"validation": {"accuracy": 0.8}}, ["validation"], ["80.0%"]),
    ],
)
def test_scores_are_those_of_tests_or_else_of_validation(
    scores: Mapping[str, Any], columns: list[str], cells: list[str]
) -> None:
    lines = read_screen(scores)
    assert lines[0].split() == columns
    assert next(line for line in lines if line.startswith("FedIT")).split()[1:] == cells


def test_without_scores_there_is_a_sentence_and_no_table() -> None:
    lines = read_screen({})
    assert lines[0] == "no scores were measured"
    assert not any(line.startswith("FedIT") for line in lines)
