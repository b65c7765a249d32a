"""Divergence and models that became worse are reported, in words, where the result is read."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import fedspan
from fedspan.cli.run_summary import show_report
from fedspan.runs.divergence import find_divergence
from helpers import tiny


def rows(losses: list[float], accuracies: list[float] = [], scored: list[float] | None = None) -> list[dict[str, Any]]:  # noqa: B006
    """Lines of metrics: training losses, validation accuracies, and validation losses (the training losses)."""
    found: list[dict[str, Any]] = []
    for at, loss in enumerate(losses):
        row: dict[str, Any] = {"round": at + 1, "loss": loss, "cohort": ["a"]}
        if accuracies:
            row["validation"] = {"accuracy": accuracies[at], "loss": (scored or losses)[at]}
        found.append(row)
    return found


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (rows([1.0, 0.5, 0.4]), []),
        (rows([1.0, 1.9]), []),  # cohorts differ
        (rows([1.1, 7e12]), ["Training diverged", "1.1 in round 1", "7e+12 in round 2", "training.lr (now 0.01)"]),
        (rows([1.0, float("nan")]), ["Training diverged", "nan"]),
        (rows([1.0, 0.5], [0.8, 0.9], [0.6, 0.9]), []),  # overconfident, but more often right
        (rows([1.0, 0.5], [0.9, 0.8], [0.6, 0.5]), []),  # a few examples of a small part
        (rows([1.0, 0.5], [0.9, 0.4], [0.6, 1.5]), ["made the model worse", "90.0% after round 1", "40.0% after"]),
        (rows([1.0, 0.5], [0.9, 0.4], [0.6, float("nan")]), ["made the model worse"]),
        ([], []),
    ],
)
def test_signs_of_divergence(made: list[dict[str, Any]], words: list[str]) -> None:
    found = find_divergence(made, "accuracy", 0.01)
    assert bool(found) == bool(words)
    assert [word for word in words if word not in " ".join(found)] == []


def test_divergence_in_the_first_round() -> None:
    """All training losses are those of a diverged model, so they do not rise."""
    (note,) = find_divergence(rows([7e12, 6e12, 5e12]), "accuracy", 0.01, classes=3)
    assert "the training loss is 5e+12 in round 3, and that of the untrained model 1.099" in note
    start = {"round": 0, "validation": {"accuracy": 0.5, "loss": 0.3}}
    (note,) = find_divergence([start, *rows([7e12], [0.5])], "accuracy", 0.01)
    assert "that of the untrained model 0.3" in note
    assert find_divergence([start, *rows([0.9], [0.5])], "accuracy", 0.01) == ()  # an average over the round
    assert find_divergence(rows([3.0, 2.9]), "accuracy", 0.01, classes=3) == ()


def test_a_diverged_run_is_reported_in_the_api_and_on_the_last_screen(tiny_folder: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"optimizer": "sgd", "lr": 30.0, "max_grad_norm": 0.0}
    report = fedspan.run(tiny.settings(tiny_folder, training=changes, federation={"rounds": 3}), tmp_path / "run")
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] > 2 * losses[0]
    assert "Training diverged" in report.warnings[0]
    assert fedspan.read_report(tmp_path / "run").warnings == report.warnings
    out = io.StringIO()
    show_report(Console(file=out, width=80), report, tmp_path / "run")
    assert f"warning: {report.warnings[0]}" in out.getvalue()
    out = io.StringIO()
    show_report(Console(file=out, width=80), replace(report, warnings=()), tmp_path / "run")
    assert "warning" not in out.getvalue()


def test_hidden_and_lost_numbers_are_no_sign() -> None:
    """Losses are null where clients keep them to themselves, and scores where they are not finite."""
    rows = [
        {"round": one, "cohort": ["a"], "loss": None, "validation": {"loss": None, "accuracy": 0.5}} for one in (1, 2)
    ]
    assert find_divergence(rows, "accuracy", 0.1) == ()
    assert find_divergence(rows, "loss", 0.1) == ()
