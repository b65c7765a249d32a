"""Lists in the columns of a task: texts in pieces, and labels as lists of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa

from fedspan.data.columns import TaskColumns
from fedspan.data.config import DataConfig
from fedspan.data.names import get_arrow_table, is_list, make_dataset
from fedspan.data.source import Source
from fedspan.errors import FedspanError


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
