"""Every mistake in a data file or in naming it: the field, the value and what would be right."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pandas as pd
import pytest

from fedspan.data import DataConfig
from fedspan.data.loading import load
from fedspan.errors import FedspanError

Refused = Callable[..., FedspanError]
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
    refused("data.train", "trian.csv", ["train.csv"], load, config("trian.csv"))
    refused("my.test", "tset.csv", ["train.csv"], load, config("train.csv", test="tset.csv"), "my")
    refused("data.train", "no/such/train.csv", ["no/such does not exist"], load, config("no/such/train.csv"))
    Path("empty").mkdir()
    refused("data.train", "empty/train", ["holds no csv"], load, config("empty/train"))
    refused("data.train", "empty", ["empty holds no csv"], load, config("empty"))


def test_an_unknown_suffix_is_refused(refused: Refused) -> None:
    words = ["Files end in .csv, .tsv", ".parquet", ".zip"]
    for name in ("train.pkl", "train.docx", "train.parquet.gz"):
        refused("data.train", name, words, load, config(name, "x"))


@pytest.mark.parametrize("option", ["text", "text_pair", "label"])
def test_a_missing_column_names_those_there(refused: Refused, option: str) -> None:
    content = "id,ward,sentence,text,label\n1,w,s,one,a\n2,w,s,two,b\n"
    words = [
        "named 'sentences' in train.csv. The columns are id, ward, sentence, text, label. Did you mean 'sentence'",
        "data.header: false",
    ]
    refused(f"data.{option}", "sentences", words, load, config("train.csv", content, **{option: "sentences"}))


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.jsonl", "t.json", "t.parquet"])
def test_an_empty_file_is_refused(refused: Refused, name: str) -> None:
    refused("data.train", name, ["holds no examples" if name == "t.jsonl" else "is empty"], load, config(name, ""))


def test_a_file_with_a_header_alone_is_refused(refused: Refused) -> None:
    refused(
        "data.train",
        "t.csv",
        ["holds no examples"],
        load,
        config("t.csv", "text,label\n"),
    )
    refused("data.train", "t.json", ["holds no examples"], load, config("t.json", "[]"))
    refused(
        "data.train",
        "t.jsonl",
        ["holds no examples"],
        load,
        config("t.jsonl", "\n\n"),
    )


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.parquet", b"PAR1 no", ["cannot be read as parquet"]),
        ("t.csv.gz", gzip.compress(GOOD.encode(), mtime=0)[:-12], ["cannot be read as csv"]),
        ("t.csv.gz", b"not packed", ["cannot be read as csv"]),
        ("t.csv", "text,label\none,a\ntwo\n", ["Row #3", "Expected 2 columns, got 1"]),
        ("t.csv", "text,label\none,a,x\n", ["Row #2", "got 3"]),
        ("t.csv", "text,label\none,a\ntwo\n", ["data.invalid: skip", "data.delimiter", "data.quoting"]),
        ("t.csv", "text,label\n" + "één,a\n" * 9 + "tw\udcff,b\n", ["line 11 is not in utf-8", "data.encoding"]),
        ("t.jsonl", '{"text": "one", "label": "a"}\n{"text": "two", "label"\n', ["row 2"]),
        ("t.jsonl", '{"text": "one", "label": "a"}\n["two", "b"]\n', ["row 2: not an object"]),
        ("t.json", '{"text": "one", "label": "a"}', ["list of objects", ".jsonl"]),
        ("t.json", '{"a": [{"text": "one"}], "b": [{"text": "two"}]}', ["list of objects"]),
        ("t.json", '[{"text": "one", "label": "a"}', ["cannot be read as json"]),
        ("t.csv", "text,label,text\none,a,b\n", ["two columns named 'text'"]),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(
    refused: Refused, name: str, content: str | bytes, words: list[str]
) -> None:
    refused("data.train", name, words, load, config(name, content))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.csv", "text,label\none,a\n ,b\n", ["text in column 'text'", "row 3 of t.csv"]),
        ("t.csv", 'text,label\n"one\nand a half",a\n"",b\n', ["text in column 'text'", "row 3 of t.csv"]),
        ("t.csv", "text,label\none,a\ntwo,\n", ["label in column 'label'", "row 3 of t.csv"]),
        ("t.jsonl", '{"text": "one", "label": 1}\n{"text": null, "label": 1}', ["text", "row 2 of t.jsonl"]),
        ("t.jsonl", '{"text": "one", "label": 1}\n{"text": "two"}', ["label", "row 2 of t.jsonl"]),
        ("t.jsonl", '{"text": null, "label": 1}', ["text", "row 1 of t.jsonl"]),
        ("t.jsonl", '{"text": "one", "label": NaN}', ["label", "row 1 of t.jsonl"]),
    ],
)
def test_a_row_without_text_or_label_is_refused(refused: Refused, name: str, content: str, words: list[str]) -> None:
    refused("data.train", name, words, load, config(name, content))


@pytest.mark.parametrize(
    ("rows", "field", "words"),
    [
        ([{"text": 1, "label": "a"}], "data.text", ["holds int64, not text"]),
        ([{"text": "one", "label": ["a", "b"]}], "data.label", ["row 1 of t.jsonl has 2 labels", "data.invalid: skip"]),
        ([{"text": "one", "label": 1.0}, {"text": "two", "label": 2.5}], "data.label", ["row 2 of t.jsonl has 2.5"]),
        ([{"text": "one", "label": "a"}], "data.label", ["all rows have the label 'a'"]),
    ],
)
def test_a_column_that_cannot_be_what_it_is_named_for(
    refused: Refused, rows: list[object], field: str, words: list[str]
) -> None:
    content = "\n".join(json.dumps(row) for row in rows)
    refused(field, field.removeprefix("data."), words, load, config("t.jsonl", content))


def test_names_for_the_columns_are_refused_where_they_are_there(refused: Refused) -> None:
    names = ["text", "label"]
    refused("data.columns", names, ["already names the columns"], load, config("train.csv", columns=names))
    path = Path("t.parquet")
    pd.DataFrame({"text": ["one"], "label": ["a"]}).to_parquet(path)
    refused("data.columns", names, ["only csv, tsv, txt and Excel files"], load, config("t.parquet", columns=names))


def test_a_label_that_train_does_not_have_is_named_with_row_and_file(refused: Refused) -> None:
    Path("test.csv").write_text("text,label\none,a\ntwo,bb\n")
    words = ["row 3 of test.csv has the label 'bb'", "not in the training data", "Did you mean 'b'"]
    refused("data.test", "bb", words, load, config("train.csv", test="test.csv"))
    refused("data.test", "bb", words, load, config("train.csv", test="test.csv", first_labels=2))


def test_labels_that_do_not_fit_are_refused(refused: Refused) -> None:
    words = ["row 3 of train.csv has the label 'b'", "not in data.labels", "data.invalid: skip"]
    refused("data.train", "b", words, load, config("train.csv", labels=["a", "c"]))
    words = ["no row of train.csv has the label 'c'", "'a', 'b'"]
    refused("data.labels", "c", words, load, config("train.csv", labels=["a", "c"], keep_only=True))
    refused("data.first_labels", 3, ["at most 2"], load, config("train.csv", first_labels=3))
    Path("test.csv").write_text("text,label\none,z\n")
    chosen = config("train.csv", test="test.csv", labels=["a", "b"], keep_only=True)
    refused("data.test", "test.csv", ["has one of the labels a, b"], load, chosen)


def test_too_few_examples_to_set_a_test_set_aside(refused: Refused) -> None:
    train = config("t.csv", "text,label\none,a\ntwo,b\n")
    refused("data.train", "t.csv", ["each label has only one", "data.test_fraction: 0"], load, train)


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
    def load_dataset(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
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


def test_an_unknown_built_in_corpus_or_split(refused: Refused) -> None:
    words = ["builtin:patient-messages"]
    refused("data.train", "builtin:patients", words, load, config("builtin:patients"))
    wrong = config("builtin:patient-messages", train_split="dev")
    refused("data.train_split", "dev", ["has no split 'dev'", "'test', 'train'"], load, wrong)
