"""Removal of rows that a task cannot use, at the user's request, with the number of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from fedspan.data.columns import FLAGS, TaskColumns, parse_conversation, validate_columns
from fedspan.data.config import DataConfig
from fedspan.data.names import get_arrow_column, is_list, read_names
from fedspan.data.numbers import parse_numbers
from fedspan.data.source import Source
from fedspan.errors import FedspanError

if TYPE_CHECKING:
    import datasets


def drop_invalid_rows(
    source: Source,
    config: DataConfig,
    task: TaskColumns,
    field: str,
    part: Literal["train", "test"],
    limit: int | None = None,
) -> Source:
    """Return the rows that have everything that `task` needs.

    Args:
        limit: Number of bytes that may be read to check files that the rows name; None: any number.
    """
    dataset = source.dataset
    invalid = [False] * len(dataset)
    for columns in task.get_required_columns(config, field):
        # A missing column is an error, which the check of the columns reports better.
        values = [_get_values(dataset, column, task, config) for column in columns if column in dataset.column_names]
        if values:
            invalid = [
                is_invalid or not any(row) for is_invalid, row in zip(invalid, zip(*values, strict=True), strict=True)
            ]
    if task.find_valid_rows is not None:
        fits = task.find_valid_rows(source, config, limit)
        invalid = [is_invalid or not is_valid for is_invalid, is_valid in zip(invalid, fits, strict=True)]
    valid = [row for row, is_row_invalid in enumerate(invalid) if not is_row_invalid]
    if not valid:
        problem = f"every row of {source.name} is invalid"
        try:
            validate_columns(source, config, task, field, part)
        except FedspanError as first:
            raise FedspanError(first.field, first.value, problem=f"{problem}: {first.problem}") from first
        raise FedspanError(f"{field}.{part}", source.name, problem=problem)
    return source if len(valid) == len(dataset) else source.select(valid)


def drop_rows_without_value(source: Source, column: str, field: str, part: Literal["train", "test"]) -> Source:
    """Return the rows that have a value in a column."""
    names = read_names(source.dataset, column)
    valid = [row for row, name in enumerate(names) if name is not None]
    if not valid:
        problem = f"no row of {source.name} has a value in column {column!r}"
        raise FedspanError(f"{field}.{part}", source.name, problem=problem)
    return source if len(valid) == len(names) else source.select(valid)


def _get_values(dataset: datasets.Dataset, column: str, task: TaskColumns, config: DataConfig) -> Sequence[object]:
    """Return a column's values, falsy where they cannot be used; images (bytes or path) are not converted to text."""
    values = get_arrow_column(dataset, column)
    has_label_lists = task.is_multi_label and column not in (config.text, config.text_pair)
    if column == config.messages:
        return [parse_conversation(value) is not None for value in values.to_pylist()]
    if pa.types.is_struct(values.type):
        return [value is not None and any(value.values()) for value in values.to_pylist()]
    if is_list(values.type):
        rows = values.to_pylist()
        return [row is not None and (has_label_lists or bool(row)) and None not in row for row in rows]
    names = read_names(dataset, column)
    if has_label_lists and config.label_columns is not None:
        return [name is not None and name.lower() in FLAGS for name in names]
    if has_label_lists:
        return [True] * len(dataset)  # an empty text is no label
    if task.has_numeric_labels and column == (config.label or "label"):
        return [number is not None for number in parse_numbers(names)]
    return names
