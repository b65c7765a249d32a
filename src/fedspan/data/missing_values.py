"""Leaving out the rows that lack something, where a user asks for it."""

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
    """The rows that have all that `task` needs, and how many do not.

    A row of conversations is taken as it is: what is wrong with one is no blank.

    Raises:
        FedspanError: nothing is left.
    """
    dataset = source.dataset
    blank = [False] * len(dataset)
    for columns in _needed(config, task, field):
        # One that is not there is an error, which whoever checks the columns says better.
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
    """What a row has there, as something false if that is nothing; images, bytes or path, are not turned into text."""
    values = arrow_column(dataset, column)
    if not pa.types.is_struct(values.type):
        return names_of(dataset, column)
    return [value is not None and any(value.values()) for value in values.to_pylist()]


def _needed(config: DataConfig, task: TaskName, field: str) -> list[tuple[str, ...]]:
    """Groups of columns of which a row needs at least one each."""
    if task == "causal-lm":
        if config.messages is not None or config.prompt is None:
            return []
        groups = [template_of(config.prompt, f"{field}.prompt").columns, (config.answer,)]
        return groups if config.label is None else [*groups, (config.label,)]
    if task == "image-classification":
        return [(config.image,), (config.label or "label",)]
    columns = (config.text, config.text_pair, config.label or "label")
    return [(column,) for column in columns if column is not None]
