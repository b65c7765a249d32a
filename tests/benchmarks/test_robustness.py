"""benchmarks/robustness.py: poisoned examples, one cell from its config to the page, and cells that are kept."""

import csv
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import robustness

from helpers import tiny


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
        **{"data": tmp_path, "work": tmp_path / "work", "model": str(tiny_folder / "bert"), "layers": [0]},
        **{"labels": 4, "examples": 250, "alpha": 5.0, "rounds": 1, "steps": 2, "batch": 4, "lr": 0.01},
        **{"poisoned": 0.5, "methods": ["fedit"], "seeds": [0], "defenses": ["mean", "clip 1"], "seconds": 60.0},
        attacks=["none", "1 of 10, boosted"],
        passes=["steps", "epochs"],
        no_run=False,
    )


def test_a_cell_is_trained_measured_kept_and_printed(args: Namespace) -> None:
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
    missing = robustness.Key("fedit", 0, 0, "clip 1", "none")
    assert robustness.run_cells(args, [honest, missing]) is None
    assert robustness.run_cells(Namespace(**{**vars(args), "no_run": True}), [honest, missing]) == {
        honest: cells[honest]
    }
    page = robustness.page(cells, args, " --alpha 5")
    assert f"| mean | {cells[honest].accuracy:.1f} |" in page
    assert f"| clip 1 |  | {cells[boosted].success:.0f} ({cells[boosted].accuracy:.0f}) |" in page


def test_cells_of_other_settings_are_others(args: Namespace) -> None:
    assert robustness.settings_digest(args) == robustness.settings_digest(Namespace(**{**vars(args), "seconds": 1.0}))
    assert robustness.settings_digest(args) != robustness.settings_digest(Namespace(**{**vars(args), "alpha": 0.1}))


@pytest.mark.slow
def test_wider_clips_than_one_that_scaled_nothing_are_not_run(args: Namespace) -> None:
    key = robustness.Key("fedit", 0, 0, "mean", "none")
    clip, median = (robustness.replace(key, defense=name) for name in ("clip 2", "median"))
    cell = robustness.Cell(80.0, 1.0, 0.0, 0.0, 0.0)
    assert robustness.find_equal({clip: cell}, key) == cell
    assert robustness.find_equal({key: cell}, clip) is None
    assert robustness.find_equal({clip: cell}, median) is None
    for scaled in (robustness.replace(cell, clipped=0.1), robustness.replace(cell, limited=0.1)):
        assert robustness.find_equal({clip: scaled}, key) is None
    cells = robustness.run_cells(args, [robustness.replace(key, defense="clip 3"), key])
    assert cells[key] == robustness.run_cell(args, robustness.build(args, key), key)


def test_a_page_over_seeds_has_spreads_and_paired_costs(args: Namespace) -> None:
    args.seeds, args.defenses = [0, 1], ["mean", "clip 1", "clip 1.5"]
    cells = {
        robustness.Key("fedit", seed, epochs, name, attack): robustness.Cell(accuracy, success, 2.5, 0.5, 0.0)
        for epochs, attack in ((1, "none"), (0, "none"), (0, "2 of 10"))
        for seed, name, accuracy, success in (
            *((0, "mean", 90.0, 40.0), (1, "mean", 80.0, 60.0)),
            *((0, "clip 1", 89.0, 20.0), (1, "clip 1", 82.0, 30.0)),
        )
    }
    page = robustness.page(cells, args, "")
    assert "| mean | 85.0 ± 7.1 | 85.0 ± 7.1 | 50 ± 14 (85) |" in page
    assert "| fedit | equal epochs | +0.5 (-1.0 to +2.0) |  |" in page
    assert "| method | passes | clip 1 | clip 1.5 (default) |" in page
    del cells[robustness.Key("fedit", 1, 0, "clip 1", "2 of 10")]
    args.no_run = True
    page = robustness.page(cells, args, "")
    assert "| 20 (89), seeds: 1 |" in page
    assert "Blank cells have not been measured" in page
    honest = {key: cell for key, cell in cells.items() if key.attack == "none"}
    assert "attack success" not in robustness.page(honest, args, "")
