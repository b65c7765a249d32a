"""Defaults that a known data set implies for a run: task, metric and the part of an answer that counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from fedspan.data.catalogue import DatasetEntry, list_datasets
from fedspan.errors import FedspanError
from fedspan.tasks.registry import TASKS, get_task


def fill_dataset_defaults(values: object) -> object:
    """Fill a run's configuration with what ``data.dataset`` implies for the values that the user left out.

    Args:
        values: Values that are not validated yet; their other mistakes are reported later.

    Raises:
        FedspanError: If the data set is for another task than the run's.
    """
    if not isinstance(values, Mapping):
        return values
    key = _get_field(values.get("data"), "dataset")
    if not isinstance(key, str):
        return values
    entry = next((entry for entry in list_datasets() if entry.key == key), None)
    if entry is None:
        return values
    task = values.get("task", entry.task)
    if task != entry.task and isinstance(task, str) and task in TASKS:
        raise FedspanError("task", task, f"{entry.task}, the task of data.dataset {entry.key}")
    content = {**values, "task": task, "evaluation": _fill_evaluation(values.get("evaluation", {}), entry)}
    if entry.prompt is not None and _get_field(values["data"], "messages") is None:
        # The prompt is needed long after the data were read.
        content["data"] = _fill_section(values["data"], {"prompt": entry.prompt})
    return content


def _fill_evaluation(section: Any, entry: DatasetEntry) -> Any:
    defaults = {"answer_pattern": entry.answer_pattern, "max_new_tokens": entry.max_new_tokens}
    if entry.metric in get_task(entry.task).metric_names:
        defaults["metric"] = entry.metric  # exact_match is only measured at the end
    return _fill_section(section, {name: value for name, value in defaults.items() if value is not None})


def _get_field(section: Any, name: str) -> Any:
    return section.get(name) if isinstance(section, Mapping) else getattr(section, name, None)


def _fill_section(section: Any, defaults: Mapping[str, Any]) -> Any:
    """Fill a section, given as values or a model, with defaults for what it leaves out."""
    if isinstance(section, BaseModel):
        missing = {name: value for name, value in defaults.items() if name not in section.model_fields_set}
        return section.model_copy(update=missing)
    if isinstance(section, Mapping):
        return {**defaults, **section}
    return section
