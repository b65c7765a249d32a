"""Divergence and models that became worse are reported, in words, where the result is read."""

import io
import json
import re
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import fedspan
from fedspan.cli.run_summary import show_report
from fedspan.deployment.node import NodeService
from fedspan.runs import start
from fedspan.runs.warnings import find_divergence
from helpers import tiny
from helpers.families import others_slow
from helpers.node_service import node, served
from helpers.task_cases import CASES, folders_of


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


def test_small_losses_may_rise_by_a_multiple() -> None:
    assert find_divergence(rows([0.0006, 0.0026], [1.0, 1.0]), "accuracy", 0.1, guess=log(3)) == ()
    assert find_divergence(rows([0.05, 0.12], [1.0, 1.0]), "accuracy", 0.1, guess=log(3)) != ()


def test_divergence_in_the_first_round() -> None:
    """All training losses are those of a diverged model, so they do not rise."""
    (note,) = find_divergence(rows([7e12, 6e12, 5e12]), "accuracy", 0.01, log(3))
    assert "the training loss is 5e+12 in round 3, and that of the untrained model 1.099" in note
    start = {"round": 0, "validation": {"accuracy": 0.5, "loss": 0.3}}
    (note,) = find_divergence([start, *rows([7e12], [0.5])], "accuracy", 0.01)
    assert "that of the untrained model 0.3" in note
    assert find_divergence([start, *rows([0.9], [0.5])], "accuracy", 0.01) == ()  # an average over the round
    assert find_divergence(rows([3.0, 2.9]), "accuracy", 0.01, log(3)) == ()


def test_a_worse_model_than_the_untrained_one_is_reported() -> None:
    """The training loss falls in all rounds, as the first one already diverged."""
    fallen = rows([9.0, 8.5, 8.0], [0.2, 0.2, 0.2])
    assert find_divergence(fallen, "accuracy", 0.01) == ()
    start = {"validation": {"accuracy": 0.5, "loss": 3.0}}
    (note,) = find_divergence(fallen, "accuracy", 0.01, start=start)
    assert "validation accuracy was 50.0% before training and is 20.0% after round 3" in note
    assert "Lower training.lr (now 0.01)" in note
    (note,) = find_divergence(fallen, "loss", 0.01, start=start)
    assert "validation loss was 3 before training and is 8 after round 3" in note
    (note,) = find_divergence(rows([1.0], [0.5], [3.1]), "loss", 0.01, start=start)
    assert "was 3 before training and is 3.1" in note
    assert find_divergence(rows([1.0], [0.5], [3.01]), "loss", 0.01, start=start) == ()  # noise
    improved = rows([2.0, 1.5], [0.6, 0.7])
    assert find_divergence(improved, "accuracy", 0.01, start=start) == ()
    # the untrained model guesses, so that it hides a loss of what the first round has learned
    start = {"validation": {"accuracy": 0.25, "loss": 1.5}}
    (note,) = find_divergence(rows([1.0, 0.5], [0.9, 0.4], [0.6, 1.5]), "accuracy", 0.01, start=start)
    assert "90.0% after round 1 and is 40.0%" in note


@pytest.mark.parametrize(("part", "name"), [("test", "test accuracy"), ("clients", "the clients' test accuracy")])
def test_test_scores_replace_missing_validation_scores(part: str, name: str) -> None:
    good, bad = {"accuracy": 0.9, "loss": 0.3}, {"accuracy": 0.3, "loss": 2.0}
    worse = [{**row, part: scores} for row, scores in zip(rows([0.5, 0.4]), (good, bad), strict=True)]
    (note,) = find_divergence(worse, "accuracy", 0.01)
    assert f"{name} was 90.0% after round 1 and is 30.0% after round 2" in note
    (note,) = find_divergence([{**worse[1]}], "accuracy", 0.01, start={part: good})
    assert f"{name} was 90.0% before training" in note
    unmeasured = [{**row, part: {"accuracy": row[part]["accuracy"]}} for row in worse]  # no loss
    (note,) = find_divergence(unmeasured, "accuracy", 0.01)
    assert "was 90.0% after round 1 and is 30.0%" in note
    unmeasured[1][part] = {"accuracy": 0.85}
    assert find_divergence(unmeasured, "accuracy", 0.01) == ()
    kept = {"validation": {"accuracy": 0.8, "loss": 0.5}}
    assert find_divergence([{**row, **kept} for row in worse], "accuracy", 0.01) == ()


_RATES = {"regression": 1.0, "preference": 1e2, "token-classification": 1e2, "multi-label-classification": 1e2}
"""Rates of SGD at which tasks' tiny models become worse, with finite losses; others are as bad before training."""


@pytest.mark.parametrize("name", others_slow(_RATES, ["regression", "preference"]))
def test_other_tasks_report_divergence_at_once(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    values = CASES[name].settings(folders_of(request, name, tmp_path))
    values["training"] = {**values["training"], "optimizer": "sgd", "max_grad_norm": 0.0, "lr": _RATES[name]}
    values["federation"]["rounds"] = 1
    report = fedspan.run(values, tmp_path / "run")
    assert [sign for sign in report.warnings if f"Lower training.lr (now {_RATES[name]:g})" in sign]


def test_a_resumed_run_knows_the_loss_of_the_untrained_model(tiny_folder: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"optimizer": "sgd", "lr": 30.0, "max_grad_norm": 0.0}
    values = tiny.settings(
        tiny_folder, "deep-bert", training=changes, federation={"rounds": 1}, partition={"validation": 0.2}
    )
    report = fedspan.run(values, tmp_path / "run")
    found = re.search(r"that of the untrained model (\d+\.\d+)", report.warnings[0])
    assert float(found[1]) > round(log(len(tiny.LABELS)), 3)  # measured, and not the loss of a guess
    assert fedspan.run(values, tmp_path / "run", resume=True).warnings == report.warnings


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


def test_a_deployment_reports_divergence_in_its_first_round(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node(tiny_folder, tmp_path / "node"))
    changes: dict[str, Any] = {"optimizer": "sgd", "lr": 300.0, "max_grad_norm": 0.0, "local_steps": 6}
    prepared, _ = served(tiny_folder, service, training=changes, federation={"rounds": 1})
    report = start.run(prepared.config, tmp_path / "run", build=lambda *_: prepared)
    assert f"that of the untrained model {log(len(tiny.LABELS)):.4g}. Lower training.lr" in report.warnings[0]


def test_hidden_and_lost_numbers_are_no_sign() -> None:
    """Losses are null where clients keep them to themselves, and scores where they are not finite."""
    rows = [
        {"round": one, "cohort": ["a"], "loss": None, "validation": {"loss": None, "accuracy": 0.5}} for one in (1, 2)
    ]
    assert find_divergence(rows, "accuracy", 0.1) == ()
    assert find_divergence(rows, "loss", 0.1) == ()
