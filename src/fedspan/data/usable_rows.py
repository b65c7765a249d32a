"""Rows as a task can use them: without lists in its columns, and at the user's request without invalid rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from fedspan.data.columns import FLAGS, TaskColumns, parse_conversation, validate_columns
from fedspan.data.config import DataConfig
from fedspan.data.names import get_arrow_column, get_arrow_table, is_list, make_dataset, read_names
from fedspan.data.numbers import parse_numbers
from fedspan.data.source import Source
from fedspan.errors import FedspanError

if TYPE_CHECKING:
    import datasets


def unwrap_lists(source: Source, config: DataConfig, task: TaskColumns, field: str) -> Source:
    """Return a source whose columns of texts and labels hold no lists.

    A list of texts (tokens, sentences) is joined with spaces. A list of one label is that label; another number of
    labels is none where invalid rows are skipped.
    """
    import datasets

    label, texts = task.get_label_column(config), task.get_joined_columns(config)
    columns: dict[str, tuple[pa.Array, Any]] = {}
    notes: list[str] = []
    for name in source.dataset.column_names:
        kind = source.dataset.features.arrow_schema.field(name).type
        if not is_list(kind) or pa.types.is_nested(kind.value_type):
            continue
        if name == label:
            inner: Any = source.dataset.features[name].feature
            columns[name] = pa.array(_unwrap_labels(source, name, config, field), inner.pa_type), inner
        elif name in texts and (pa.types.is_string(kind.value_type) or pa.types.is_large_string(kind.value_type)):
            values = source.dataset[name][:]
            joined = [None if value is None else " ".join(filter(None, value)) for value in values]
            columns[name] = pa.array(joined, pa.string()), datasets.Value("string")
            notes.append(f"the lists of texts in column {name!r} are joined with spaces")
    if not columns:
        return source
    table, features = get_arrow_table(source.dataset), dict(source.dataset.features)
    for name, (values, feature) in columns.items():
        table = table.set_column(table.column_names.index(name), name, values)
        features[name] = feature
    return replace(source, dataset=make_dataset(table, features), notes=(*source.notes, *notes))


def _unwrap_labels(source: Source, column: str, config: DataConfig, field: str) -> list[object]:
    values: list[list[object] | None] = get_arrow_table(source.dataset.select_columns([column])).column(0).to_pylist()
    invalid_row = next((row for row, value in enumerate(values) if value is not None and len(value) != 1), None)
    if invalid_row is not None and config.invalid == "error":
        count = len(values[invalid_row] or ())
        problem = f"{source.row(invalid_row)} has {count} labels in column {column!r}, where one is expected. "
        problem += f"To leave such rows out, set {field}.invalid: skip."
        raise FedspanError(f"{field}.label", column, problem=problem)
    return [value[0] if value is not None and len(value) == 1 else None for value in values]


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
