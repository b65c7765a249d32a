"""Files of tables and texts: formats, folders, patterns, several files as one, and columns of numbers and lists."""

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedspan.data import PartitionConfig
from fedspan.data.config import DataConfig
from fedspan.data.files import read_source
from fedspan.data.json_files import read_json
from fedspan.data.loading import load
from fedspan.data.multiple_files import match_paths
from fedspan.data.names import find_combined_labels, find_separator
from fedspan.data.numbers import is_ambiguous, parse_numbers
from fedspan.data.partition import partition
from fedspan.data.source import Source, read_beginning
from helpers import refusals
from helpers.refusals import Refused
from helpers.written_data import CSV, ROWS, config_for, written


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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip), min_size=2, max_size=5))
@example(["two\u2028lines", "and\x85two\r\n"])
def test_any_text_survives_jsonl(tmp_path: Path, texts: list[str]) -> None:
    lines = "\n".join(json.dumps({"text": text, "label": row}, ensure_ascii=False) for row, text in enumerate(texts))
    assert load(config_for(written(tmp_path, "t.jsonl", lines), test_fraction=0)).train["text"][:] == texts


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_no_table_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """datasets hashes a table in memory by pickling it, in several times its size."""
    monkeypatch.setattr(datasets.arrow_dataset, "generate_fingerprint", Mock(side_effect=AssertionError))
    data = load(config_for(write_as(tmp_path, suffix), test_fraction=0.5))
    assert data.test is not None


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


def source(count: int = 6, **facts: object) -> Source:
    return Source(datasets.Dataset.from_dict({"text": [f"text {row}" for row in range(count)]}), "a.csv", **facts)


def test_rows_count_from_1_below_the_header_with_those_that_were_left_out() -> None:
    assert source().row(0) == "row 1 of a.csv"
    assert source(header=2).row(3) == "row 6 of a.csv"
    assert source(3, header=1, positions=[0, 4, 5]).place(1) == ("a.csv", 6)
    joined = source(files=(("a.csv", 2, 1), ("b.csv", 1, 0), ("c.csv", 3, 2)))
    assert [joined.place(index) for index in range(6)] == [
        ("a.csv", 2),
        ("a.csv", 3),
        ("b.csv", 1),
        ("c.csv", 3),
        ("c.csv", 4),
        ("c.csv", 5),
    ]


def test_selected_rows_keep_their_positions() -> None:
    """Selected once or twice."""
    chosen = source(header=1).select([5, 2, 3])
    assert list(chosen.dataset["text"]) == ["text 5", "text 2", "text 3"]
    assert [chosen.place(index)[1] for index in range(3)] == [7, 4, 5]
    again = chosen.select([1, 0])
    assert list(again.dataset["text"]) == ["text 2", "text 5"]
    assert [again.place(index)[1] for index in range(2)] == [4, 7]


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


@pytest.mark.parametrize("name", ["table.csv", "table.csv.gz"])
def test_a_file_is_read_up_to_a_limit_and_whole_without_one(tmp_path: Path, name: str) -> None:
    """The limit counts unpacked bytes, and a file of just as many is whole."""
    content, path = b"text,label\n" * 1000, tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert read_beginning(path, None) == (content, True)
    assert read_beginning(path, len(content)) == (content, True)
    assert read_beginning(path, len(content) - 1) == (content[:-1], False)
    assert read_beginning(path, 4) == (b"text", False)


def test_what_cannot_be_read_or_unpacked_is_an_error_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_beginning(tmp_path / "missing.csv", 10)
    path = tmp_path / "broken.csv.gz"
    path.write_bytes(gzip.compress(b"text,label\n" * 1000)[:-30] + b"x" * 30)
    with pytest.raises(OSError, match=r"zlib|CRC|inflate"):
        read_beginning(path, None)


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
    assert held.test["site"] == ["north"] * 4 + ["south"] * 5


