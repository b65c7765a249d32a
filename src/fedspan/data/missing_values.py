"""Removal of rows with missing values, at the user's request."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import datasets
import pyarrow as pa

from fedspan.data.columns import TaskName
from fedspan.data.config import DataConfig
from fedspan.data.names import arrow_column, names_of
from fedspan.data.source import Source
from fedspan.data.templates import template_of
from fedspan.errors import FedspanError

__all__ = ["without_blanks"]


def without_blanks(
    source: Source, config: DataConfig, task: TaskName, field: str, part: Literal["train", "test"]
) -> tuple[Source, int]:
    """Return the rows that have everything that `task` needs, and the number of the others.

    A row of conversations is never removed: a malformed conversation is not a missing value.

    Raises:
        FedspanError: If no row is left.
    """
    dataset = source.dataset
    blank = [False] * len(dataset)
    for columns in _needed(config, task, field):
        # A missing column is an error, which the check of the columns reports better.
        values = [_values(dataset, column) for column in columns if column in dataset.column_names]
        if values:
            blank = [was or not any(row) for was, row in zip(blank, zip(*values, strict=True), strict=True)]
    kept = [row for row, lacks in enumerate(blank) if not lacks]
    if not kept:
        raise FedspanError(f"{field}.{part}", source.name, "at least one row that lacks nothing")
    if len(kept) == len(dataset):
        return source, 0
    return dataclasses.replace(source, dataset=dataset.select(kept), kept=kept), len(dataset) - len(kept)


def _values(dataset: datasets.Dataset, column: str) -> Sequence[object]:
    """Return a column's values, falsy where missing; images (bytes or path) are not converted to text."""
    values = arrow_column(dataset, column)
    if not pa.types.is_struct(values.type):
        return names_of(dataset, column)
    return [value is not None and any(value.values()) for value in values.to_pylist()]


def _needed(config: DataConfig, task: TaskName, field: str) -> list[tuple[str, ...]]:
    """Return groups of columns; a row needs a value in at least one column of each group."""
    if task == "causal-lm":
        if config.messages is not None or config.prompt is None:
            return []
        groups = [template_of(config.prompt, f"{field}.prompt").columns, (config.answer,)]
        return groups if config.label is None else [*groups, (config.label,)]
    if task == "image-classification":
        return [(config.image,), (config.label or "label",)]
    columns = (config.text, config.text_pair, config.label or "label")
    return [(column,) for column in columns if column is not None]
