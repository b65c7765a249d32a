"""Reading files of every format: what comes out, and that every mistake is named with its place."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from fedspan.data import DataConfig, PartitionConfig
from fedspan.data.builtin import CORPORA
from fedspan.data.loading import load
from fedspan.data.names import read_names, sort_names
from fedspan.data.partition import partition
from fedspan.data.path_patterns import match_paths
from fedspan.errors import FedspanError
from fedspan.tasks.registry import get_task

Refused = Callable[..., FedspanError]
ROWS = [{"text": f"text {row}", "label": "ab"[row % 2]} for row in range(10)]
CSV = "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in ROWS)


def config_for(path: Path | str, **options: object) -> DataConfig:
    return DataConfig.model_validate({"train": str(path), **options})


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_as(folder: Path, suffix: str) -> Path:
    jsonl = "".join(json.dumps(row) + "\n" for row in ROWS)
    content = {"csv": CSV, "tsv": CSV.replace(",", "\t"), "jsonl": jsonl, "json": json.dumps(ROWS)}
    path = folder / f"train.{suffix}"
    kind, _, packed = suffix.partition(".")
    if kind == "parquet":
        pd.DataFrame(ROWS).astype({"label": "category"}).to_parquet(path)
    else:
        path.write_bytes(gzip.compress(content[kind].encode()) if packed else content[kind].encode())
    return path


@pytest.mark.parametrize(
    "suffix", ["csv", "tsv", "jsonl", "json", "parquet", "csv.gz", "tsv.gz", "jsonl.gz", "json.gz", "CSV"]
)
def test_every_format_gives_the_same_examples(tmp_path: Path, suffix: str) -> None:
    path = write_as(tmp_path, suffix.lower()).rename(tmp_path / f"train.{suffix}")
    data = load(config_for(path, test_fraction=0))
    assert data.labels == ("a", "b")
    assert data.test is None
    assert data.train.column_names == ["text", "label"]
    assert data.train.to_dict() == {"text": [row["text"] for row in ROWS], "label": [0, 1] * 5}
    assert data.train.features["label"] == datasets.Value("int64")


def test_a_csv_quotes_fields_and_a_tsv_does_not_unless_asked(tmp_path: Path) -> None:
    quoted = 'text,label\n"one, ""two""\nthree",a\nNA,b\n'
    train = load(config_for(written(tmp_path, "t.csv", quoted), test_fraction=0)).train
    assert train["text"][:] == ['one, "two"\nthree', "NA"]
    unbalanced = 'text\tlabel\n"one\ta\ntwo "\tb\n'
    train = load(config_for(written(tmp_path, "t.tsv", unbalanced), test_fraction=0)).train
    assert train["text"][:] == ['"one', 'two "']
    config = config_for(written(tmp_path, "q.tsv", quoted.replace(",", "\t")), test_fraction=0, quoting="double")
    assert load(config).train["text"][0] == 'one\t "two"\nthree'


def test_a_file_without_a_header_is_read_with_the_names_given(tmp_path: Path) -> None:
    path = written(tmp_path, "cola.tsv", "gj04\t1\t\tThe boat sank.\nbc01\t0\t*\tBoat the sank.\n")
    config = config_for(path, columns=["source", "label", "mark", "text"], test_fraction=0)
    data = load(config)
    assert data.train.column_names == ["text", "label", "source", "mark"]
    assert data.train[0] == {"text": "The boat sank.", "label": 1, "source": "gj04", "mark": ""}


def test_columns_are_renamed_even_where_their_names_collide(tmp_path: Path) -> None:
    path = written(tmp_path, "t.csv", "label,text,b,ward\nhello,x,one,w1\nworld,y,two,w2\n")
    train = load(config_for(path, text="label", text_pair="b", label="text", test_fraction=0)).train
    assert train[1] == {"text": "world", "text_pair": "two", "label": 1, "ward": "w2"}
    train = load(config_for(path, text="b", label="ward", test_fraction=0)).train
    own = {"text": ["one", "two"], "label": [0, 1]}
    assert train.to_dict() == {**own, "source:label": ["hello", "world"], "source:text": ["x", "y"]}


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


@given(st.lists(st.text(min_size=1)), st.randoms(use_true_random=False))
def test_the_order_of_names_does_not_depend_on_that_of_the_rows(names: list[str], random: object) -> None:
    shuffled = list(names)
    random.shuffle(shuffled)  # pyright: ignore[reportAttributeAccessIssue]
    assert sort_names(shuffled) == sort_names(names)
    assert set(sort_names(names)) == set(names)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip), min_size=2, max_size=5))
@example(["two\u2028lines", "and\x85two\r\n"])
def test_any_text_survives_jsonl(tmp_path: Path, texts: list[str]) -> None:
    lines = "\n".join(json.dumps({"text": text, "label": row}, ensure_ascii=False) for row, text in enumerate(texts))
    assert load(config_for(written(tmp_path, "t.jsonl", lines), test_fraction=0)).train["text"][:] == texts


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


def test_the_built_in_corpus_is_named_and_has_a_test_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedspan.data.builtin.files", lambda package: tmp_path)
    folder = tmp_path / "corpus" / CORPORA["patient-messages"].folder
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        written(folder, f"{split}.csv", f"text,label\n{split} one,a\n{split} two,b\n")
    data = load(config_for("builtin:patient-messages"))
    assert data.train["text"][0] == "train one"
    assert data.test is not None
    assert data.test["text"][0] == "test one"


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


@pytest.mark.parametrize("name", CORPORA)
def test_the_corpora_that_come_with_the_package_are_whole(name: str) -> None:
    data = load(config_for(f"builtin:{name}"))
    assert len(data.labels) == 20
    assert data.test is not None
    assert set(data.train["label"]) == set(data.test["label"]) == set(range(len(data.labels)))


@pytest.fixture
def clinics(tmp_path: Path) -> Path:
    for number, site in enumerate(("north", "south")):
        folder = tmp_path / f"clinic {site}"
        folder.mkdir()
        written(
            folder,
            "train.csv",
            "text,label\n" + "".join(f"{site} {row},{'ab'[row % 2]}\n" for row in range(4 + number)),
        )
    (tmp_path / "notes.txt").write_text("no clinic's")
    (tmp_path / ".hidden").mkdir()
    written(tmp_path / ".hidden", "train.csv", CSV)
    (tmp_path / "clinic empty").mkdir()
    return tmp_path


def test_several_files_are_one_with_a_column_that_says_whose_a_row_is(clinics: Path) -> None:
    data = load(config_for(clinics / "clinic {site}" / "train.csv", test_fraction=0))
    assert data.train["site"] == ["north"] * 4 + ["south"] * 5
    assert data.train["text"] == [f"north {row}" for row in range(4)] + [f"south {row}" for row in range(5)]
    assert data.labels == ("a", "b")
    assert set(load(config_for(clinics / "{where}" / "train.csv")).train["where"]) == {"clinic north", "clinic south"}
    parts = partition(data.train, PartitionConfig(partitioner="natural", column="site"), 0)
    assert [client.id for client in parts.clients] == ["north", "south"]
    held = load(config_for(clinics / "clinic north" / "train.csv", test=str(clinics / "clinic {site}" / "train.csv")))
    assert held.test is not None
    assert held.test["site"] == ["north"] * 4 + ["south"] * 5


def test_a_place_that_occurs_twice_is_the_same_twice(tmp_path: Path) -> None:
    for site, name in (("a", "a"), ("a", "b"), ("b", "b")):
        (tmp_path / site).mkdir(exist_ok=True)
        written(tmp_path / site, f"{name}-{name}.csv", CSV)
        written(tmp_path / site, f"{name}-x.csv", CSV)
    found = match_paths(str(tmp_path / "{site}" / "{site}-{site}.csv"), "data.train")
    assert [(path.relative_to(tmp_path).as_posix(), values) for path, values in found.items()] == [
        ("a/a-a.csv", {"site": "a"}),
        ("b/b-b.csv", {"site": "b"}),
    ]
    both = match_paths(str(tmp_path / "{site}" / "{name}-x.csv"), "data.train")
    assert [tuple(values.values()) for values in both.values()] == [("a", "a"), ("a", "b"), ("b", "b")]


def test_a_file_whose_name_has_braces_is_that_file(tmp_path: Path) -> None:
    path = written(tmp_path, "{site}.csv", CSV)
    written(tmp_path, "other.csv", CSV)
    assert "site" not in load(config_for(path)).train.column_names


def test_a_mistake_in_one_of_several_files_is_named_with_its_place(clinics: Path, refused: Refused) -> None:
    where = str(clinics / "clinic {site}" / "train.csv")
    south = clinics / "clinic south" / "train.csv"
    south.write_text("text,label\nfine,a\n,b\n")
    refused("data.train", where, [f"row 3 of {south}"], load, config_for(where, test_fraction=0))
    south.write_text("text,kind\nfine,a\n")
    refused("data.train", where, ["'kind' is not in both", "clinic north"], load, config_for(where))
    south.write_text("text,label,site\nfine,a,x\n")
    (clinics / "clinic north" / "train.csv").write_text("text,label,site\nfine,b,x\n")
    refused("data.train", where, ["has a column 'site' already"], load, config_for(where))
    nowhere = str(clinics / "{site}" / "test.csv")
    refused("data.train", nowhere, ["no file matches"], load, config_for(nowhere))
    (clinics / "clinic north" / "train.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    mixed = str(clinics / "clinic {site}" / "train.{kind}")
    refused("data.train", mixed, ["the files have several formats: .csv, .jsonl"], load, config_for(mixed))


def test_classes_that_differ_between_files_are_refused(tmp_path: Path, refused: Refused) -> None:
    for site, names in (("a", ["neg", "pos"]), ("b", ["pos", "neg"])):
        features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
        rows = {"text": ["bad", "good"], "label": [names.index("neg"), names.index("pos")]}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"{site}.parquet")
    where = str(tmp_path / "{site}.parquet")
    refused("data.train", where, ["the files do not match"], load, config_for(where))


def test_images_are_seen_from_the_file_that_names_them(tmp_path: Path) -> None:
    for site, shade in (("a", 10), ("b", 200)):
        (tmp_path / site).mkdir()
        Image.new("L", (8, 8), shade).save(tmp_path / site / "x.png")
        written(tmp_path / site, "train.csv", "image,label\nx.png,0\nx.png,1\n")
    where = config_for(tmp_path / "{site}" / "train.csv", test_fraction=0)
    images = load(where, task=get_task("image-classification").columns).train["image"]
    assert [np.asarray(image).max() for image in images] == [10, 10, 200, 200]


def test_a_data_owner_that_cannot_be_read_is_not_left_out(
    clinics: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = clinics / "clinic south"
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed)  # root reads every folder
    where = str(clinics / "clinic {site}" / "train.csv")
    refused("data.train", where, ["cannot be read", str(closed)], load, config_for(where))


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_no_table_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """datasets hashes a table in memory by pickling it, in several times its size."""

    def refuse(dataset: object) -> str:
        raise AssertionError

    monkeypatch.setattr(datasets.arrow_dataset, "generate_fingerprint", refuse)
    data = load(config_for(write_as(tmp_path, suffix), test_fraction=0.5))
    assert data.test is not None


def test_equal_names_are_one_object() -> None:
    dataset = datasets.Dataset.from_dict(
        {"label": [" a", "b ", None, " a", ""], "number": [1.0, 2.5, float("nan"), 1.0, 3]}
    )
    names = read_names(dataset, "label")
    assert names == ["a", "b", None, "a", None]
    assert names[0] is names[3]
    assert read_names(dataset, "number") == ["1", "2.5", None, "1", "3"]
