"""Dialects of delimited files: what is detected is what the file was written in."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedspan.data.config import DataConfig
from fedspan.data.dialects import detect_dialect, has_header
from fedspan.data.loading import load
from fedspan.errors import FedspanError
from helpers.refusals import refused

REVIEWS = ["Great film, really", "Too long; too slow", "I liked it | mostly", 'He said "no"', "Fine", "A\tB test, ok"]
LABELS = ["pos", "neg", "pos", "neg", "pos", "neg"]


def written(rows: list[list[str]], delimiter: str, end: str = "\n", **style: Any) -> str:
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter, lineterminator=end, **style).writerows(rows)
    return out.getvalue()


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("name", ["t.csv", "t.txt"])
def test_a_file_in_any_delimiter_and_line_end(tmp_path: Path, delimiter: str, end: str, name: str) -> None:
    rows = [["review", "stars"], *([text, label] for text, label in zip(REVIEWS, LABELS, strict=True))]
    (tmp_path / name).write_text(written(rows, delimiter, end), newline="")
    config = DataConfig(train=str(tmp_path / name), text="review", label="stars", test_fraction=0)
    data = load(config)
    assert data.train["text"][:] == REVIEWS
    assert data.labels == ("neg", "pos")
    assert len(data.notes) == (delimiter != ",")
    assert all("data.delimiter" in note for note in data.notes)


@pytest.mark.parametrize("quoting", [csv.QUOTE_ALL, csv.QUOTE_MINIMAL])
def test_a_tsv_in_quotes_is_read_without_them(quoting: Any) -> None:
    rows = [["text", "label"], *([f"{text}\tmore", label] for text, label in zip(REVIEWS, LABELS, strict=True))]
    found = detect_dialect(written(rows, "\t", quoting=quoting), tabs=True)
    assert (found.delimiter, found.quoting, found.names) == ("\t", "double", ("text", "label"))


def test_single_quotes_in_a_tsv_are_text() -> None:
    found = detect_dialect('text\tlabel\n"one\ta\ntwo "\tb\n"both"\ta\nnone\tb\n', tabs=True)
    assert found.quoting == "none"


def test_fields_in_single_quotes() -> None:
    rows = [["text", "label"], *([text, label] for text, label in zip(REVIEWS, LABELS, strict=True))]
    found = detect_dialect("text,label\n'a, b',x\n'c, d, e',y\n'f',x\n", tabs=False)
    assert (found.delimiter, found.quoting) == (",", "single")
    assert detect_dialect(written(rows, ","), tabs=False).quoting == "double"
    assert detect_dialect("text,label\n'a b',x\n'it''s d',y\n", tabs=False).quoting == "single"
    assert detect_dialect("text,label\nit's late,x\nwe don't know,y\n", tabs=False).quoting == "double"


def test_a_csv_whose_quotes_are_text() -> None:
    found = detect_dialect('text,label\n"one,a\ntwo,b\nthree,a\nfour,b\n', tabs=False)
    assert (found.delimiter, found.quoting) == (",", "none")


def test_the_line_that_excel_writes_first(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("sep=;\ntext;label\na, b;x\nc, d;y\n")
    data = load(DataConfig(train=str(tmp_path / "t.csv"), test_fraction=0))
    assert data.train.to_dict() == {"text": ["a, b", "c, d"], "label": [0, 1]}


def test_what_is_named_is_not_detected() -> None:
    sample = "text;label,more\na;b,c\nd;e,f\n"
    assert detect_dialect(sample, tabs=False).delimiter == ","
    assert detect_dialect(sample, tabs=False, delimiter=";", header=False).names == ("column_1", "column_2")
    assert detect_dialect("'a;b';c\n'd;e';f\n", tabs=False, quoting="single").delimiter == ";"


@pytest.mark.parametrize(
    ("lines", "header"),
    [
        ("text,label\none,a\ntwo,b", True),
        ("note,kind\none,a\ntwo,b", True),
        ("great,yes\nbad,no\nfine,yes\nawful,no\nlovely,yes", False),
        ("review,stars\ngreat,5\nbad,1\nfine,4", True),
        ("great,5\nbad,1\nfine,4", False),
        ("0,1\ngreat,5\nbad,1\nfine,4", True),  # pandas' names of columns without any
        (",text,label\n0,one,a\n1,two,b", True),  # pandas' index
        ("the food was cold and late,x\nwe waited for an hour at least,y\nnice,z", False),
        ("What did you think of our service?,How many stars?\ngood,5\nbad,1\nbad,2", True),
        ("2019,2020\ngood,5\nbad,1\nbad,2", False),
        ("question,answer\nwho?,me\nwhat?,that", True),
        ("text,label", True),
        ("message,spam\ncall me,ham\nwin now,spam\nhello,ham\nfree money,spam", True),  # named as one of its values
        ("email,spam\ncall me,ham\nwin now,spam\nhello,ham\nfree money,spam", True),
        ("what is it,question\nwho,question\nno,comment\nyes,comment\nhow,question", False),
    ],
)
def test_whether_the_first_line_is_a_header(lines: str, header: bool) -> None:
    assert has_header([line.split(",") for line in lines.splitlines()]) is header


def test_a_first_line_with_a_column_that_the_user_names_is_a_header() -> None:
    rows = [line.split(",") for line in ("great,yes", "bad,no", "fine,yes", "awful,no", "lovely,yes")]
    assert has_header(rows, {"great"})
    assert not has_header(rows, {"text"})


def test_columns_without_a_header_are_named_by_position(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("great,yes\nbad,no\nfine,yes\nawful,no\nlovely,yes\n")
    data = load(DataConfig(train=str(path), text="column_1", label="column_2", test_fraction=0))
    assert data.train["text"][:] == ["great", "bad", "fine", "awful", "lovely"]
    assert "the first line looks like an example: the columns are named column_1, column_2" in data.notes[0]
    named = load(DataConfig(train=str(path), text="great", label="yes", header=True, test_fraction=0))
    assert named.train["text"][:] == ["bad", "fine", "awful", "lovely"]
    assert named.notes == ()


FIELDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12)
LONG = st.lists(st.tuples(FIELDS, FIELDS), min_size=4, max_size=9)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(LONG, st.sampled_from([",", ";", "\t", "|"]), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_rows_written_in_quotes_are_read_again(
    tmp_path: Path, drawn: list[tuple[str, str]], delimiter: str, end: str, bom: bool
) -> None:
    """Every field is in quotes, as a spreadsheet can write it, so that any text is possible, line ends included."""
    rows = [["text", "label"], *([f"w {text}\n{more}", "ab"[at % 2]] for at, (text, more) in enumerate(drawn))]
    path = tmp_path / "t.csv"
    path.write_text(
        written(rows, delimiter, end, quoting=csv.QUOTE_ALL), newline="", encoding="utf-8-sig" if bom else "utf-8"
    )
    train = load(DataConfig(train=str(path), test_fraction=0)).train
    assert train["text"][:] == [row[0] for row in rows[1:]]


_ROWS = [f"{text.replace(',', ' ')},{label}" for text, label in zip(REVIEWS, LABELS, strict=True)]


@pytest.mark.parametrize("kind", ["csv", "txt"])
@pytest.mark.parametrize("headed", ["train", "test"])
def test_a_header_in_one_of_two_files(tmp_path: Path, headed: str, kind: str) -> None:
    """The columns of the file without one are those of the other one, by position."""
    for part in ("train", "test"):
        lines = ["remark,verdict"] * (part == headed) + _ROWS
        (tmp_path / f"{part}.{kind}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    columns = {"text": "remark", "label": "verdict"} if headed == "train" else {"text": "column_1", "label": "column_2"}
    config = DataConfig(train=str(tmp_path / f"train.{kind}"), test=str(tmp_path / f"test.{kind}"), **columns)
    data = load(config)
    assert data.test["text"][:] == data.train["text"][:] == [row.partition(",")[0] for row in _ROWS]
    (note,) = [one for one in data.notes if one.startswith(str(tmp_path / "test")) and "by position" in one]
    assert f"of {tmp_path / 'train'}.{kind} by position" in note
    assert "remark, verdict" in note
    assert not [one for one in data.notes if "data.header: true" in one and one.startswith(str(tmp_path / "test"))]


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_header_that_would_be_read_as_an_example_is_refused(tmp_path: Path, part: str) -> None:
    for one in ("train", "test"):
        lines = ["text,label"] * (one == part) + _ROWS
        (tmp_path / f"{one}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    columns: dict[str, Any] = {"text": "column_1", "label": "column_2", "header": False}
    config = DataConfig(train=str(tmp_path / "train.csv"), test=str(tmp_path / "test.csv"), **columns)
    with refused("data.header", f"{part}.csv names the columns: text, label. Leave this field out"):
        load(config)


def test_other_numbers_of_columns_are_not_matched_by_position(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("\n".join(["remark,verdict", *_ROWS]) + "\n", encoding="utf-8")
    (tmp_path / "test.csv").write_text("\n".join(f"{row},{row}" for row in _ROWS) + "\n", encoding="utf-8")
    config = DataConfig(
        train=str(tmp_path / "train.csv"), test=str(tmp_path / "test.csv"), text="remark", label="verdict"
    )
    with pytest.raises(FedspanError, match=r"no column named 'remark' in .*test\.csv"):
        load(config)
    (tmp_path / "test.csv").write_text("\n".join(_ROWS) + "\n", encoding="utf-8")
    with pytest.raises(FedspanError, match=r"leave data\.header out, or insert a line"):
        load(config.model_copy(update={"header": True}))


@pytest.mark.parametrize("titles", ["Survey 2026, part 1;;\n", "# exported by «tool»\n\n", "One;;\nTwo;;\n"])
def test_title_rows_above_the_header(titles: str) -> None:
    table = "id;comment;category\n1;good;a\n2;bad;b\n3;so so;a\n"
    found = detect_dialect(titles + table, tabs=False)
    assert (found.delimiter, found.header, found.names) == (";", True, ("id", "comment", "category"))
    assert found.titles == tuple(line.rstrip(";") for line in titles.split("\n") if line)
    assert (titles + table).encode()[found.skip :].strip() == table.encode().strip()


@pytest.mark.parametrize(
    "text",
    [
        "late,\nearly,a\nlate,b\nearly,a\nlate,b\n",  # a first example without a label
        "On Monday it was late,\n" + "On Tuesday it was early,a\nOn Friday it was late,b\n" * 20,
        "text,\nlate,a\nearly,b\nlate,a\n",  # an unnamed column
        ",text\n0,late\n1,early\n",  # an index
        "Survey,\nlate,\n",
    ],
)
def test_a_first_row_with_one_value_that_is_no_title(text: str) -> None:
    assert detect_dialect(text, tabs=False).titles == ()


def test_the_columns_that_a_user_names_are_no_title() -> None:
    text = "remark,\nid,label\n1,a\n2,b\n"
    assert detect_dialect(text, tabs=False).titles == ("remark",)
    assert detect_dialect(text, tabs=False, requested={"remark"}).titles == ()
    assert detect_dialect(text, tabs=False, header=True).names == ("remark", "")
