"""Lists in columns: texts in pieces, and labels as lists of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import datasets

from fedspan.data.config import DataConfig
from fedspan.data.loading import load
from fedspan.errors import FedspanError

Refused = Callable[..., FedspanError]


def saved(path: Path, labels: list[list[int]]) -> Path:
    names = datasets.ClassLabel(names=["joy", "anger", "fear"])
    features = datasets.Features({"tokens": datasets.List(datasets.Value("string")), "labels": datasets.List(names)})
    rows = {"tokens": [["a", f"word{number}"] for number in range(len(labels))], "labels": labels}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    return path


def test_lists_of_one_label_and_of_tokens(tmp_path: Path) -> None:
    path = saved(tmp_path / "t.parquet", [[0], [1], [0], [1]])
    data = load(DataConfig(train=str(path), text="tokens", label="labels", test_fraction=0))
    assert data.train["text"][:] == ["a word0", "a word1", "a word2", "a word3"]
    assert data.labels == ("anger", "joy")
    assert data.train["label"][:] == [1, 0, 1, 0]
    assert data.notes == (f"{path}: the lists of texts in column 'tokens' are joined with spaces",)


def test_lists_of_several_labels_are_refused_or_skipped(tmp_path: Path, refused: Refused) -> None:
    path = saved(tmp_path / "t.parquet", [[0], [1, 2], [], [1]])
    config = DataConfig(train=str(path), text="tokens", label="labels", test_fraction=0)
    refused("data.label", "labels", ["row 2 of", "has 2", "data.invalid: skip"], load, config)
    data = load(config.model_copy(update={"invalid": "skip"}))
    assert data.train["text"][:] == ["a word0", "a word3"]
    assert data.dropped == 2
