"""The settings of a task that a trained model needs: collected from a config, and read from the model's notes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fedspan.config import parse_config
from fedspan.errors import FedspanError
from fedspan.runs.task_setup import collect_task_settings, parse_task_settings, read_notes
from fedspan.tasks.settings import TaskSettings


def settings(**changes: Any) -> TaskSettings:
    config = parse_config({"data": {"train": "train.csv"}, **changes})
    return collect_task_settings(config, ("a", "b"), 64, None)


def written(folder: Path, **changes: Any) -> dict[str, Any]:
    notes = {**asdict(settings()), "base_model": "base", "client": None, "kept": ["classifier"], **changes}
    (folder / "fedspan.json").write_text(json.dumps(notes))
    return notes


def test_settings_are_those_of_the_config_and_of_the_model() -> None:
    found = settings(evaluation={"max_new_tokens": 9}, model={"quantization": "int8"})
    assert (found.task, found.labels, found.max_length) == ("sequence-classification", ("a", "b"), 64)
    assert (found.metric, found.max_new_tokens, found.quantization) == ("accuracy", 9, "int8")
    assert settings(evaluation={"metric": "macro_f1"}).metric == "macro_f1"
    assert settings(task="causal-lm").labels == ()  # whatever column of labels its data have


def test_notes_come_back_as_they_were_written(tmp_path: Path) -> None:
    notes = written(tmp_path)
    assert read_notes(tmp_path) == json.loads(json.dumps(notes))
    assert parse_task_settings(tmp_path, read_notes(tmp_path)) == settings()


@pytest.mark.parametrize("text", [None, "", "{", "\xff", "[" * 99999])
def test_a_file_that_cannot_be_read_is_named(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "fedspan.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(FedspanError, match="the file does not hold what fedspan wrote beside the model") as caught:
        read_notes(tmp_path)
    assert caught.value.field == str(tmp_path / "fedspan.json")


@pytest.mark.parametrize("content", ["[]", "{}", '{"base_model": "a"}'])
def test_a_file_without_what_a_model_needs_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "fedspan.json").write_text(content)
    with pytest.raises(FedspanError, match=r"an object with .*base_model.*kept"):
        read_notes(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("base_model", ""), ("base_model", 3), ("revision", 3), ("client", 3), ("kept", "classifier"), ("kept", [1])],
)
def test_entries_of_another_kind_are_named(name: str, value: object, tmp_path: Path) -> None:
    written(tmp_path, **{name: value})
    with pytest.raises(FedspanError, match="the file was changed after fedspan wrote it") as caught:
        read_notes(tmp_path)
    assert caught.value.field == f"{tmp_path / 'fedspan.json'}.{name}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("labels", ["a"]),
        ("labels", ["a", "a"]),
        ("max_length", 0),
        ("max_new_tokens", 0),
        ("metric", "pearson"),
        ("answer_pattern", "("),
        ("label_separator", ""),
        ("image_size", 0),
    ],
)
def test_settings_that_no_run_has_are_named(name: str, value: object, tmp_path: Path) -> None:
    written(tmp_path, **{name: value})
    with pytest.raises(FedspanError) as caught:
        parse_task_settings(tmp_path, read_notes(tmp_path))
    assert caught.value.field.startswith(f"{tmp_path / 'fedspan.json'}")
    assert caught.value.field.endswith(name)
