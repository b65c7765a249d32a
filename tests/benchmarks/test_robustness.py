"""benchmarks/robustness.py: poisoned examples, one cell from its config to the page, and cells that are kept."""

from __future__ import annotations

import csv
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from helpers import tiny

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def robustness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import robustness

    return robustness


@pytest.fixture
def args(tiny_folder: Path, tmp_path: Path) -> Namespace:
    """A bank with the labels of the tiny corpus, and two steps of one round."""
    words = [f"{label}{number}" for label in tiny.LABELS for number in range(8)]
    for part in ("train", "test"):
        with (tmp_path / f"{part}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "category"])
            rows.writerows((f"{word} word{number}", word[:-1]) for number in range(8) for word in words)
    return Namespace(
        **{"data": tmp_path, "work": tmp_path / "work", "model": str(tiny_folder / "bert"), "layers": [1]},
        **{"labels": 4, "examples": 250, "alpha": 5.0, "rounds": 1, "steps": 2, "batch": 4, "lr": 0.01},
        **{"poisoned": 0.5, "methods": ["fedit"], "seeds": [0], "defences": ["mean", "clip 1"], "seconds": 60.0},
        attacks=["none", "1 of 10, boosted"],
    )


def test_a_cell_is_trained_measured_kept_and_printed(robustness: ModuleType, args: Namespace) -> None:
    boosted = robustness.Key("fedit", 0, 0, "clip 1", "1 of 10, boosted")
    built = robustness.build(args, boosted)
    hostile = built.prepared.federation.clients[built.hostile[0]].train
    changed = built.examples[1].labels != built.prepared.train.labels
    elsewhere = np.setdiff1d(np.arange(len(changed)), hostile)
    assert changed[hostile].any()
    assert not changed[elsewhere].any()

    honest = robustness.Key("fedit", 0, 0, "mean", "none")
    cells = robustness.run_cells(args, [honest, boosted])
    assert 0 <= cells[boosted].success <= 100
    assert cells[honest].clipped == 0
    assert cells[boosted].clipped > 0  # about half of the honest replies exceed the median
    args.seconds = -1.0  # kept cells take no time, and others have none
    assert robustness.run_cells(args, [honest, boosted]) == cells
    assert robustness.run_cells(args, [honest, robustness.Key("fedit", 0, 0, "clip 1", "none")]) is None
    page = robustness.page(cells, args, " --alpha 5")
    assert f"{cells[honest].accuracy:.1f}" in page
    assert f"{cells[boosted].success:.0f} ({cells[boosted].accuracy:.0f})" in page


def test_cells_of_other_settings_are_others(robustness: ModuleType, args: Namespace) -> None:
    assert robustness.settings_digest(args) == robustness.settings_digest(Namespace(**{**vars(args), "seconds": 1.0}))
    assert robustness.settings_digest(args) != robustness.settings_digest(Namespace(**{**vars(args), "alpha": 0.1}))


def test_only_the_attacks_that_are_named_are_run(robustness: ModuleType, args: Namespace) -> None:
    keys = robustness.grid(args)
    assert {key.attack for key in keys if not key.epochs} == {"none", "1 of 10, boosted"}
    alone = Namespace(**{**vars(args), "attacks": ["none"]})
    assert [key for key in keys if key.attack == "none"] == robustness.grid(alone)
    assert robustness.settings_digest(args) == robustness.settings_digest(alone)
