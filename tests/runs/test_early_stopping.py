"""Early stopping: when a run ends, what it reports, and that an interrupted run ends like one that was not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import fedspan
from fedspan.config import RunConfig, parse_config
from fedspan.errors import FedspanError
from fedspan.federation.evaluation import ClientScores, Evaluator
from fedspan.federation.progress import Progress
from fedspan.federation.trimmed_scores import compute_trimmed_means
from fedspan.runs import selection
from fedspan.runs.callbacks import Listener
from fedspan.runs.selection import Best, has_stalled
from helpers import tiny

SCORES = {1: 0.2, 2: 0.5, 3: 0.4, 4: 0.1, 5: 0.3, 6: 0.9}


class Notes(Listener):
    """Records notes; interrupts after a round if asked to."""

    def __init__(self, stop: int | None = None) -> None:
        self.notes: list[str] = []
        self.stop = stop

    def on_note(self, text: str) -> None:
        self.notes.append(text)

    def on_round_finish(self, row: Any) -> None:
        if row["round"] == self.stop:
            raise KeyboardInterrupt


def run_with_reports(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    out: Path,
    *rounds: dict[str, float],
    early_stopping: int | None = None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run with scripted reports of the clients; return the lines of metrics and the notes."""

    def evaluate_clients(evaluator: Evaluator, progress: Progress) -> tuple[ClientScores | None, None]:
        if not (accuracies := rounds[progress.state.round - 1]):
            return None, None
        rows = {id: {"accuracy": one, "loss": 1 - one, "examples": 8.0} for id, one in accuracies.items()}
        pooled = {name: fmean(row[name] for row in rows.values()) for name in ("accuracy", "loss")}
        return ClientScores(pooled, rows, compute_trimmed_means(rows, pooled)), None

    notes = Notes()
    monkeypatch.setattr(Evaluator, "evaluate_clients", evaluate_clients)
    settings = tiny.settings(folder, federation={"rounds": len(rounds), "early_stopping": early_stopping})
    fedspan.run(settings, out, listener=notes)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()], notes.notes


def test_the_logged_means_are_those_that_decide(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, tmp_path: Path
) -> None:
    """A silent client counts with its last metrics, so the mean over the round's own clients would mislead a reader."""
    rounds = [{"a": 0.8, "b": 0.7, "c": 0.1}, {"a": 0.75, "b": 0.65}, {"a": 0.8, "b": 0.7, "c": 0.6}]
    rows, notes = run_with_reports(monkeypatch, tiny_folder, tmp_path / "run", *rounds)
    assert [row["validation_trimmed"]["accuracy"] for row in rows] == pytest.approx([0.7, 0.65, 0.7])
    assert rows[1]["validation"]["accuracy"] == pytest.approx(0.7)
    ranks = [(row["validation_trimmed"]["accuracy"], -row["validation_trimmed"]["loss"]) for row in rows]
    for count, row in enumerate(rows, 1):
        assert row["best_round"] == 1 + max(range(count), key=lambda index: (*ranks[index], index))
    assert not any("nodes sent validation metrics" in note for note in notes)


