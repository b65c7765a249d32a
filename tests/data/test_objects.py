"""Data passed from Python, in every form."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image

from fedspan.data.config import DataConfig
from fedspan.data.files import IN_MEMORY
from fedspan.data.loading import load
from fedspan.data.objects import read_objects
from fedspan.errors import FedspanError
from fedspan.tasks.registry import get_task

COLUMNS = {"text": [f"text {number}" for number in range(8)], "label": ["a", "b"] * 4}
RECORDS = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]
FRAME = pd.DataFrame(COLUMNS).astype({"label": "category"})
FORMS: dict[str, Any] = {
    "Dataset": datasets.Dataset.from_dict(COLUMNS),
    "DatasetDict": datasets.DatasetDict(train=datasets.Dataset.from_dict(COLUMNS)),
    "DataFrame": FRAME,
    "DataFrame with an index": FRAME.set_index(pd.Index(range(10, 18), name=None)),
    "filtered DataFrame": pd.concat([FRAME, FRAME])[lambda frame: ~frame.index.duplicated()],
    "Arrow table": pa.table(COLUMNS),
    "list of dicts": RECORDS,
    "dict of columns": COLUMNS,
    "dict of arrays": {name: np.array(values) for name, values in COLUMNS.items()},
}


@pytest.mark.parametrize("form", sorted(FORMS))
def test_every_form_gives_the_same_examples(form: str) -> None:
    given = read_objects(FORMS[form], 3)
    assert not given.by_client
    data = load(DataConfig(train=IN_MEMORY, test_fraction=0), sources=given.sources)
    assert data.train.to_dict() == {"text": COLUMNS["text"], "label": [0, 1] * 4}


@pytest.mark.parametrize("held_out", ["test", "validation"])
def test_a_dict_of_splits(held_out: str) -> None:
    given = read_objects({"train": FRAME, held_out: RECORDS[:3]}, 3)
    data = load(DataConfig(train=IN_MEMORY, test=IN_MEMORY), sources=given.sources)
    assert data.test is not None
    assert data.test["text"][:] == ["text 0", "text 1", "text 2"]
    assert data.notes == ("duplicates: 3 of 3 test examples also occur in data.train",)


def test_data_by_client() -> None:
    for value in ({"north": FRAME[:4], "south": RECORDS[4:]}, {"train": {"north": FRAME[:4], "south": FRAME[4:]}}):
        given = read_objects(value, 3)
        assert given.by_client
        assert given.sources["train"].dataset["client"][:] == ["north"] * 4 + ["south"] * 4


def test_a_function_of_the_client() -> None:
    given = read_objects(lambda number: RECORDS[2 * number : 2 * number + 2], 3)
    assert given.by_client
    assert given.sources["train"].dataset["client"][:] == [f"client-0{number // 2}" for number in range(6)]


def test_fields_inside_fields_and_images() -> None:
    nested = read_objects([{"text": "a", "meta": {"label": "x"}}, {"text": "b", "meta": {"label": "y"}}], 1)
    data = load(DataConfig(train=IN_MEMORY, label="meta.label", test_fraction=0), sources=nested.sources)
    assert data.labels == ("x", "y")
    pictures = [{"image": Image.new("L", (4, 4), 60 * number), "label": "ab"[number]} for number in range(2)]
    given = read_objects(pictures, 1)
    data = load(
        DataConfig(train=IN_MEMORY, test_fraction=0),
        task=get_task("image-classification").columns,
        sources=given.sources,
    )
    assert [image.getpixel((0, 0)) for image in data.train["image"]] == [0, 60]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (7, "Expected a datasets.Dataset, a pandas DataFrame"),
        ("train.csv", "Expected a datasets.Dataset"),
        ([], "data holds no examples"),
        ({"text": ["a"], "label": []}, "data cannot be read as a table"),
        ({"a": RECORDS, "b": [{"text": "x"}]}, "the clients 'a' and 'b' have different columns"),
        ({"a": [{"client": "x", "text": "y"}]}, "a column named 'client'"),
        ({"train": RECORDS, "dev": RECORDS}, "'dev' is not a part of the data"),
        (lambda number: None, "data['client-00'] is a NoneType"),
    ],
)
def test_what_is_no_data(value: Any, words: str) -> None:
    with pytest.raises(FedspanError, match=r"^`data`") as caught:
        read_objects(value, 2)
    assert words in str(caught.value)


def test_clients_whose_columns_differ_in_order_or_by_an_index() -> None:
    for south in (FRAME[4:][["label", "text"]], FRAME[FRAME.index % 2 == 1]):
        by_client = {"north": FRAME[:4], "south": south}
        read = read_objects({id: datasets.Dataset.from_pandas(frame) for id, frame in by_client.items()}, 2)
        assert read.sources["train"].dataset.column_names == ["text", "label", "client"]
        assert read.sources["train"].dataset["client"][:] == ["north"] * 4 + ["south"] * 4
    with pytest.raises(FedspanError, match="only one of them has note"):
        read_objects({"north": FRAME, "south": FRAME.assign(note="x")}, 2)


def test_clients_whose_types_differ_by_the_library() -> None:
    """pandas' texts are large strings in a data set, and strings in other forms; numbers may have several widths."""
    frame = FRAME.assign(label=COLUMNS["label"], number=range(8))
    small = datasets.Dataset.from_pandas(frame).cast_column("number", datasets.Value("int32"))
    for by_client in (
        {"north": frame[:4], "south": small.select(range(4, 8))},
        {"north": small.select(range(4)), "south": frame[4:].to_dict("records")},
    ):
        merged = read_objects(by_client, 2).sources["train"].dataset
        assert merged.to_dict() == {**frame.to_dict("list"), "client": ["north"] * 4 + ["south"] * 4}
        assert str(merged.features["number"].dtype) == "int64"
    fractions = read_objects({"north": frame, "south": frame.assign(number=0.5)}, 2).sources["train"].dataset
    assert fractions["number"][:] == [*range(8), *[0.5] * 8]
    features = datasets.Features({**small.features, "label": datasets.ClassLabel(names=["a", "b"])})
    coded = datasets.Dataset.from_dict(frame.assign(label=[0, 1] * 4).to_dict("list"), features=features)
    for other in (frame.assign(label=1), coded):
        with pytest.raises(FedspanError, match="the column 'label' has another type in the data of 'south'"):
            read_objects({"north": frame, "south": other}, 2)


def test_labels_of_mixed_types_in_a_frame_are_texts() -> None:
    frame = pd.DataFrame({"text": ["a", "b", "c"], "label": [1, "x", None]})
    assert read_objects(frame, 1).sources["train"].dataset.to_dict()["label"] == ["1", "x", None]


def test_nan_in_a_column_of_texts_is_a_missing_value() -> None:
    """pandas' NaN in ``to_dict`` of columns of texts became the class 'nan', or could not be read."""
    nan = float("nan")
    columns = {"text": ["one", nan, "three"], "label": ["a", "b", nan]}
    records = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for data in (columns, records):
        read = read_objects(data, 1).sources["train"].dataset
        assert read.to_dict() == {"text": ["one", None, "three"], "label": ["a", "b", None]}
