"""Scripts of the evidence: the sentences of reviews, subsets of the tables, and the table of plain tools."""

import csv
import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

from evidence.pages import corpus, outside_reference, subsets
from evidence.pages.subsets import Cell
from fedspan.config import load_config
from fedspan.data.builtin import find_corpus_file


def read_rows(split: str) -> list[dict[str, str]]:
    with find_corpus_file("builtin:review-sentences", split, "data.train").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_shipped_sentences_have_no_crude_word_and_occur_once() -> None:
    rows = [row for split in ("train", "test") for row in read_rows(split)]
    assert len({row["text"].lower() for row in rows}) == len(rows) > 2800
    assert {row["site"] for row in rows} == set(corpus.SITES.values())
    assert not [row["text"] for row in rows if corpus.CRUDE.search(row["text"])]


def test_crude_and_repeated_sentences_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, stem in enumerate(corpus.SITES):
        lines = [f"Sentence  {letter} of site {number}.\t{number % 2}" for letter in "abcde"]
        lines += ["What utter CRAP.\t0", "Good,\u2028really good.\t1", "good, really GOOD.\t1"]
        (tmp_path / f"{stem}_labelled.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.setattr("fedspan.data.builtin.files", lambda package: tmp_path)
    (tmp_path / "corpus").mkdir()
    corpus.write_review_sentences(tmp_path)
    train, test = (read_rows(split) for split in ("train", "test"))
    assert (len(train), len(test)) == (13, 3)
    assert {(row["text"], row["label"], row["site"]) for row in [*train, *test]} == {
        ("Good, really good.", "positive", "phones"),
        *((f"Sentence {letter} of site 0.", "negative", "phones") for letter in "abcde"),
        *((f"Sentence {letter} of site 1.", "positive", "films") for letter in "abcde"),
        *((f"Sentence {letter} of site 2.", "negative", "restaurants") for letter in "abcde"),
    }


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
