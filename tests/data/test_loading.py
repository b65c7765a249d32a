"""Loading data: labels, splits, caps, objects of Python, rows that cannot be used, and every mistake of a user."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image
from pydantic import BaseModel, ValidationError

from fedspan.data import DataConfig, PartitionConfig
from fedspan.data.files import IN_MEMORY
from fedspan.data.loading import load
from fedspan.data.objects import read_objects
from fedspan.tasks.registry import get_task
from helpers import refusals
from helpers.refusals import Refused
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


def test_a_blank_cell_of_one_client_makes_no_other_labels(tmp_path: Path) -> None:
    """pandas and spreadsheets write a column of whole numbers with a blank as 1.0, 2.0."""
    (tmp_path / "site-a.csv").write_text("text,label\none,1\ntwo,2\n")
    (tmp_path / "site-b.csv").write_text("text,label\nthree,1.0\nfour,\nfive,2.0\n")
    data = load(config_for(str(tmp_path / "site-{client}.csv"), test_fraction=0, invalid="skip"))
    assert data.labels == ("1", "2")
    assert data.train["label"][:] == [0, 1, 0, 1]
    named = load(config_for(str(tmp_path / "site-a.csv"), test_fraction=0, labels=["1.0", 2.0]))
    assert named.labels == ("1", "2")
    versions = written(tmp_path, "v.csv", "text,label\none,1.0.0\ntwo,v1.0\n")
    assert load(config_for(versions, test_fraction=0)).labels == ("1.0.0", "v1.0")


def test_labels_that_may_be_mistakes_are_noted(tmp_path: Path) -> None:
    rows = "text,label\na,Lab\nb,lab\nc,Lab\nd,lab\ne,billing\n"
    notes = load(config_for(written(tmp_path, "a.csv", rows), test_fraction=0)).notes
    assert notes[-2:] == (
        "labels: 'Lab' and 'lab' differ only in case or spaces, and are different labels",
        "labels: 1 of 3 have only one example: billing",
    )


def many(folder: Path) -> Path:
    lines = [f"text {row},{'common' if row % 10 else 'rare'}" for row in range(200)]
    return written(folder, "many.csv", "text,label\n" + "\n".join(lines) + "\nlast,single\n")


def test_a_stratified_fifth_is_set_aside_by_seed(tmp_path: Path) -> None:
    config = config_for(many(tmp_path))
    data, again, other = (load(config, seed=seed) for seed in (1, 1, 2))
    assert np.bincount(data.test["label"]).tolist() == [36, 4]  # of 180 and 20; the single one stays to be learnt
    assert set(data.train["text"]) | set(data.test["text"]) == set(
        load(config_for(many(tmp_path), test_fraction=0)).train["text"]
    )
    assert len(data.train) + len(data.test) == 201
    assert data.test.to_dict() == again.test.to_dict() != other.test.to_dict()


def test_a_cap_keeps_labels_in_proportion_and_the_order(tmp_path: Path) -> None:
    data = load(config_for(many(tmp_path), max_examples=20))
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
    assert data.test["text"][:] == ["6"]
    data = load(config_for(path, labels=["c", "b"], keep_only=True, test_fraction=0))
    assert (data.labels, data.train["label"][:]) == (("c", "b"), [1, 0, 1])
    data = load(config_for(path, labels=["c", "b", "a", "d"], test_fraction=0))  # one client's file may lack a label
    assert data.train["label"][:] == [2, 1, 0, 1]


def test_images_are_seen_from_the_file_that_names_them(tmp_path: Path) -> None:
    for site, shade in (("a", 10), ("b", 200)):
        (tmp_path / site).mkdir()
        Image.new("L", (8, 8), shade).save(tmp_path / site / "x.png")
        written(tmp_path / site, "train.csv", "image,label\nx.png,0\nx.png,1\n")
    where = config_for(tmp_path / "{site}" / "train.csv", test_fraction=0)
    images = load(where, task=get_task("image-classification").columns).train["image"]
    assert [np.asarray(image).max() for image in images] == [10, 10, 200, 200]


GOOD = "text,label\none,a\ntwo,b\nthree,a\n"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are named relative to the folder, so that an error's value is short and known."""
    monkeypatch.chdir(tmp_path)
    Path("train.csv").write_text(GOOD)


