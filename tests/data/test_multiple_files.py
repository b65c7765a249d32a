"""Several files as one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest

from fedspan.data import PartitionConfig
from fedspan.data.loading import load
from fedspan.data.partition import partition
from fedspan.errors import FedspanError
from helpers.written_data import CSV, ROWS, config_for, written

Refused = Callable[..., FedspanError]


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


def test_a_data_owner_that_cannot_be_read_is_not_left_out(
    clinics: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = clinics / "clinic south"
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed)  # root reads every folder
    where = str(clinics / "clinic {site}" / "train.csv")
    refused("data.train", where, ["cannot be read", str(closed)], load, config_for(where))