def test_a_mistake_in_one_of_several_files_is_named_with_its_place(clinics: Path, refused: Refused) -> None:
    where = str(clinics / "clinic {site}" / "train.csv")
    south = clinics / "clinic south" / "train.csv"
    south.write_text("text,label\nfine,a\n,b\n")
    refused("data.train", where, [f"row 3 of {south}"], load, config_for(where, test_fraction=0))
    south.write_text("text,kind\nfine,a\n")
    missing = ["no column named 'label'", f"'label' is left out, because it is not in {south}"]
    refused("data.label", "label", missing, load, config_for(where))
    south.write_text("text,label,room\nfine,a,4\nbetter,b,5\n")
    data = load(config_for(where, test_fraction=0))
    assert data.train.column_names == ["text", "label", "site"]
    assert f"'room' is left out, because it is not in {clinics / 'clinic north' / 'train.csv'}" in data.notes[0]
    whole = str(clinics / "clinic north")
    refused("data.train", whole, ["is a folder", f"by client, as '{whole}/{{client}}.csv'"], load, config_for(whole))
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


def test_a_data_owner_that_cannot_be_read_is_not_left_out(
    clinics: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = clinics / "clinic south"
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed)  # root reads every folder
    where = str(clinics / "clinic {site}" / "train.csv")
    refused("data.train", where, ["cannot be read", str(closed)], load, config_for(where))


def save_texts(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"text of {name}")
    return root


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    root = save_texts(
        tmp_path / "imdb", "pos/1.txt", "pos/2.txt", "neg/1.TXT", "neg/.hidden.txt", "README.txt", "neg/a.pdf"
    )
    data = load(DataConfig(train=str(root), test_fraction=0))
    assert data.labels == ("neg", "pos")
    assert data.train.to_dict() == {
        "text": ["text of neg/1.TXT", "text of pos/1.txt", "text of pos/2.txt"],
        "label": [0, 1, 1],
        "file": ["neg/1.TXT", "pos/1.txt", "pos/2.txt"],
    }
    words = "left out 3 files that are not examples (README.txt, neg/.hidden.txt, neg/a.pdf)"
    assert data.notes[0] == f"{root}: {words}"


def test_a_folder_for_each_domain_gives_natural_clients(tmp_path: Path) -> None:
    names = [f"{site}/{label}/{number}.txt" for site in ("north", "south") for label in "ab" for number in range(3)]
    data = load(DataConfig(train=str(save_texts(tmp_path, *names)), test_fraction=0))
    parts = partition(data.train, PartitionConfig(partitioner="natural", column="domain"), 0)
    assert [client.id for client in parts.clients] == ["north", "south"]


def test_folders_that_are_laid_out_otherwise(tmp_path: Path, refused: Refused) -> None:
    for names, words in (
        (["a/1.txt", "b/c/d/1.txt"], "for all files, got a/1.txt and b/c/d/1.txt"),
        (["train/a/1.txt", "test/a/1.txt"], "it holds the parts test, train; name the folder of one"),
    ):
        root = save_texts(tmp_path / names[0][0], *names)
        refused("data.train", str(root), [words], load, DataConfig(train=str(root)))


def test_a_file_that_is_no_text(tmp_path: Path, refused: Refused) -> None:
    root = save_texts(tmp_path, "a/1.txt", "b/1.txt")
    (root / "a" / "1.txt").write_bytes(b"\xff")
    config = DataConfig(train=str(root), encoding="utf-8")
    refused("data.train", str(root), ["a/1.txt: line 1 is not in utf-8"], load, config)


def test_short_files_that_are_not_unicode_are_in_one_encoding(tmp_path: Path) -> None:
    """Each alone is too short to tell cp1252 from cp1250 or Mac Roman."""
    root = save_texts(tmp_path, *(f"{'ab'[number % 2]}/{number}.txt" for number in range(60)))
    texts = [f"Das Paket {number} ist {word}, é" for number, word in enumerate(["großartig", "schön", "gut"] * 20)]
    for number, text in enumerate(texts):
        (root / "ab"[number % 2] / f"{number}.txt").write_bytes(text.encode("latin-1"))
    data = load(DataConfig(train=str(root), test_fraction=0))
    assert sorted(data.train["text"]) == sorted(texts)
    assert data.notes == (f"{root}: detected encoding cp1252 in 60 of 60 files (data.encoding)",)


