"""Columns of a source whose names the task uses for others stay available to groups and partitions."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspan.data import DataConfig, PartitionConfig
from fedspan.data.loading import load
from fedspan.data.names import find_source_column, list_source_columns, read_names, sort_names
from fedspan.data.partition import partition
from fedspan.errors import FedspanError
from fedspan.tasks.registry import get_task


@pytest.mark.parametrize("column", ["label", "target", "answer", "text_pair", "text", "labels"])
def test_unrelated_columns_assign_and_group_rows(column: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"message": f"a word {at}", "intent": "xy"[at % 2], column: "pqr"[at % 3]} for at in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(train=str(path), text="message", label="intent", group=column, test_fraction=0)
    loaded = load(config)
    assert loaded.labels == ("x", "y")
    assert find_source_column(loaded.train, column) == (column if column == "labels" else f"source:{column}")
    assert loaded.groups is not None
    assert loaded.groups.tolist() == [0, 1, 2] * 4
    parts = partition(loaded.train, PartitionConfig(partitioner="natural", column=column, validation=0, test=0), 0)
    assert [client.id for client in parts.clients] == ["p", "q", "r"]
    owned = [sorted(loaded.train["text"][row] for row in client.train) for client in parts.clients]
    assert owned == [sorted(row["message"] for row in rows if row[column] == name) for name in "pqr"]


def test_errors_list_the_columns_by_the_users_names(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": f"a word {at}", "label": "pq"[at % 2], "ward": "x"} for at in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load(DataConfig(train=str(path), test_fraction=0), task=get_task("masked-lm").columns)  # pyright: ignore
    assert list_source_columns(loaded.train) == ["text", "label", "ward"]
    with pytest.raises(
        FedspanError, match=r"no column named 'lable'\. The columns are text, label, ward\. Did you mean 'label'"
    ) as caught:
        partition(loaded.train, PartitionConfig(partitioner="natural", column="lable"), 0)
    assert "source:" not in str(caught.value)


@given(st.lists(st.text(min_size=1)), st.randoms(use_true_random=False))
def test_the_order_of_names_does_not_depend_on_that_of_the_rows(names: list[str], random: object) -> None:
    shuffled = list(names)
    random.shuffle(shuffled)  # pyright: ignore[reportAttributeAccessIssue]
    assert sort_names(shuffled) == sort_names(names)
    assert set(sort_names(names)) == set(names)


def test_equal_names_are_one_object() -> None:
    dataset = datasets.Dataset.from_dict(
        {"label": [" a", "b ", None, " a", ""], "number": [1.0, 2.5, float("nan"), 1.0, 3]}
    )
    names = read_names(dataset, "label")
    assert names == ["a", "b", None, "a", None]
    assert names[0] is names[3]
    assert read_names(dataset, "number") == ["1", "2.5", None, "1", "3"]
