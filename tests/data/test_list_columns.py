"""Lists in columns: texts in pieces, and labels as lists of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

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


VIEWS: dict[str, tuple[pa.Array, pa.Array]] = {
    "views": (pa.array(["one", "two"], pa.string_view()), pa.array(["x", "y"], pa.string_view())),
    "lists of views": (pa.array([["one"], ["two"]], pa.list_(pa.string_view())), pa.array(["x", "y"])),
    "list views": (pa.array([["one"], ["two"]], pa.list_view(pa.string())), pa.array(["x", "y"])),
    "lists of one label": (pa.array(["one", "two"]), pa.array([["x"], ["y"]], pa.list_(pa.string(), 1))),
    "pairs of texts": (pa.array([["on", "e"], ["tw", "o"]], pa.list_(pa.string(), 2)), pa.array(["x", "y"])),
    "dictionaries": (pa.array(["one", "two"]).dictionary_encode(), pa.array(["x", "y"]).dictionary_encode()),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_further_types_of_parquet(tmp_path: Path, kind: str) -> None:
    texts, labels = VIEWS[kind]
    pyarrow.parquet.write_table(pa.table({"text": texts, "label": labels}), tmp_path / "t.parquet")
    data = load(DataConfig(train=str(tmp_path / "t.parquet"), test_fraction=0))
    assert [text.replace(" ", "") for text in data.train["text"]] == ["one", "two"]
    assert data.labels == ("x", "y")
    assert list(data.train["label"]) == [0, 1]


def test_views_in_nested_columns(tmp_path: Path) -> None:
    rows = pa.array([{"body": "one"}, {"body": "two"}], pa.struct([("body", pa.string_view())]))
    pyarrow.parquet.write_table(pa.table({"post": rows, "label": ["x", "y"]}), tmp_path / "t.parquet")
    data = load(DataConfig(train=str(tmp_path / "t.parquet"), text="post.body", test_fraction=0))
    assert list(data.train["text"]) == ["one", "two"]
