"""Final scores: of the held-out set, and of the values of a column in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fedspan
from fedspan.runs.callbacks import compute_final_scores
from fedspan.runs.setup import Prepared, prepare
from helpers import tiny


def test_scores_by_value_are_those_of_the_value_s_examples(tiny_folder: Path) -> None:
    made = prepare(tiny.config(tiny_folder, evaluation={"by": "site"}))
    assert made.test is not None
    progress = made.federation.begin()
    final = compute_final_scores(made, progress)
    assert list(final.by_value) == sorted(final.by_value)
    assert set(final.by_value) <= set(tiny.SITES)
    assert len(final.by_value) > 1
    assert np.array_equal(np.sort(np.concatenate([*made.test_parts.values()])), np.arange(len(made.test)))
    predictions = made.engine.predict(made.evaluator.build_job(progress, None), made.test, np.arange(len(made.test)), 3)
    for value, rows in made.test_parts.items():
        expected = made.task.compute_metrics(predictions[rows], made.test, rows.tolist())
        assert final.by_value[value]["accuracy"] == expected["accuracy"]
        assert final.by_value[value]["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert final.by_value[value]["examples"] == len(rows)
    right = sum(row["accuracy"] * row["examples"] for row in final.by_value.values())
    assert right / len(made.test) == pytest.approx(final.scores["test"]["accuracy"])


def test_scores_by_value_of_personal_models_are_means_over_the_clients(tiny_folder: Path) -> None:
    made = prepare(tiny.config(tiny_folder, evaluation={"by": "site"}, method={"name": "local-only"}))
    final = compute_final_scores(made, made.federation.begin())
    assert len(final.by_value) > 1
    for row in final.by_value.values():
        assert set(row["worst"]) == {"client", "accuracy"}
        assert row["worst"]["accuracy"] <= row["accuracy"]


def test_a_report_has_the_scores_by_value(tiny_folder: Path, tmp_path: Path) -> None:
    settings = tiny.settings(tiny_folder, evaluation={"by": "site"}, federation={"rounds": 1})
    report = fedspan.run({**settings, "baselines": ["centralized"]}, tmp_path / "run", progress=False)
    assert report.by_value
    assert set(report.by_value) <= set(tiny.SITES)
    assert set(report.baselines["centralized"]["by_value"]) == set(report.by_value)
    assert fedspan.read_report(tmp_path / "run").by_value == report.by_value


def test_without_the_option_there_are_no_scores_by_value(prepared: Prepared) -> None:
    assert compute_final_scores(prepared, prepared.federation.begin()).by_value == {}
