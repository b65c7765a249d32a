"""Excel files: cells of every kind, sheets, files without a header, and the missing extra."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openpyxl
import pytest

from fedspan.data.config import DataConfig
from fedspan.data.files import read_source
from fedspan.data.loading import load
from fedspan.errors import FedspanError

Refused = Callable[..., FedspanError]


def workbook(path: Path, **sheets: Sequence[Sequence[Any]]) -> Path:
    book = openpyxl.Workbook()
    book.remove(book.worksheets[0])
    for name, rows in sheets.items():
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(list(row))
    book.save(path)
    return path


ROWS = [("note", "stars"), ("good, really", 5), ("bad\nin two lines", 1), ("12", 5), ("so so", 3)]


def test_a_sheet_is_a_table(tmp_path: Path) -> None:
    path = workbook(tmp_path / "t.xlsx", Reviews=ROWS)
    data = load(DataConfig(train=str(path), text="note", label="stars", test_fraction=0))
    assert data.train["text"][:] == ["good, really", "bad\nin two lines", "12", "so so"]
    assert data.labels == ("1", "3", "5")
    assert data.notes == ()


def test_cells_of_every_kind(tmp_path: Path) -> None:
    when = datetime.datetime(2026, 11, 24, 8, 30)
    path = workbook(tmp_path / "t.xlsx", S=[("n", "x", "when", "ok"), (1, 1.5, when, True), (None, 2, when, None), ()])
    dataset = read_source(DataConfig(train=str(path)), "train", "data").dataset
    assert dataset.to_dict() == {
        "n": [1, None],
        "x": [1.5, 2.0],
        "when": ["2026-11-24T08:30:00"] * 2,
        "ok": [True, None],
    }


def test_the_first_sheet_or_the_one_that_is_named(tmp_path: Path, refused: Refused) -> None:
    path = workbook(tmp_path / "t.xlsx", First=[("text", "label"), ("a", "x"), ("b", "y")], Second=ROWS)
    data = load(DataConfig(train=str(path), test_fraction=0))
    assert data.notes == (f"{path}: sheet 'First' of First, Second (data.sheet)",)
    config = DataConfig(train=str(path), sheet="Second", text="note", label="stars", test_fraction=0)
    assert len(load(config).train) == 4
    wrong = DataConfig(train=str(path), sheet="Secnod")
    refused("data.sheet", "Secnod", ["has no sheet", "Did you mean 'Second'"], load, wrong)


def test_a_sheet_without_a_header(tmp_path: Path) -> None:
    path = workbook(tmp_path / "t.xlsx", S=ROWS[1:])
    data = load(DataConfig(train=str(path), text="column_1", label="column_2", test_fraction=0))
    assert len(data.train) == 4
    assert "the first line looks like an example" in data.notes[0]
    named = load(DataConfig(train=str(path), columns=["text", "label"], test_fraction=0))
    assert named.train.column_names == ["text", "label"]
    with pytest.raises(FedspanError, match="expected 3 columns, got 2"):
        load(DataConfig(train=str(path), columns=["text", "label", "more"]))


def test_without_the_extra(tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    path = workbook(tmp_path / "t.xlsx", S=ROWS)
    monkeypatch.setitem(sys.modules, "python_calamine", None)
    refused("data.train", str(path), ["pip install 'fedspan[excel]'"], load, DataConfig(train=str(path)))


def test_a_file_that_is_no_workbook(tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "t.xlsx"
    path.write_text("no workbook")
    refused("data.train", str(path), ["cannot be read as xlsx"], load, DataConfig(train=str(path)))


def test_title_rows_above_the_column_names(tmp_path: Path, refused: Refused) -> None:
    path = workbook(tmp_path / "t.xlsx", S=[("Survey 2026", None), ("confidential",), (), *ROWS])
    source = read_source(DataConfig(train=str(path)), "train", "data")
    assert source.dataset.column_names == ["note", "stars"]
    assert "left out above the column names: 'Survey 2026', 'confidential'" in source.notes[0]
    assert source.row(0) == f"row 4 of {path}"
    named = read_source(DataConfig(train=str(path), header=True), "train", "data")
    assert named.dataset.column_names == ["Survey 2026", "column_2"]