def config(train: str, content: str | bytes | None = None, **options: object) -> DataConfig:
    if content is not None:
        Path(train).write_bytes(content.encode(errors="surrogateescape") if isinstance(content, str) else content)
    return DataConfig.model_validate({"train": train, **options})


def test_a_missing_file_is_named_with_its_neighbors(refused: Refused) -> None:
    refused("my.test", "tset.csv", ["train.csv"], load, config("train.csv", test="tset.csv"), "my")
    Path("empty").mkdir()
    refused("data.train", "empty/train", ["holds no csv"], load, config("empty/train"))
    refused("data.train", "empty", ["empty holds no csv"], load, config("empty"))


def test_labels_that_do_not_fit_are_refused(refused: Refused) -> None:
    Path("test.csv").write_text("text,label\none,z\n")
    chosen = config("train.csv", test="test.csv", labels=["a", "b"], keep_only=True)
    refused("data.test", "test.csv", ["has one of the labels a, b"], load, chosen)


@pytest.mark.parametrize(
    ("error", "field", "value", "words"),
    [
        (ConnectionError("Couldn't reach 'o/n'\non the Hub"), "data.train", "o/n", ["local file", "Couldn't reach"]),
        (RuntimeError(), "data.train", "o/n", ["local file", "RuntimeError"]),
        (ValueError("Unknown split \"train\". Should be one of ['all']."), "data.train_split", "train", ["'all'"]),
        (ValueError("BuilderConfig 'c' not found. Available: ['sst2']"), "data.hub_config", "c", ["sst2"]),
        (ValueError("Config name is missing. Please pick one"), "data.hub_config", "c", ["pick one"]),
    ],
)
def test_a_hub_data_set_that_cannot_be_had(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, error: Exception, field: str, value: str, words: list[str]
) -> None:
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=error))
    refused(field, value, words, load, config("o/n", hub_config="c"))


def test_hub_rows_without_labels_are_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    secret = datasets.Dataset.from_dict({"text": ["one"], "label": [-1]}, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: secret)
    refused("data.train", "o/n (train)", ["label", "row 1 of o/n (train)"], load, config("o/n"))


def test_a_path_in_a_folder_that_exists_is_not_sought_on_the_hub(refused: Refused) -> None:
    Path("mine").mkdir()
    Path("mine/train.csv").write_text(GOOD)
    refused("data.train", "mine/train", ["there is no file", "'train.csv'"], load, config("mine/train"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"text": "a", "text_pair": "a"}, "'a' is also the column of text"),
        ({"columns": ["x", "x"]}, "each name once; repeated: x"),
        ({"test_fraction": 1.0}, "less than 1"),
        ({"train": ""}, "at least 1 character"),
    ],
)
def test_data_settings_that_contradict_each_other_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        DataConfig.model_validate({"train": "x.csv", **settings})


def test_labels_given_as_numbers_or_bools_are_names_as_in_files() -> None:
    assert DataConfig.model_validate({"train": "x.csv", "labels": [0, 1, True]}).labels == ["0", "1", "True"]


@pytest.mark.parametrize("model", [DataConfig, PartitionConfig])
def test_every_setting_is_described(model: type[BaseModel]) -> None:
    assert [name for name, info in model.model_fields.items() if not info.description] == []


def test_rows_of_every_kind_are_counted(tmp_path: Path) -> None:
    train, test = tmp_path / "train.csv", tmp_path / "test.csv"
    train.write_text("text,label\none,a\n,b\ntwo\nthree,b\nfour,a,more\nfive,\nsix,b\n")
    test.write_text("text,label\nseven,a\neight,c\nnine,b\n")
    data = load(DataConfig(train=str(train), test=str(test), invalid="skip"))
    assert data.train["text"][:] == ["one", "three", "six"]
    assert data.test["text"][:] == ["seven", "nine"]
    assert data.dropped == 5
    assert data.notes == (
        f"{train}: rows left out (data.invalid: skip): 2 with too many or too few fields, "
        "2 without a text, a label or an answer",
        f"{test}: rows left out (data.invalid: skip): 1 with an unknown label",
        "labels: 1 of 2 have only one example: a",
    )


