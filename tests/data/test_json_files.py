"""JSON in the forms that it comes in, and fields inside fields."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from fedspan.data import PartitionConfig
from fedspan.data.config import DataConfig
from fedspan.data.files import read_source
from fedspan.data.json_files import read_json
from fedspan.data.loading import load
from fedspan.data.partition import partition
from fedspan.errors import FedspanError

ROWS = [{"text": f"text {row}", "meta": {"label": "ab"[row % 2], "from": {"site": "xy"[row // 3]}}} for row in range(6)]


@pytest.mark.parametrize("name", ["t.jsonl", "t.json", "t.parquet"])
def test_fields_inside_fields_are_columns(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "t.parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        path.write_text(json.dumps(ROWS) if name == "t.json" else "\n".join(map(json.dumps, ROWS)))
    data = load(DataConfig(train=str(path), label="meta.label", test_fraction=0))
    assert data.train["label"][:] == [0, 1] * 3
    parts = partition(data.train, PartitionConfig(partitioner="natural", column="meta.from.site"), 0)
    assert [client.id for client in parts.clients] == ["x", "y"]


def test_a_field_inside_a_field_does_not_replace_a_column(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"a": {"b": 1}, "a.b": 2}\n')
    assert read_source(DataConfig(train=str(path)), "train", "data").dataset[0] == {"a": {"b": 1}, "a.b": 2}


@pytest.mark.parametrize("row", [{"b\0": 1}, {"a": {"b\0": 1}}, {"a": [{"b\0": 1}]}], ids=str)
def test_names_that_arrow_would_cut_are_refused(tmp_path: Path, row: dict[str, object]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(FedspanError, match=r"'b.x00' has a NUL character"):
        read_source(DataConfig(train=str(path)), "train", "data")


def test_images_are_no_fields_inside_fields(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"image": [{"bytes": b"x", "path": None}]})
    rows.to_parquet(tmp_path / "t.parquet")
    source = read_source(DataConfig(train=str(tmp_path / "t.parquet")), "train", "data")
    assert source.dataset.column_names == ["image"]


@pytest.mark.parametrize(
    "content",
    [
        '[{"text": "a"}, {"text": "b"}]',
        '{"version": 1, "data": [{"text": "a"}, {"text": "b"}], "tags": ["x"]}',
        '{"text": "a"}\n{"text": "b"}\n',
    ],
)
def test_a_json_file_in_any_form(tmp_path: Path, content: str) -> None:
    (tmp_path / "t.json").write_text(content)
    assert read_json(tmp_path / "t.json", "json", None).table.to_pylist() == [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_the_beginning_of_a_file(tmp_path: Path, kind: str) -> None:
    rows = [{"text": f"row {number}", "more": {"x": "}" * 5}} for number in range(1000)]
    path = tmp_path / f"t.{kind}"
    path.write_text(json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows)))
    read = read_json(path, kind, None, 2000)
    assert not read.is_complete
    assert 20 < len(read.table) < 100
    assert read.table.to_pylist() == rows[: len(read.table)]
    assert read_json(path, kind, None, 10**6).is_complete
