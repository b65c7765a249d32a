"""Rows that cannot be used are refused with the option that helps, or skipped and counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedspan.data.config import DataConfig
from fedspan.data.loading import load
from fedspan.errors import FedspanError
from fedspan.tasks.registry import get_task

Refused = Callable[..., FedspanError]


def test_rows_of_every_kind_are_counted(tmp_path: Path) -> None:
    train, test = tmp_path / "train.csv", tmp_path / "test.csv"
    train.write_text("text,label\none,a\n,b\ntwo\nthree,b\nfour,a,more\nfive,\nsix,b\n")
    test.write_text("text,label\nseven,a\neight,c\nnine,b\n")
    data = load(DataConfig(train=str(train), test=str(test), invalid="skip"))
    assert data.train["text"][:] == ["one", "three", "six"]
    assert data.test is not None
    assert data.test["text"][:] == ["seven", "nine"]
    assert data.dropped == 5
    assert data.notes == (
        f"{train}: rows left out (data.invalid: skip): 2 with too many or too few fields, "
        "2 without a text, a label or an answer",
        f"{test}: rows left out (data.invalid: skip): 1 with an unknown label",
    )


def test_rows_are_still_numbered_as_in_the_file(tmp_path: Path, refused: Refused) -> None:
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


def test_every_message_names_the_option(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    for content, task in (
        ("text,label\n,a\none,b\n", "sequence-classification"),
        ("text,label\none,a\ntwo,\n", "sequence-classification"),
        ("text,label\none,a\ntwo\n", "sequence-classification"),
        ("text,label\none,1\ntwo,x\n", "regression"),
        ("text,label\none,1\ntwo,nan\n", "regression"),
    ):
        path.write_text(content)
        with pytest.raises(FedspanError, match=r"To leave such rows out, set data\.invalid: skip"):
            load(DataConfig(train=str(path)), task=get_task(task).columns)


def test_sentences_whose_tags_do_not_fit_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [(["a", "b"], ["O", "B-X"]), (["c", "d"], ["O"]), (["e"], ["Drug"]), (["f"], ["O"]), ([], []), (["g"], None)]
    path.write_text("".join(json.dumps({"tokens": words, "tags": tags}) + "\n" for words, tags in rows))
    columns = get_task("token-classification").columns
    assert columns is not None
    data = load(DataConfig(train=str(path), invalid="skip", test_fraction=0), task=columns)
    assert data.train["tokens"][:] == [["a", "b"], ["f"]]
    assert data.dropped == 4
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(
        FedspanError, match=r"row 2 of .* has 2 words and 1 tags\. To leave such rows out, set data\.invalid: skip"
    ):
        load(DataConfig(train=str(path), test_fraction=0), task=columns)