def test_a_note_names_the_number_of_clients_that_sent_metrics(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, tmp_path: Path
) -> None:
    rounds = [{"a": 0.8, "b": 0.7}, {"a": 0.5, "b": 0.4}, {"a": 0.4, "b": 0.3, "c": 0.3}, {"a": 0.2, "b": 0.1}]
    rows, notes = run_with_reports(monkeypatch, tiny_folder, tmp_path / "run", *rounds)
    assert [row.get("best_round") for row in rows] == [None, None, 3, 3]  # too few clients select none
    assert ["validation_trimmed" in row for row in rows] == [False, False, True, True]
    (note,) = [note for note in notes if "nodes sent validation metrics" in note]
    assert re.match(r"only 2 of \d+ nodes sent", note)
    rows, notes = run_with_reports(monkeypatch, tiny_folder, tmp_path / "none", {}, {}, {}, early_stopping=1)
    assert len(rows) == 3
    assert len([note for note in notes if note.startswith("only 0 of ")]) == 1


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the rounds of every run the scores above."""

    def rate(metric: str, number: int, validation: Any) -> Best:
        return Best(SCORES[number], 0.0, number)

    monkeypatch.setattr(selection, "rate_round", rate)


def values(folder: Path, **changes: Any) -> dict[str, Any]:
    federation = {"rounds": 6, "early_stopping": 2, **changes.pop("federation", {})}
    return tiny.settings(folder, federation=federation, **changes)


def config(folder: Path, every: int) -> RunConfig:
    return parse_config(values(folder, federation={"early_stopping": 3}, evaluation={"every": every}))


def test_a_run_has_stalled_after_as_many_evaluated_rounds_without_a_better_one(tiny_folder: Path) -> None:
    each, third, second = config(tiny_folder, 1), config(tiny_folder, 2), Best(0.5, 0.0, 2)
    stalled = [has_stalled(each, number, second) for number in (2, 3, 4, 5, 6)]
    assert stalled == [False, False, False, True, True]
    stalled = [has_stalled(third, number, second) for number in (4, 5, 6)]
    assert stalled == [False, False, True]  # round 5 is not evaluated
    assert not has_stalled(each, 9, None)
    assert not has_stalled(parse_config(tiny.settings(tiny_folder)), 9, Best(0.5, 0.0, 1))


@pytest.mark.usefixtures("scored")
def test_a_run_stops_and_exports_its_best_round(tiny_folder: Path, tmp_path: Path) -> None:
    listener = Notes()
    report = fedspan.run(values(tiny_folder), tmp_path / "run", listener=listener)
    assert (report.rounds, report.best_round) == (4, 2)
    expected = "the validation score has not improved since round 2 (federation.early_stopping)"
    assert listener.notes[-1] == f"stopped after round 4: {expected}"
    patient = fedspan.run(values(tiny_folder, federation={"early_stopping": 4}), tmp_path / "patient")
    assert (patient.rounds, patient.best_round) == (6, 6)


@pytest.mark.usefixtures("scored")
def test_the_note_names_the_loss_where_it_decides(tiny_folder: Path, tmp_path: Path) -> None:
    listener = Notes()
    fedspan.run(values(tiny_folder, evaluation={"best_by": "loss"}), tmp_path / "run", listener=listener)
    expected = "the validation loss has not fallen since round 2 (federation.early_stopping)"
    assert f"stopped after round 4: {expected}" in listener.notes


@pytest.mark.slow
@pytest.mark.usefixtures("scored")
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_an_interrupted_run_stops_at_the_same_round(stop: int, tiny_folder: Path, tmp_path: Path) -> None:
    whole = fedspan.run(values(tiny_folder), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(values(tiny_folder), tmp_path / "cut", listener=Notes(stop))
    resumed = fedspan.resume(tmp_path / "cut")
    assert (resumed.rounds, resumed.best_round, resumed.scores) == (whole.rounds, whole.best_round, whole.scores)
    assert fedspan.resume(tmp_path / "cut") == resumed


def test_it_needs_validation_parts(tiny_folder: Path) -> None:
    partition = {**values(tiny_folder)["partition"], "validation": 0.0}
    with pytest.raises(FedspanError, match=r"partition\.validation") as refused:
        parse_config({**values(tiny_folder), "partition": partition})
    assert refused.value.field == "federation.early_stopping"


@pytest.mark.slow
def test_rounds_can_be_compared_by_the_validation_loss(tiny_folder: Path, tmp_path: Path) -> None:
    def run(name: str, **evaluation: Any) -> tuple[int, list[dict[str, Any]]]:
        given = tiny.settings(tiny_folder, federation={"rounds": 8}, training={"lr": 0.3}, evaluation=evaluation)
        report = fedspan.run(given, tmp_path / name)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return report.best_round, [json.loads(line) for line in lines]

    best, rows = run("loss", best_by="loss")
    assert best == max((-row["validation"]["loss"], row["round"]) for row in rows)[1]
    by_accuracy, rows = run("metric")
    assert (
        by_accuracy == max((row["validation"]["accuracy"], -row["validation"]["loss"], row["round"]) for row in rows)[2]
    )
    config = parse_config(tiny.settings(tiny_folder, evaluation={"best_by": "loss"}))
    assert config.evaluation.get_selection_metric("accuracy") == "loss"
    assert parse_config(tiny.settings(tiny_folder)).evaluation.get_selection_metric("accuracy") == "accuracy"
