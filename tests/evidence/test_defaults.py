"""The defaults: subsets, configs that differ from init's only in the experiment, and what its tables say."""

import csv
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from evidence.pages import defaults
from fedspan.config import load_config

NAME = "Banking77, 20 classes"


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    """A bank whose 30 intents have 100 queries each."""
    folder = tmp_path / "data" / "banking77"
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        with (folder / f"{part}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "category"])
            rows.writerows((f"{part} query {number}", f"intent-{number % 30:02}") for number in range(3000))
    paths = {"data": tmp_path / "data", "models": tmp_path, "out": tmp_path / "out"}
    return Namespace(**paths, only=[NAME], seeds=[0, 1])


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_subsets_are_drawn_by_their_seed_from_the_first_classes(args: Namespace) -> None:
    subsets = []
    for seed in (0, 1):
        train, test = defaults.write_data(defaults.Cell("Banking77", "IID", seed), args)
        assert defaults.write_data(defaults.Cell("Banking77", "Dirichlet 0.3", seed), args) == (train, test)
        subsets.append(rows_of(train))
        assert {row["text"].split()[0] for row in rows_of(test)} == {"test"}
    assert [len(rows) for rows in subsets] == [1200, 1200]
    assert subsets[0] != subsets[1]
    train, _ = defaults.write_data(defaults.Cell(NAME, "IID", 0), args)
    assert {row["category"] for row in rows_of(train)} == {f"intent-{number:02}" for number in range(20)}


def test_only_what_belongs_to_the_experiment_is_set(args: Namespace) -> None:
    made = defaults.config_of(defaults.Cell(NAME, "Dirichlet 0.3", 1), args)
    (path,) = (args.out / "configs").iterdir()
    assert defaults.write_data(defaults.Cell(NAME, "IID", 1), args)[1] == Path(made.data.test)
    own, changed = load_config(path).model_dump(), made.model_dump()
    differences = {
        f"{section}.{field}" if isinstance(own[section], dict) else section
        for section in own
        for field in (own[section] if isinstance(own[section], dict) else [section])
        if (own[section][field] if isinstance(own[section], dict) else own[section])
        != (changed[section][field] if isinstance(own[section], dict) else changed[section])
    }
    experiment = {"seed", "threads", "baselines"}
    assert differences == experiment | {"partition.partitioner", "partition.alpha"}
    slower = defaults.config_of(defaults.Cell(NAME, "IID", 1, "rate x 1/4"), args)
    assert slower.training.lr == pytest.approx(made.training.lr / 4)
    assert (made.baselines, slower.baselines) == (["centralized"], [])
    assert slower.baselines == []


def finish(args: Namespace, cell: Any, start: float, federated: float) -> None:
    folder = defaults.folder_of(cell, args)
    folder.mkdir(parents=True)
    scores = {"test": {"accuracy": federated}, "validation": {"accuracy": federated}}
    baselines = {"centralized": {"scores": {"test": {"accuracy": 0.8}}}}
    report = {
        "scores": scores,
        "baselines": baselines,
        "rounds": 7,
        "seconds": 3.0,
        "start": {"test": {"accuracy": start}},
    }
    (folder / "report.json").write_text(json.dumps(report))


def test_the_goal_is_a_share_of_centralized_training_and_no_less_than_the_start(args: Namespace) -> None:
    for seed, federated in ((0, 0.77), (1, 0.79)):
        finish(args, defaults.Cell(NAME, "IID", seed), 0.7, federated)
    finish(args, defaults.Cell(NAME, "Dirichlet 0.3", 0), 0.79, 0.785)
    assert defaults.is_finished(defaults.Cell(NAME, "IID", 0), args)
    table = defaults.default_table(args)
    lines = table.splitlines()
    assert defaults.verdict(table, 2) == "**1 of 2 rows reach the goal.** 1 of the rows have fewer than 2 seeds."
    assert defaults.verdict(table, 1) == "**1 of 2 rows reach the goal.**"
    assert lines[2] == f"| {NAME} | IID | 2 | 70.0 | 78.0 | 80.0 | 97.5 | 7, 7 | 3 | reached |"
    assert lines[3] == f"| {NAME} | Dirichlet 0.3 | 1 | 79.0 | 78.5 | 80.0 | 98.1 | 7 | 3 | missed |"


def test_settings_are_chosen_on_the_other_sets(args: Namespace) -> None:
    args.only = [NAME, "SST-2", "PACS"]
    scores = {"as init writes it": (0.8, 0.8, 0.8), "rate x 4": (0.5, 0.9, 0.9)}
    for setting in defaults.SETTINGS:
        for name, score in zip(args.only, scores.get(setting, (0.1, 0.1, 0.1)), strict=True):
            finish(args, defaults.Cell(name, "Dirichlet 0.3", 0, setting), 0.1, score)
    lines = defaults.left_out_table(args).splitlines()
    assert lines[2] == f"| {NAME} | rate x 4 | 50.0 | 80.0 | 80.0 (as init writes it) |"
    assert lines[3] == "| SST-2 | as init writes it | 80.0 | 80.0 | 90.0 (rate x 4) |"


def finish_clip(args: Namespace, cell: Any, score: float, clipped: int) -> None:
    """Write what a finished cell leaves: its score, and rounds of which some clipped a reply."""
    finish(args, cell, 0.1, score)
    rows = [{"round": number} | ({"clipped": {"a": 0.4}} if 0 < number <= clipped else {}) for number in range(8)]
    (defaults.folder_of(cell, args) / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_cost_of_clipping_is_paired_by_seed(args: Namespace) -> None:
    for seed, (score, unclipped) in enumerate(((0.8, 0.81), (0.83, 0.83))):
        finish_clip(args, defaults.Cell(NAME, "Dirichlet 0.3", seed), score, 2 - seed)
        finish_clip(args, defaults.Cell(NAME, "Dirichlet 0.3", seed, defaults.UNCLIPPED), unclipped, 0)
    (line,) = defaults.clipping_table(args).splitlines()[2:]
    assert line == f"| {NAME} | Dirichlet 0.3 | 2 | 82.0 | -0.5 (-1.0 to +0.0) | 3 of 14 |"


def test_a_run_that_clipped_nothing_is_not_repeated_without_clipping(args: Namespace) -> None:
    first, second = (defaults.Cell(NAME, "IID", seed) for seed in args.seeds)
    unclipped = defaults.Cell(NAME, "IID", 0, defaults.UNCLIPPED)
    assert defaults.find_unclipped(first, args) is None
    finish_clip(args, first, 0.7, 3)
    finish_clip(args, second, 0.8, 0)
    assert [defaults.find_unclipped(cell, args) for cell in (first, second)] == [None, second]
    assert defaults.clipping_table(args).splitlines()[2:] == [
        f"| {NAME} | IID | 1 | 80.0 | +0.0 (+0.0 to +0.0) | 0 of 7 |"
    ]
    finish_clip(args, unclipped, 0.75, 0)
    assert defaults.find_unclipped(first, args) == unclipped
    defaults.run_unclipped([first, second], args)  # nothing is left to run
    assert not defaults.is_finished(defaults.Cell(NAME, "IID", 1, defaults.UNCLIPPED), args)
    assert defaults.Cell(NAME, "IID", 0, defaults.UNCLIPPED).changes == ("federation.clip_ratio=null",)
