"""The notes that fedspan writes next to a trained model (fedspan.json), read and validated like any user input."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedspan.config.validation_errors import first_mistake
from fedspan.errors import FedspanError
from fedspan.models.export import NOTES
from fedspan.runs.task_setup import PROBLEMS, Facts
from fedspan.tasks.metrics import METRICS_OF

__all__ = ["NOTES", "facts_of", "read_notes"]

_FACTS = {field.name for field in dataclasses.fields(Facts)}
_NOTED = {*_FACTS, "base_model", "client", "kept"}


def read_notes(folder: Path) -> dict[str, Any]:
    """Read the content of a model's fedspan.json.

    Raises:
        FedspanError: If it is missing, is not a JSON object, or lacks an entry that is needed to use the model.
    """
    path = folder / NOTES
    try:
        notes = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FedspanError(str(path), str(error), "the notes that fedspan wrote beside the model") from None
    if not isinstance(notes, dict) or not set(notes) >= _NOTED:
        found = sorted(notes) if isinstance(notes, dict) else notes
        raise FedspanError(str(path), found, f"an object with {', '.join(sorted(_NOTED))}")
    kept = notes["kept"]
    wrong = {
        "base_model": not isinstance(notes["base_model"], str) or not notes["base_model"],
        "client": not isinstance(notes["client"], str | None),
        "kept": not isinstance(kept, list) or not all(isinstance(name, str) for name in kept),
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise FedspanError(f"{path}.{name}", notes[name], "what fedspan wrote there; this file was changed")
    return notes


def facts_of(folder: Path, notes: dict[str, Any]) -> Facts:
    """Extract the facts about the model's task from the notes.

    Raises:
        FedspanError: If a value is one that no run can have.
    """
    path = folder / NOTES
    try:
        facts = TypeAdapter(Facts).validate_python({name: notes[name] for name in _FACTS})
    except ValidationError as error:
        raise first_mistake(error, str(path)) from None
    try:
        re.compile(facts.answer_pattern or "")
        pattern = True
    except (re.error, OverflowError, RecursionError):
        pattern = False
    right = {
        "labels": not PROBLEMS[facts.task].classifies or len(set(facts.labels)) == len(facts.labels) >= 2,
        "max_length": facts.max_length >= 1,
        "max_new_tokens": facts.max_new_tokens >= 1,
        "metric": facts.metric in METRICS_OF[facts.task],
        "answer_pattern": pattern,
        "image_size": facts.image_size is None or facts.image_size >= 1,
    }
    for name, is_right in right.items():
        if not is_right:
            raise FedspanError(f"{path}.{name}", notes[name], "what fedspan wrote there; this file was changed")
    return facts
