"""Values of a column as names, whatever their type in the file: labels (also several in a text) and natural clients."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedspan.data.numbers import drop_decimal_zero
from fedspan.errors import FedspanError, find_similar

if TYPE_CHECKING:
    from datasets import Dataset

_SOURCE = "source:"
"""Beginning of the names of a source's own columns whose names the task uses for others."""
_ENCODED = (pa.types.is_string, pa.types.is_large_string, pa.types.is_integer, pa.types.is_floating)


def get_arrow_column(dataset: Dataset, column: str) -> pa.ChunkedArray:
    """Return one column of a data set as Arrow stores it, with the data set's number of rows."""
    return cast(pa.Table, dataset.with_format("arrow", columns=[column])[:]).column(column)


def get_arrow_table(dataset: Dataset, rows: slice = slice(None)) -> pa.Table:
    """Return rows of a data set, in its order, as Arrow stores them (images and the like not decoded)."""
    return cast(pa.Table, dataset.with_format("arrow")[rows])


def is_list(kind: pa.DataType) -> bool:
    """Check whether a type of Arrow is one of lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def make_dataset(table: pa.Table, features: Mapping[str, Any] | None = None) -> Dataset:
    """Return a table as a data set, without a copy of it.

    Args:
        features: Types of its columns for ``datasets``; None: those that follow from the table.
    """
    from datasets import Dataset, DatasetInfo, Features

    info = None if features is None else DatasetInfo(features=Features(features))
    # Without a fingerprint, datasets pickles the whole table and hashes it, in several times its memory.
    return Dataset(table, info=info, fingerprint=secrets.token_hex(8))


def take_rows(dataset: Dataset, rows: np.ndarray) -> Dataset:
    """Return some rows as a data set of their own; ``Dataset.select`` looks up every row at each later access."""
    return make_dataset(get_arrow_table(dataset).take(rows), dataset.features)


def trim(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return texts without spaces around them, as large strings."""
    return pc.call_function("utf8_trim_whitespace", [texts.cast(pa.large_string())])


def mark_source_column(column: str) -> str:
    """Return the name under which examples have a column of their source whose own name the task uses for another."""
    return f"{_SOURCE}{column}"


def find_source_column(dataset: Dataset, column: str) -> str | None:
    """Return the name under which examples have a column of their source; None if they have no such column."""
    return next((name for name in (mark_source_column(column), column) if name in dataset.column_names), None)


def list_source_columns(dataset: Dataset) -> list[str]:
    """Return the names of the columns, for users, each once."""
    return [*dict.fromkeys(name.removeprefix(_SOURCE) for name in dataset.column_names)]


def describe_missing_column(name: str, columns: Iterable[str], file: str = "") -> str:
    """Return the sentences that report a missing column, for the ``problem`` of an error."""
    columns = list(columns)
    available = _list_nearest(name, columns)
    closest = find_similar(name, columns, 1)
    suggestion = f" Did you mean {closest[0]!r}?" if closest else ""
    return f"no column named {name!r}{f' in {file}' if file else ''}. The columns are {available}.{suggestion}"


def describe_partial_column(name: str, file: str = "") -> str:
    """Return the clause on a column that one of several files does not have; without the file, its beginning."""
    return f"the column {name!r} is left out, because it is not in {file}"


def _list_nearest(name: str, columns: Sequence[str], count: int = 12) -> str:
    """List the available columns in the order of the file; of many, those that are most similar to the missing one."""
    ranked = sorted(columns, key=lambda column: -SequenceMatcher(None, name.lower(), column.lower()).ratio())
    nearest = {*ranked[:count]}
    return ", ".join(column for column in columns if column in nearest) + (", ..." if len(ranked) > count else "")


def read_names(dataset: Dataset, column: str) -> list[str | None]:
    """Return each row's value as text; None if it is null, NaN, blank, or an unnamed class number (the hub's -1)."""
    from datasets import ClassLabel

    feature, values = dataset.features[column], get_arrow_column(dataset, column)
    if isinstance(feature, ClassLabel):
        class_names = feature.names
        return [
            class_names[class_index] if class_index is not None and 0 <= class_index < len(class_names) else None
            for class_index in values.to_pylist()
        ]
    if not any(test(values.type) for test in _ENCODED):
        return [_format_name(value) for value in values.to_pylist()]
    names_by_row: list[str | None] = []
    for chunk in values.chunks:  # one object for each distinct value, and not for each row
        encoded = chunk.dictionary_encode()
        names = [_format_name(value) for value in encoded.dictionary.to_pylist()]
        names_by_row += [
            None if class_index is None else names[class_index] for class_index in encoded.indices.to_pylist()
        ]
    return names_by_row


def read_required_names(dataset: Dataset, column: str, option: str, advice: str = "") -> list[str]:
    """Return each row's value as text, of a column of the source that has a value in every row."""
    source_column = find_source_column(dataset, column)
    if source_column is None:
        raise FedspanError(option, column, problem=describe_missing_column(column, list_source_columns(dataset)))
    names = read_names(dataset, source_column)
    if None in names:
        problem = f"example {names.index(None) + 1} has no value in column {column!r}. {advice}"
        raise FedspanError(option, column, problem=problem)
    return [name for name in names if name is not None]


def sort_names(names: Iterable[str]) -> list[str]:
    """Sort distinct names: by value if all are numbers (2 before 10), otherwise by text."""
    distinct = sorted(set(names))
    try:
        values = {name: float(name) for name in distinct}
    except ValueError:
        return distinct
    # "nan" and "inf" are words here; a NaN would also make the order depend on the input's.
    return sorted(distinct, key=values.__getitem__) if all(map(math.isfinite, values.values())) else distinct


def _format_name(value: object) -> str | None:
    """Return a value as text; None if it is null, NaN or blank."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    return drop_decimal_zero(str(value).strip()) or None


_SEPARATORS = ("|", ";", ",")
_COMBINED_SHARE = 0.2
"""Share of texts with a separator from which they are likely to hold several labels."""


def find_separator(texts: Iterable[str | None]) -> str | None:
    """Return the separator of labels in a column of texts: the first of ``|``, ``;`` and ``,`` that occurs in it.

    A column without any of them has at most one label in each row, and no separator.
    """
    present = {separator for text in texts if text for separator in _SEPARATORS if separator in text}
    return next((separator for separator in _SEPARATORS if separator in present), None)


def find_combined_labels(texts: Iterable[str | None]) -> str | None:
    """Return the separator of texts of which many combine the same few labels; None if they do not seem to.

    The separator occurs in a fifth of the texts or more, and there are fewer labels than combinations of them: three in
    ``a``, ``b``, ``a|b``, ``b|c``, but four in ``Bonn, west`` and ``Ulm, south``, which are two places.
    """
    present = [text for text in texts if text]
    separator = find_separator(present)
    if separator is None or sum(separator in text for text in present) < _COMBINED_SHARE * len(present):
        return None
    combinations = {*present}
    labels = {part.strip() for text in combinations for part in text.split(separator)} - {""}
    return separator if 2 <= len(labels) < len(combinations) else None
