"""The settings of a task that a trained model needs: collected from a run, and read from the model's fedspan.json."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from fedspan.config import RunConfig
from fedspan.config.validation_errors import convert_validation_errors
from fedspan.data.config import DataConfig
from fedspan.data.dataset_defaults import fill_data_defaults
from fedspan.data.files import IN_MEMORY
from fedspan.errors import FedspanError
from fedspan.models.export import BASE_DIGEST, NOTES, require_small_notes
from fedspan.models.pooling import Pooling
from fedspan.tasks.causal import can_attend_across_examples
from fedspan.tasks.registry import get_task
from fedspan.tasks.settings import TaskSettings

_COLUMNS = ("text", "text_pair", "image", "label", "label_columns", "label_separator", "answer", "messages", "roles")
"""Options of the section ``data`` that describe the columns of examples."""
_UNNAMED = ("text_pair", "label_columns", "label_separator")


def collect_columns(data: DataConfig, label_separator: str | None) -> dict[str, Any]:
    """Return the options that describe the columns of a run's examples.

    Args:
        label_separator: The separator of several labels in a text, as it was detected; None: there is none.
    """
    complete = fill_data_defaults(data).model_copy(update={"label_separator": label_separator})
    return {name: value for name in _COLUMNS if (value := getattr(complete, name))}


def collect_task_settings(
    config: RunConfig, labels: tuple[str, ...], max_length: int, pooling: Pooling | None
) -> TaskSettings:
    """Collect the settings of a run's task."""
    data, evaluation, task = config.data, config.evaluation, get_task(config.task)
    return TaskSettings(
        task=config.task,
        labels=labels if task.has_labels else (),
        max_length=max_length,
        metric=evaluation.metric or task.metric_names[0],
        chat=data.chat,
        system=data.system,
        prompt=data.prompt,
        max_new_tokens=evaluation.max_new_tokens,
        answer_pattern=evaluation.answer_pattern,
        quantization=config.model.quantization,
        image_size=config.model.image_size,
        pooling=pooling,
        # What has no default, and so is the user's; a run that reads examples records all (``collect_columns``).
        columns={name: value for name in _UNNAMED if (value := getattr(data, name)) is not None},
        options=config.task_options,
    )


def require_packing(config: RunConfig, model: nn.Module, device: torch.device) -> None:
    """Check that a model keeps packed examples apart, if the run packs them.

    Raises:
        FedspanError: If it does not. OPT, for example, builds its attention mask without regard to positions.
    """
    if get_task(config.task).is_generative and config.data.packing and can_attend_across_examples(model, device):
        kind = type(model).__name__
        raise FedspanError(
            "data.packing", True, "false", problem=f"the attention of {kind} does not separate packed examples"
        )


_FIELDS = {field.name for field in dataclasses.fields(TaskSettings)}


_REQUIRED = {*_FIELDS, "base_model", "client", "kept"} - {"options"}  # added later


def read_notes(folder: Path) -> dict[str, Any]:
    """Read the content of a model's fedspan.json.

    Returns:
        The entries of the file by their names.

    Examples:
        >>> fedspan.read_notes(Path("runs/first/adapter"))["task"]

    Raises:
        FedspanError: If it is missing, is not a JSON object, or lacks an entry that is needed to use the model, or if
            it or the adapter's config is too large.
    """
    require_small_notes(folder)
    path = folder / NOTES
    try:
        notes = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FedspanError(
            str(path), str(error), problem=f"the file does not hold what fedspan wrote beside the model ({error})"
        ) from None
    if not isinstance(notes, dict) or not set(notes) >= _REQUIRED:
        fields = sorted(notes) if isinstance(notes, dict) else notes
        raise FedspanError(str(path), fields, f"an object with {', '.join(sorted(_REQUIRED))}")
    round_number = notes["kept"]
    failures = {
        "base_model": not isinstance(notes["base_model"], str) or not notes["base_model"],
        "revision": not isinstance(notes.get("revision"), str | None),
        BASE_DIGEST: not isinstance(notes.get(BASE_DIGEST), str | None),
        "client": not isinstance(notes["client"], str | None),
        "kept": not isinstance(round_number, list) or not all(isinstance(name, str) for name in round_number),
    }
    for name, is_wrong in failures.items():
        if is_wrong:
            raise FedspanError(f"{path}.{name}", notes[name], problem="the file was changed after fedspan wrote it")
    return notes


def parse_task_settings(folder: Path, notes: dict[str, Any]) -> TaskSettings:
    """Parse the settings of a model's task."""
    path = folder / NOTES
    with convert_validation_errors(str(path)):
        task_settings = TypeAdapter(TaskSettings).validate_python(
            {name: notes[name] for name in _FIELDS if name in notes}
        )
    try:
        re.compile(task_settings.answer_pattern or "")
        pattern = True
    except (re.error, OverflowError, RecursionError):
        pattern = False
    task = get_task(task_settings.task, f"{path}.task")
    task.parse_options(task_settings.options, f"{path}.options")
    checks = {
        "labels": not task.has_labels or len(set(task_settings.labels)) == len(task_settings.labels) >= 2,
        "max_length": task_settings.max_length >= 1,
        "max_new_tokens": task_settings.max_new_tokens >= 1,
        "metric": task_settings.metric in task.metric_names,
        "answer_pattern": pattern,
        "columns": _has_valid_columns(task_settings.columns),
        "image_size": task_settings.image_size is None or task_settings.image_size >= 1,
    }
    for name, is_valid in checks.items():
        if not is_valid:
            raise FedspanError(f"{path}.{name}", notes[name], problem="the file was changed after fedspan wrote it")
    return task_settings


def _has_valid_columns(columns: Mapping[str, Any]) -> bool:
    """Check whether options describe columns as a section ``data`` does."""
    try:
        DataConfig.model_validate({"train": IN_MEMORY, **columns, "chat": "messages" in columns})
    except ValidationError:
        return False
    return columns.keys() <= set(_COLUMNS)
