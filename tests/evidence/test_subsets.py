"""The subsets of the tables of defaults, and configs that differ from init's only in the experiment."""

import csv
from argparse import Namespace
from pathlib import Path

import pytest

from evidence.pages import subsets
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
    drawn = []
    for seed in (0, 1):
        train, test = subsets.write_data(subsets.Cell("Banking77", "IID", seed), args)
        assert subsets.write_data(subsets.Cell("Banking77", "Dirichlet 0.3", seed), args) == (train, test)
        drawn.append(rows_of(train))
        assert {row["text"].split()[0] for row in rows_of(test)} == {"test"}
    assert [len(rows) for rows in drawn] == [1200, 1200]
    assert drawn[0] != drawn[1]
    train, _ = subsets.write_data(subsets.Cell(NAME, "IID", 0), args)
    assert {row["category"] for row in rows_of(train)} == {f"intent-{number:02}" for number in range(20)}


def test_only_what_belongs_to_the_experiment_is_set(args: Namespace) -> None:
    made = subsets.config_of(subsets.Cell(NAME, "Dirichlet 0.3", 1), args)
    (path,) = (args.out / "configs").iterdir()
    assert subsets.write_data(subsets.Cell(NAME, "IID", 1), args)[1] == Path(made.data.test)
    own, changed = load_config(path).model_dump(), made.model_dump()
    differences = {
        f"{section}.{field}" if isinstance(own[section], dict) else section
        for section in own
        for field in (own[section] if isinstance(own[section], dict) else [section])
        if (own[section][field] if isinstance(own[section], dict) else own[section])
        != (changed[section][field] if isinstance(own[section], dict) else changed[section])
    }
    assert differences == {"seed", "threads", "partition.partitioner", "partition.alpha"}
