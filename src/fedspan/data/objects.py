"""Data passed from Python: data sets, tables, lists of records, and one of these for each client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import PIL.Image
import pyarrow as pa

from fedspan.data.assign import make_client_ids
from fedspan.data.files import flatten_columns, make_plain_dataset
from fedspan.data.json_files import convert_nan, make_table
from fedspan.data.names import get_arrow_table, make_dataset
from fedspan.data.source import Source
from fedspan.errors import FedspanError

if TYPE_CHECKING:
    import datasets

CLIENT = "client"
"""Name of the column that says whose an example is, where the data were passed by client."""
_TRAIN, _TEST = "train", ("test", "validation")


@dataclass(frozen=True)
class DataObjects:
    """Data passed from Python."""

    sources: Mapping[str, Source]
    """The sources of the splits, ``train`` and perhaps ``test``."""
    by_client: bool
    """Whether the training examples were passed by client, in the column ``client``."""


def read_objects(data: Any, clients: int) -> DataObjects:
    """Read data passed from Python.

    Args:
        data: Training examples: a ``datasets.Dataset``, a table (pandas, Polars, Arrow), a list of dicts, or a dict of
            columns; a dict of these by client, or a function that returns the examples of client number 0, 1, ...; or a
            ``DatasetDict`` or dict with any of these as ``train`` and as ``test`` (``validation`` in its place).

    Raises:
        FedspanError: If the data are none of these, empty, or the clients' columns differ.
    """
    parts: dict[str, Any] = {_TRAIN: data}
    if isinstance(data, Mapping) and _TRAIN in data and not _is_column(data[_TRAIN]):
        if unknown := sorted(set(data) - {_TRAIN, *_TEST}):
            problem = f"{unknown[0]!r} is not a part of the data. The parts are train, test and validation."
            raise FedspanError("data", unknown[0], problem=problem)
        parts = {_TRAIN: data[_TRAIN]}
        if (held_out := next((name for name in _TEST if name in data), None)) is not None:
            parts["test"] = data[held_out]
    sources: dict[str, Source] = {}
    by_client = False
    for part, value in parts.items():
        dataset, is_split = _read(value, clients, f"data[{part!r}]" if len(parts) > 1 else "data")
        by_client = by_client or (part == _TRAIN and is_split)
        sources[part] = Source(flatten_columns(dataset), f"data ({part})")
    return DataObjects(sources, by_client)


def _read(value: Any, clients: int, argument: str) -> tuple[datasets.Dataset, bool]:
    """Return the examples of a split, and whether they were passed by client."""
    import datasets

    if callable(value) and not isinstance(value, datasets.Dataset):
        load_client = cast(Callable[[int], Any], value)
        return _merge_clients(
            {id: load_client(number) for number, id in enumerate(make_client_ids(clients))}, argument
        ), True
    if isinstance(value, Mapping) and value and not any(map(_is_column, value.values())):
        return _merge_clients(cast(Mapping[Any, Any], value), argument), True
    return _make_dataset(value, argument), False


def _merge_clients(by_client: Mapping[Any, Any], argument: str) -> datasets.Dataset:
    import datasets

    parts: list[datasets.Dataset] = []
    for client, value in by_client.items():
        dataset = _make_dataset(value, f"{argument}[{client!r}]")
        if CLIENT in dataset.column_names:
            problem = f"{argument}[{client!r}] has a column named {CLIENT!r}, which is needed for the clients' ids"
            raise FedspanError(argument, CLIENT, problem=problem)
        parts.append(dataset.add_column(CLIENT, [str(client)] * len(dataset)))
    columns = parts[0].column_names
    first = next(iter(by_client))
    for client, part in zip(by_client, parts, strict=True):
        if different := sorted({*part.column_names} ^ {*columns}):
            names = ", ".join(different)
            problem = f"the clients {first!r} and {client!r} have different columns: only one of them has {names}"
            raise FedspanError(argument, client, problem=problem)
    for name in columns:
        parts = _unify_column(parts, name, list(by_client), argument)
    try:
        return datasets.concatenate_datasets([part.select_columns(columns) for part in parts])
    except (ValueError, pa.ArrowException) as error:
        problem = f"the clients' columns have different types: {str(error).splitlines()[0][:300]}"
        raise FedspanError(argument, None, problem=problem) from error


def _unify_column(
    parts: list[datasets.Dataset], name: str, clients: Sequence[Any], argument: str
) -> list[datasets.Dataset]:
    """Return the clients' data sets with one type of a column, such as strings for strings and large strings."""
    import datasets

    kinds = [part.features[name] for part in parts]
    other = next((index for index, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is None:
        return parts
    try:
        if not all(isinstance(kind, datasets.Value) for kind in kinds):
            raise TypeError("a feature that is not a plain value has no common type with another one")
        schemas = [pa.schema([(name, kind.pa_type)]) for kind in kinds]
        common = _convert_to_strings(pa.unify_schemas(schemas, promote_options="permissive").empty_table()).schema
        feature = datasets.Features.from_arrow_schema(common)[name]
        return [
            part if part.features[name] == feature else _cast_column(part, name, common.field(name).type, feature)
            for part in parts
        ]
    except (TypeError, pa.ArrowException) as error:
        problem = (
            f"the column {name!r} has another type in the data of {clients[other]!r} ({kinds[other]}) than in that of "
            f"{clients[0]!r} ({kinds[0]})"
        )
        raise FedspanError(argument, name, "one type for all clients", problem=problem) from error


def _cast_column(dataset: datasets.Dataset, name: str, kind: pa.DataType, feature: Any) -> datasets.Dataset:
    table = get_arrow_table(dataset)
    table = table.set_column(table.column_names.index(name), name, table.column(name).cast(kind))
    return make_dataset(table, {**dataset.features, name: feature})


def _make_dataset(value: Any, argument: str) -> datasets.Dataset:
    try:
        dataset = _convert(value, argument)
    except (TypeError, ValueError, LookupError, OverflowError, AttributeError, pa.ArrowException) as error:
        problem = f"{argument} cannot be read as a table: {str(error).splitlines()[0][:300] if str(error) else error!r}"
        raise FedspanError("data", None, problem=problem) from error
    if len(dataset) == 0:
        raise FedspanError("data", None, problem=f"{argument} holds no examples")
    return dataset


def _convert(value: Any, argument: str) -> datasets.Dataset:
    import datasets

    if isinstance(value, datasets.Dataset):
        return value.with_format(None).remove_columns(_list_index_columns(value.column_names))
    if hasattr(value, "__arrow_c_stream__"):  # pandas, Polars, Arrow, DuckDB: none of them is imported
        try:
            table = pa.table(value)
        except pa.ArrowException:
            if not hasattr(value, "to_dict"):
                raise
            return make_plain_dataset(make_table(value.to_dict("records")))  # a frame with a column of mixed types
        return make_plain_dataset(_convert_to_strings(table.drop_columns(_list_index_columns(table.column_names))))
    if isinstance(value, Mapping):
        columns = {
            name: [convert_nan(cell) for cell in column] if isinstance(column, list | tuple) else column
            for name, column in value.items()
        }
        return datasets.Dataset.from_dict(columns)
    if isinstance(value, Sequence) and all(isinstance(record, Mapping) for record in value):
        records = cast(Sequence[Mapping[str, Any]], value)
        if any(isinstance(cell, PIL.Image.Image | np.ndarray) for record in records[:1] for cell in record.values()):
            return datasets.Dataset.from_list([dict(record) for record in records])
        return make_plain_dataset(make_table(records))
    expected = "a datasets.Dataset, a pandas DataFrame, a list of dicts, one of these by client, or a function"
    raise FedspanError("data", type(value).__name__, expected, problem=f"{argument} is a {type(value).__name__}")


def _list_index_columns(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.startswith("__index_level_")]


def _convert_to_strings(table: pa.Table) -> pa.Table:
    """Return a table whose texts have the type that files give them; pandas and Polars have others."""
    plain = [field.type.value_type if pa.types.is_dictionary(field.type) else field.type for field in table.schema]
    texts = [pa.string() if pa.types.is_large_string(kind) else kind for kind in plain]
    for kinds in (plain, texts):
        table = table.cast(pa.schema(list(zip(table.column_names, kinds, strict=True))))
    return table


def _is_column(value: Any) -> bool:
    """Check whether a value of a dict is a column of a table, and not a table itself."""
    import datasets

    if isinstance(value, np.ndarray | pa.Array | pa.ChunkedArray):
        return True
    if hasattr(value, "to_list") and not isinstance(value, datasets.Dataset):  # a Series of pandas or Polars
        return not hasattr(value, "columns")
    return isinstance(value, list | tuple) and not all(isinstance(item, Mapping) for item in value)
