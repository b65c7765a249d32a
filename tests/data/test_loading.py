"""Loading data: labels, splits and caps, and what of other files is seen."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from fedspan.data.loading import load
from fedspan.tasks.registry import get_task
from helpers.written_data import config_for, written


def test_a_hub_data_set_gives_its_own_test_split_and_its_names_of_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})

    def load_dataset(path: str, name: str | None, split: str) -> datasets.Dataset:
        asked.append((path, name, split))
        return datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = load(config_for("nyu-mll/glue-v1.5", hub_config="sst2", test_split="validation"))
    assert asked == [("nyu-mll/glue-v1.5", "sst2", "train"), ("nyu-mll/glue-v1.5", "sst2", "validation")]
    assert data.labels == ("no", "yes")
    assert data.train["label"][:] == [1, 0]
    assert data.test is not None
    asked.clear()
    assert load(config_for("imdb", test_split=None, test_fraction=0)).test is None
    assert asked == [("imdb", None, "train")]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["10", "9", "2"], ("2", "9", "10")),
        ([10, 9, 2], ("2", "9", "10")),
        ([True, False, True], ("False", "True")),
        ([1.0, 0.0, 1.0], ("0", "1")),
        ([1, "other", 10], ("1", "10", "other")),
        (["b ", " a", "b"], ("a", "b")),
        (["inf", "2", "1"], ("1", "2", "inf")),
    ],
)
def test_labels_of_any_type_become_sorted_names(tmp_path: Path, labels: list[object], names: tuple[str, ...]) -> None:
    lines = "\n".join(json.dumps({"text": "t", "label": label}) for label in labels)
    assert load(config_for(written(tmp_path, "t.jsonl", lines), test_fraction=0)).labels == names


def many(folder: Path) -> Path:
    lines = [f"text {row},{'common' if row % 10 else 'rare'}" for row in range(200)]
    return written(folder, "many.csv", "text,label\n" + "\n".join(lines) + "\nlast,single\n")


def test_a_stratified_fifth_is_set_aside_by_seed(tmp_path: Path) -> None:
    config = config_for(many(tmp_path))
    data, again, other = (load(config, seed=seed) for seed in (1, 1, 2))
    assert data.test is not None
    assert again.test is not None
    assert other.test is not None
    assert np.bincount(data.test["label"]).tolist() == [36, 4]  # of 180 and 20; the single one stays to be learnt
    assert set(data.train["text"]) | set(data.test["text"]) == set(
        load(config_for(many(tmp_path), test_fraction=0)).train["text"]
    )
    assert len(data.train) + len(data.test) == 201
    assert data.test.to_dict() == again.test.to_dict() != other.test.to_dict()


def test_a_cap_keeps_labels_in_proportion_and_the_order(tmp_path: Path) -> None:
    data = load(config_for(many(tmp_path), max_examples=20))
    assert data.test is not None
    assert np.bincount(data.train["label"], minlength=3).tolist() == [18, 2, 0]
    assert len(data.test) == 20
    rows = [int(text.split()[1]) for text in data.train["text"]]
    assert rows == sorted(rows)
    assert data.labels == ("common", "rare", "single")


def test_labels_can_be_chosen(tmp_path: Path) -> None:
    path = written(tmp_path, "t.csv", "text,label\n1,a\n2,b\n3,c\n4,b\n")
    test = written(tmp_path, "test.csv", "text,label\n5,c\n6,a\n")
    data = load(config_for(path, test=str(test), first_labels=2))
    assert (data.labels, data.train["text"][:]) == (("a", "b"), ["1", "2", "4"])
    assert data.test is not None
    assert data.test["text"][:] == ["6"]
    data = load(config_for(path, labels=["c", "b"], keep_only=True, test_fraction=0))
    assert (data.labels, data.train["label"][:]) == (("c", "b"), [1, 0, 1])
    data = load(config_for(path, labels=["c", "b", "a", "d"], test_fraction=0))  # one client's file may lack a label
    assert data.train["label"][:] == [2, 1, 0, 1]


@pytest.mark.parametrize(
    ("name", "options", "train", "test_labels"),
    [
        ("banking77/train.csv", {"label": "category", "test": "banking77/test.csv"}, 10003, 77),
        ("glue/CoLA/train.tsv", {"columns": ["source", "label", "mark", "text"], "test": "glue/CoLA/dev.tsv"}, 8551, 2),
        ("glue/SST-2/train.tsv", {"text": "sentence", "test": "glue/SST-2/dev.tsv"}, 67349, 2),
        ("glue/MRPC/train.tsv", {"text": "#1 String", "text_pair": "#2 String", "label": "Quality"}, 2934, 2),
        ("blitzer_sentiment/books/train.tsv", {"text": "sentence", "quoting": "double", "test_fraction": 0}, 1700, 2),
    ],
)
def test_published_files_are_read_whole(
    real_data: Path, name: str, options: dict[str, object], train: int, test_labels: int
) -> None:
    if "test" in options:
        options = {**options, "test": str(real_data / str(options["test"]))}
    data = load(config_for(real_data / name, **options))
    assert (len(data.train), len(data.labels)) == (train, test_labels)


def test_images_are_seen_from_the_file_that_names_them(tmp_path: Path) -> None:
    for site, shade in (("a", 10), ("b", 200)):
        (tmp_path / site).mkdir()
        Image.new("L", (8, 8), shade).save(tmp_path / site / "x.png")
        written(tmp_path / site, "train.csv", "image,label\nx.png,0\nx.png,1\n")
    where = config_for(tmp_path / "{site}" / "train.csv", test_fraction=0)
    images = load(where, task=get_task("image-classification").columns).train["image"]
    assert [np.asarray(image).max() for image in images] == [10, 10, 200, 200]