def test_rows_are_still_numbered_as_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "{site}.csv"
    (tmp_path / "a.csv").write_text("text,label\none\n1,x\n")
    (tmp_path / "b.csv").write_text("text,label\n,x\n2,y\n3,z\n")
    config = DataConfig(train=str(path), labels=["x", "y"], invalid="skip", test_fraction=0)
    data = load(config)
    assert data.train["site"][:] == ["a", "b"]
    from fedspan.data.files import read_source

    source = read_source(config, "train", "data")
    assert [source.row(row).replace(str(tmp_path), "") for row in range(4)] == [
        "row 3 of /a.csv",
        "row 2 of /b.csv",
        "row 3 of /b.csv",
        "row 4 of /b.csv",
    ]


def test_numbers_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("text,label\none,1\ntwo,nan\nthree,x\nfour,2.5\nfive,inf\n")
    data = load(DataConfig(train=str(path), invalid="skip", test_fraction=0), task=get_task("regression").columns)
    assert data.train["target"][:] == [1.0, 2.5]
    assert data.dropped == 3


def test_conversations_that_are_none(tmp_path: Path, refused: Refused) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps({"talk": value}) for value in (talk, talk[:1], None, talk)))
    config = DataConfig(train=str(path), messages="talk", chat=True, test_fraction=0)
    refused(
        "data.messages",
        "talk",
        ["row 2", "data.invalid: skip"],
        lambda: load(config, task=get_task("causal-lm").columns),
    )
    data = load(config.model_copy(update={"invalid": "skip"}), task=get_task("causal-lm").columns)
    assert len(data.train) == 2


def test_sentences_whose_tags_do_not_fit_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [(["a", "b"], ["O", "B-X"]), (["c", "d"], ["O"]), (["e"], ["Drug"]), (["f"], ["O"]), ([], []), (["g"], None)]
    path.write_text("".join(json.dumps({"tokens": words, "tags": tags}) + "\n" for words, tags in rows))
    columns = get_task("token-classification").columns
    data = load(DataConfig(train=str(path), invalid="skip", test_fraction=0), task=columns)
    assert data.train["tokens"][:] == [["a", "b"], ["f"]]
    assert data.dropped == 4
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    with refusals.refused("data.label"):
        load(DataConfig(train=str(path), test_fraction=0), task=columns)


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
    assert data.test["text"][:] == ["text 0", "text 1", "text 2"]
    assert data.notes == ("duplicates: 3 of 3 test examples also occur in data.train",)


def test_data_by_client_or_from_a_function_of_the_client() -> None:
    for value in ({"north": FRAME[:4], "south": RECORDS[4:]}, {"train": {"north": FRAME[:4], "south": FRAME[4:]}}):
        given = read_objects(value, 3)
        assert given.by_client
        assert given.sources["train"].dataset["client"][:] == ["north"] * 4 + ["south"] * 4
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
    with refusals.refused("data", r"^`data`") as caught:
        read_objects(value, 2)
    assert words in str(caught.value)


def test_clients_whose_columns_differ_in_order_or_by_an_index() -> None:
    for south in (FRAME[4:][["label", "text"]], FRAME[FRAME.index % 2 == 1]):
        by_client = {"north": FRAME[:4], "south": south}
        read = read_objects({id: datasets.Dataset.from_pandas(frame) for id, frame in by_client.items()}, 2)
        assert read.sources["train"].dataset.column_names == ["text", "label", "client"]
        assert read.sources["train"].dataset["client"][:] == ["north"] * 4 + ["south"] * 4
    with refusals.refused("data", "only one of them has note"):
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
        with refusals.refused("data", "the column 'label' has another type in the data of 'south'"):
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
