"""The table of plain tools: heads that are the regression's, results that are computed once, and its rows."""

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

from evidence.pages import outside_reference
from evidence.pages.subsets import Cell


@pytest.mark.parametrize("classes", [2, 3])
def test_a_warm_head_predicts_as_the_regression(classes: int) -> None:
    rng = np.random.default_rng(0)
    features, targets = torch.from_numpy(rng.normal(size=(60, 5))).float(), rng.integers(classes, size=60)
    regression = outside_reference.fit_regression(features, targets, 1.0)
    head = outside_reference.build_head(5, classes, regression)
    probabilities = head(features).softmax(1).detach().numpy()
    assert probabilities == pytest.approx(regression.predict_proba(features.numpy()), abs=1e-5)


def test_a_class_without_training_rows_keeps_its_random_weights() -> None:
    features, targets = torch.eye(4), np.array([0, 2, 3, 3])
    head = outside_reference.build_head(4, 5, outside_reference.fit_regression(features, targets, 1.0))
    assert head.weight.shape == (5, 4)
    assert set(head(features).argmax(1).tolist()) <= {0, 1, 2, 3, 4}
    known = outside_reference.fit_regression(features, targets, 1.0).coef_
    assert head.weight[[0, 2, 3]].detach().numpy() == pytest.approx(known, abs=1e-6)


def test_results_are_computed_once(tmp_path: Path) -> None:
    path = tmp_path / "cells.json"
    assert outside_reference.Cells(path).get("a | 0", lambda: 0.5) == 0.5
    assert outside_reference.Cells(path).get("a | 0", lambda: pytest.fail("computed again")) == 0.5


def test_rows_are_read_from_cells_and_runs(tmp_path: Path) -> None:
    name = "SST-2"
    for seed, accuracy in ((0, 0.7), (1, 0.9)):
        folder = tmp_path / "runs" / f"{Cell(name, 'IID', seed).stem}-lda"
        folder.mkdir(parents=True)
        report = {"final_rounds": 2, "scores": {"test": {"accuracy": accuracy}}}
        (folder / "report.json").write_text(json.dumps(report))
    cells = {
        f"{name} | 0 | {outside_reference.REGRESSION}": 0.75,
        f"{name} | 0 | PEFT, warm head": 0.8,
        f"{name} | 1 | PEFT, warm head": 0.9,
        f"{name} | 0 | PEFT, cold head": 0.6,
    }
    args = Namespace(only=[name], seeds=[0, 1, 2], runs=[tmp_path])
    rows = [line.strip("| ").split(" | ") for line in outside_reference.build_table(cells, args).splitlines()[2:]]
    assert [row[1:4] for row in rows] == [
        ["pooled", outside_reference.REGRESSION, "1"],
        ["pooled", "PEFT, warm head", "2"],
        ["pooled", "PEFT, cold head", "1"],
        ["IID", "fedspan, 8 rounds, with statistics and 2 on all examples", "2"],
    ]
    assert [row[4].split()[0] for row in rows] == ["75.0", "85.0", "60.0", "80.0"]
    assert [row[5] for row in rows] == ["1.25", "1.00", "2.00", "1.25"]