NESTED = [
    {"text": f"text {row}", "meta": {"label": "ab"[row % 2], "from": {"site": "xy"[row // 3]}}} for row in range(6)
]


@pytest.mark.parametrize("name", ["t.jsonl", "t.json", "t.parquet"])
def test_fields_inside_fields_are_columns(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "t.parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(NESTED), path)
    else:
        path.write_text(json.dumps(NESTED) if name == "t.json" else "\n".join(map(json.dumps, NESTED)))
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
    with refusals.refused("data.train"):
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


def save_labels(path: Path, labels: list[list[int]]) -> Path:
    names = datasets.ClassLabel(names=["joy", "anger", "fear"])
    features = datasets.Features({"tokens": datasets.List(datasets.Value("string")), "labels": datasets.List(names)})
    rows = {"tokens": [["a", f"word{number}"] for number in range(len(labels))], "labels": labels}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    return path


def test_lists_of_one_label_and_of_tokens(tmp_path: Path) -> None:
    path = save_labels(tmp_path / "t.parquet", [[0], [1], [0], [1]])
    data = load(DataConfig(train=str(path), text="tokens", label="labels", test_fraction=0))
    assert data.train["text"][:] == ["a word0", "a word1", "a word2", "a word3"]
    assert data.labels == ("anger", "joy")
    assert data.train["label"][:] == [1, 0, 1, 0]
    assert data.notes == (f"{path}: the lists of texts in column 'tokens' are joined with spaces",)


def test_lists_of_several_labels_are_refused_or_skipped(tmp_path: Path, refused: Refused) -> None:
    path = save_labels(tmp_path / "t.parquet", [[0], [1, 2], [], [1]])
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


@pytest.mark.parametrize(
    ("texts", "separator"),
    [
        (["a", None, "", "b;c"], ";"),
        (["a,b", "c;d", "e|f"], "|"),  # wherever it stands, the bar comes first
        (["a,b", "c;d"], ";"),
        (["a b", "c"], None),
        ([], None),
    ],
)
def test_a_separator_is_the_first_that_occurs(texts: Sequence[str | None], separator: str | None) -> None:
    assert find_separator(texts) == separator


@pytest.mark.parametrize(
    ("texts", "separator"),
    [
        (["a", "b", "a|b", "b | c"], "|"),  # 3 labels in 4 combinations
        (["Bonn, west", "Ulm, south"], None),  # 4 in 2
        (["a", "b", "c", "a,b", None, ""], ","),  # a fourth of the texts that there are
        (["a", "b", "c", "c", "a,b"], ","),  # a fifth
        (["a", "b", "c", "c", "c", "a,b"], None),  # a sixth
        (["a|", "|a", "a"], None),  # one label alone
        (["a", "b"], None),
    ],
)
def test_many_combinations_of_few_labels_are_lists(texts: Sequence[str | None], separator: str | None) -> None:
    assert find_combined_labels(texts) == separator


@pytest.mark.parametrize(
    ("texts", "numbers"),
    [
        (["1", "-2.5", "1e3", "+.5"], [1, -2.5, 1000, 0.5]),
        (["3,5", "4", "-0,25", "+12,125"], [3.5, 4, -0.25, 12.125]),
        (["1.234,5", "1.234", "12 345,0", "9'000,25", "1\u202f000"], [1234.5, 1234, 12345, 9000.25, 1000]),
        (["0,125", "3,500"], [0.125, 3.5]),
        (["3,500", "4,125"], [None, None]),
        (["1,234,567", "2,5"], [None, None]),
        (["1,234.5", "2,5", "3"], [None, None, 3]),
        (["3,5", "4.5", "x, y"], [3.5, None, None]),
        (["nan", "inf", "", "one", None], [None] * 5),
    ],
)
def test_numbers(texts: list[str | None], numbers: list[float | None]) -> None:
    assert parse_numbers(texts) == numbers


def test_a_column_keeps_its_numbers_if_others_are_left_out() -> None:
    texts = ["3,5", "4,125", "x, y", "4.5"]
    valid = [text for text, number in zip(texts, parse_numbers(texts), strict=True) if number is not None]
    assert parse_numbers(valid) == [3.5, 4.125]


@pytest.mark.parametrize(
    ("text", "expected"), [("3,500", True), ("0,500", False), ("3,50", False), ("1.000,500", False)]
)
def test_ambiguous_commas(text: str, expected: bool) -> None:
    assert is_ambiguous(text) is expected
