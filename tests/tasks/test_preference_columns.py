"""Columns of preference pairs: how they are read, checked and found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from fedspan import FedspanError
from fedspan.config import parse_config
from fedspan.config.column_inference import infer_data
from fedspan.data.loading import load
from fedspan.data.source import Source
from fedspan.tasks.preference_columns import split_preference
from helpers import tiny_preferences
from helpers.tiny_preferences import BAD, GOOD, ROWS, USER


def test_prompts_that_both_answers_begin_with_are_found_as_trl_finds_them() -> None:
    extract = pytest.importorskip("trl.data_utils").extract_prompt
    pairs = [("What is it? Blue.", "What is it? Green."), ("no", "yes"), ("one two", "one three")]
    for chosen, rejected in pairs:
        found = split_preference(None, chosen, rejected)
        expected = extract({"chosen": chosen, "rejected": rejected})
        assert found == {
            "text": expected["prompt"],
            "history": "[]",
            **{k: expected[k] for k in ("chosen", "rejected")},
        }
    assert split_preference(None, "ab", "abc d") is None  # TRL takes "a" for the prompt


def test_pairs_are_named_and_skipped_by_row(decoders: Path, tmp_path: Path) -> None:
    rows = [
        *ROWS,
        {"prompt": "Q: a1", "chosen": "b1", "rejected": "b1"},
        {"prompt": None, "chosen": "a1", "rejected": "b1"},
    ]
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = tiny_preferences.settings(decoders, tmp_path)
    values["data"] = {"train": str(file), "test_fraction": 0}
    config = parse_config(values)
    with pytest.raises(
        FedspanError, match=r"row 6 .*no two different answers to one prompt in the columns chosen, rej"
    ):
        load(config.data, task=config.task_columns)
    config = parse_config({**values, "data": {**values["data"], "invalid": "skip"}})
    loaded = load(config.data, task=config.task_columns)
    assert len(loaded.train) == len(ROWS) + 1  # a prompt may be empty, two equal answers are no pair
    assert any("rows left out" in note for note in loaded.notes)


def test_messages_need_the_chat_template(decoders: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"chosen": [USER, GOOD], "rejected": [USER, BAD]}) + "\n")
    values = tiny_preferences.settings(decoders, tmp_path)
    config = parse_config({**values, "data": {"train": str(file), "test_fraction": 0}})
    with pytest.raises(FedspanError, match=r"`data\.chat`: the answers of .* are lists of messages") as caught:
        load(config.data, task=config.task_columns)
    assert caught.value.expected == "true"


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [([USER, GOOD], [USER, GOOD]), ([USER, GOOD], [BAD]), ([GOOD], [BAD]), ([USER, GOOD], "c1"), ("", "c1"), (None, 3)]
    + [([USER, GOOD], [USER, {"role": "assistant", "content": content}]) for content in (None, [{"text": "a"}], 3)],
)
def test_what_is_no_pair(chosen: Any, rejected: Any) -> None:
    assert split_preference(None, chosen, rejected) is None


def test_a_prompt_s_column_that_does_not_exist_is_named_with_skipping_too(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {"train": str(path), "invalid": "skip", "roles": {"prompt": "question"}}
    config = parse_config({"task": "preference", "model": {"name": "unused"}, "data": data})
    with pytest.raises(FedspanError, match=r"roles\.prompt.*question"):
        load(config.data, task=config.task_columns)


def test_columns_are_inferred_by_trls_names() -> None:
    def infer(rows: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
        inferred = infer_data(
            Source(datasets.Dataset.from_list(rows), "pairs"),
            "pairs",
            None,
            dict.fromkeys(("text", "label", "answer", "by")),
        )
        return inferred.task, dict(inferred.data)

    assert infer(ROWS * 2) == ("preference", {})
    assert infer([{"chosen": [USER, GOOD], "rejected": [USER, BAD]}] * 4) == ("preference", {"chat": True})
