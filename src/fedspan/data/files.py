"""One split, read unchanged from a local file, a built-in corpus or the hub; every error names the option to change."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from importlib.resources import as_file
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal, cast

import pyarrow as pa
import pyarrow.parquet

from fedspan.data import archives, delimited, excel
from fedspan.data.builtin import PREFIX, find_corpus_file
from fedspan.data.config import DataConfig
from fedspan.data.conll import has_sentences, read_sentences
from fedspan.data.dialects import is_usual_name
from fedspan.data.encodings import decode
from fedspan.data.folders import TEXTS, describe_left_out, has_texts, is_example, make_text_table, read_texts
from fedspan.data.images import PICTURES, has_images, make_archived_images, read_images
from fedspan.data.json_files import read_json
from fedspan.data.multiple_files import has_placeholders, match_paths, read_multiple
from fedspan.data.names import get_arrow_table, make_dataset
from fedspan.data.source import ReadTable, Source, read_beginning
from fedspan.errors import FedspanError, suggest_nearest

if TYPE_CHECKING:
    import datasets

IN_MEMORY = "python:data"
"""Value of ``data.train`` and ``data.test`` if the data were passed from Python."""
FROM_TRAINERS = "python:trainers"
"""Value of ``data.train`` if the clients train with trainers passed from Python, on the trainers' own data."""
NOWHERE = "nodes"
"""Value of ``data.train`` in a server's config: the examples are on the nodes."""

_DELIMITED = ("csv", "tsv", "txt")
_PACKABLE = (".csv", ".tsv", ".txt", ".jsonl", ".json", ".conll")
SUFFIXES = (*_PACKABLE, *(f"{suffix}.gz" for suffix in _PACKABLE), ".parquet", *excel.SUFFIXES)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILE_SUFFIX = re.compile(r"\.[A-Za-z]\w{0,7}")
_HEAD = 1 << 16
_HEADER_ROWS = 1000
"""Number of rows that are compared with a first one that may name the columns."""


def has_own_splits(location: str) -> bool:
    """Check whether `location` names a source with several splits (a hub id, a built-in corpus), not one file."""
    return location.startswith(PREFIX) or _is_hub_id(location)


def read_source(config: DataConfig, part: Literal["train", "test"], field: str, limit: int | None = None) -> Source:
    """Read the split that `config` names for `part`.

    Args:
        limit: Number of bytes that are read at the beginning of each file; None: all.
    """
    option = f"{field}.{part}"
    location = config.train if part == "train" or config.test is None else config.test
    if location is None:  # only missing with data.dataset, which fills it earlier
        raise FedspanError(option, location, problem="this field is required")
    split = config.train_split if part == "train" else config.test_split or "test"

    if location == FROM_TRAINERS:
        problem = "the examples of this run are the trainers' own, and only fedspan.simulate(..., trainers=) uses them"
        raise FedspanError(option, location, problem=problem)
    if location == IN_MEMORY:
        problem = "the data of this run were passed from Python: pass them again as data=, or name a file"
        raise FedspanError(option, location, problem=problem)

    def read(path: Path, location: str) -> Source:
        if os.path.isfile(path) and location.lower().endswith(archives.SUFFIXES):
            return _convert_errors(
                lambda: _read_archived(path, location, config, option), "an archive", location, option
            )
        return _read_file(path, location, config, field, option, limit)

    if location.startswith(PREFIX):
        with as_file(find_corpus_file(location, split, option)) as path:
            source = read(path, location)
    elif _is_hub_id(location):
        source = Source(flatten_columns(_read_hub(location, config.hub_config, split, option)), f"{location} ({split})")
    elif has_placeholders(location):
        source = read_multiple(location, option, lambda path: read(path, str(path)))
    elif has_images(_expand_path(location)):
        source = Source(read_images(_expand_path(location), location, option), location)
    elif has_texts(_expand_path(location)):
        texts = "text files by class"
        source = _convert_errors(
            lambda: _make_source(read_texts(_expand_path(location), config.encoding), location, option),
            texts,
            location,
            option,
        )
    else:
        source = read(_expand_path(location), location)
    if len(source.dataset) == 0:
        detected = f" ({'; '.join(source.notes)})" if source.notes else ""
        raise FedspanError(option, location, problem=f"{location} holds no examples{detected}")
    return source


def read_column_names(location: str) -> list[str] | None:
    """Return the column names in a local file's first line, first object or parquet schema; None if there are none.

    Of several files the first is read. If nothing can be read, `read_source` reports why.
    """
    path = (
        next(iter(match_paths(location, "data.train")), _expand_path(location))
        if has_placeholders(location)
        else _expand_path(location)
    )
    kind = _get_suffix(path).removesuffix(".gz").removeprefix(".")
    try:
        if kind == "parquet":
            return list(pyarrow.parquet.read_schema(path).names)
        if kind == "conll":
            return ["tokens", "tags"]
        if kind in _DELIMITED:
            return delimited.read_delimited_names(path, kind)
        if kind in ("json", "jsonl"):
            content, is_complete = read_beginning(path, _HEAD)
            text = decode(content, is_complete=is_complete)[0]
            return list(json.JSONDecoder().raw_decode(text, text.index("{"))[0])
    except (OSError, ValueError, TypeError, RecursionError, pa.ArrowException):
        pass
    return None


def _expand_path(location: str) -> Path:
    return Path(os.path.expanduser(location))  # Path raises for the home of an unknown user


def _get_suffix(path: PurePath) -> str:
    name = path.name.lower()
    return next((suffix for suffix in sorted(SUFFIXES, key=len, reverse=True) if name.endswith(suffix)), "")


def _is_hub_id(location: str) -> bool:
    path = Path(location)
    # A hub id may have dots (v1.5) but rarely a file's suffix; "notes.txt" is a missing file.
    looks_like_file = _get_suffix(path) or _FILE_SUFFIX.fullmatch(path.suffix)
    # os.path, since Path raises for a name that is too long for the disk.
    is_local = os.path.exists(path) or ("/" in location and os.path.isdir(path.parent))
    return bool(_HUB_ID.fullmatch(location)) and not looks_like_file and not is_local


def _read_file(path: Path, user_path: str, config: DataConfig, field: str, option: str, limit: int | None) -> Source:
    suffix = _get_suffix(path)
    if not os.path.isfile(path):
        problem = f"{user_path!r} is a folder" if os.path.isdir(path) else f"there is no file {user_path!r}"
        raise FedspanError(option, user_path, problem=f"{problem}. {_describe_folder(path, user_path)}")
    if not suffix:
        suffixes = ", ".join((*SUFFIXES, *archives.SUFFIXES))
        problem = f"{user_path!r} has no supported format. Files end in {suffixes}; images can be idx files or folders."
        raise FedspanError(option, user_path, problem=problem)
    kind = suffix.removesuffix(".gz").removeprefix(".")
    if config.columns is not None and kind not in _DELIMITED and suffix not in excel.SUFFIXES:
        problem = f"{user_path} has its own column names; only csv, tsv, txt and Excel files may lack them"
        raise FedspanError(f"{field}.columns", config.columns, problem=problem)

    def read() -> Source:
        if kind == "parquet":
            table_read = _read_parquet(path, limit)
        elif suffix in excel.SUFFIXES:
            table_read = excel.read_excel(path, user_path, config, field, option)
        elif kind == "conll" or (kind in ("tsv", "txt") and has_sentences(path)):
            table_read = read_sentences(path, config.encoding, limit)
        elif kind in _DELIMITED:
            table_read = delimited.read_delimited(path, kind, config, limit)
        else:
            table_read = read_json(path, kind, config.encoding, limit)
        return _make_source(table_read, user_path, option)

    source = _convert_errors(read, kind, user_path, option, lambda reason: _suggest_remedy(kind, reason, config, field))
    rows = source.dataset
    if config.columns is not None and len(rows) and [str(value) for value in rows[0].values()] == rows.column_names:
        problem = f"the first line of {user_path} already names the columns; leave this field out"
        raise FedspanError(f"{field}.columns", config.columns, problem=problem)
    if config.header is False and config.columns is None and _has_names_first(rows):
        names = ", ".join(map(str, rows[0].values()))
        problem = (
            f"the first line of {user_path} names the columns: {names}. Leave this field out: the header of each file "
            "is detected"
        )
        raise FedspanError(f"{field}.header", False, problem=problem)
    return source


def _has_names_first(rows: datasets.Dataset) -> bool:
    """Check whether the first row, read as an example, holds a usual name of a column that no further row has there."""
    columns = [[str(value).strip() for value in values] for values in rows[:_HEADER_ROWS].values()]
    return any(is_usual_name(column[0]) and column[0] not in column[1:] for column in columns if column)


def _convert_errors(
    read: Callable[[], Source], kind: str, user_path: str, option: str, hint: Callable[[str], str] = lambda reason: ""
) -> Source:
    """Read a source, and convert the errors of a reader into an error that names the option, with a hint."""
    try:
        return read()
    # ArrowInvalid is a ValueError, a broken gzip an OSError; RecursionError: JSON nested too deeply.
    except (OSError, ValueError, RecursionError, pa.ArrowException) as error:
        path = _expand_path(user_path)
        if os.path.isfile(path) and path.stat().st_size == 0:
            raise FedspanError(option, user_path, problem=f"the file {user_path} is empty") from error
        reason = _get_first_line(error)
        problem = f"{user_path} cannot be read as {kind}: {reason}"
        raise FedspanError(option, user_path, problem=f"{problem.rstrip('.')}.{hint(reason)}") from error


def _suggest_remedy(kind: str, reason: str, config: DataConfig, field: str) -> str:
    if "encoding" in reason or "is not in" in reason or "UTF" in reason:
        return f" Set the encoding with {field}.encoding."
    if kind not in _DELIMITED:
        return ""
    if "columns, got" in reason:
        unset_options = [f"{field}.{name}" for name in ("delimiter", "quoting") if getattr(config, name) is None]
        if config.invalid == "skip":  # no row is left
            unset_options += [] if config.columns is not None else [f"{field}.columns (the names of all columns)"]
            return f" No row matches the first one. Set the file's dialect: {' or '.join(unset_options)}."
        advice = f", or set the file's dialect: {' and '.join(unset_options)}" if unset_options else ""
        return f" To leave such rows out, set {field}.invalid: skip{advice}."
    return f" Set the file's dialect with {field}.delimiter, {field}.quoting and {field}.encoding."


def _make_source(table_read: ReadTable, user_path: str, option: str) -> Source:
    names = table_read.table.column_names
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise FedspanError(option, user_path, problem=f"{user_path} has two columns named {duplicate!r}")
    dataset = flatten_columns(_make_dataset(table_read.table, user_path, option))
    return Source(
        dataset,
        user_path,
        table_read.header,
        positions=table_read.positions,
        notes=table_read.notes,
        skipped=table_read.skipped,
        is_complete=table_read.is_complete,
    )


def _read_archived(path: Path, user_path: str, config: DataConfig, option: str) -> Source:
    files, left_out = archives.read_archive(path, {*PICTURES, *TEXTS})
    images = {parts: content for parts, content in files.items() if PurePath(parts[-1]).suffix.lower() in PICTURES}
    selected = images or {parts: content for parts, content in files.items() if len(parts) > 1}
    tables = sorted(name for name in left_out if _get_suffix(PurePath(name)) and is_example(PurePath(name).parts))
    left_out += ["/".join(parts) for parts in files if parts not in selected]
    if tables and len({parts[-2] for parts in selected if len(parts) > 1}) < 2:  # no classes: the table has the labels
        raise ValueError(f"it holds {tables[0]}, and tables are not read inside archives. Unpack it and name that file")
    if images:
        return Source(make_archived_images(images, path.name), user_path, notes=describe_left_out(left_out))
    return _make_source(make_text_table(selected, path.name, config.encoding, left_out), user_path, option)


def _read_parquet(path: Path, limit: int | None) -> ReadTable:
    # Not read_table, which parses a folder named "seed=3" as a column.
    with pyarrow.parquet.ParquetFile(path) as file:
        if limit is None or file.num_row_groups == 0:
            return ReadTable(file.read())
        groups: list[int] = []
        size = 0
        for group in range(file.num_row_groups):
            groups.append(group)
            size += file.metadata.row_group(group).total_byte_size
            if size > limit:
                break
        return ReadTable(file.read_row_groups(groups), is_complete=len(groups) == file.num_row_groups)


def flatten_columns(dataset: datasets.Dataset) -> datasets.Dataset:
    """Return a data set with a column for each field of its structs (``meta.label``), at any depth.

    Images, which Arrow stores as structs of bytes and path, remain columns; so does a struct with a field whose column
    exists already.
    """
    while True:
        nested = [
            name
            for name, feature in dataset.features.items()
            if isinstance(feature, dict)
            and feature
            and set(feature) != {"bytes", "path"}
            and not {f"{name}.{inner}" for inner in feature} & set(dataset.column_names)
        ]
        if not nested:
            return dataset
        table = get_arrow_table(dataset)
        columns: dict[str, pa.ChunkedArray] = {}
        features: dict[str, Any] = {}
        for name, feature in dataset.features.items():
            if name not in nested:
                columns[name], features[name] = table.column(name), feature
                continue
            parts = table.select([name]).flatten()
            for inner, kind in feature.items():
                columns[f"{name}.{inner}"], features[f"{name}.{inner}"] = parts.column(f"{name}.{inner}"), kind
        dataset = make_dataset(pa.table(columns), features)


def _make_dataset(table: pa.Table, user_path: str, option: str) -> datasets.Dataset:
    # Only parquet has types that datasets lacks, or contains datasets' own type notes, which may be damaged.
    try:
        _require_storable_names(table.schema)
        return make_plain_dataset(table)
    except (ValueError, TypeError, LookupError, AttributeError, NotImplementedError, pa.ArrowException) as error:
        problem = f"{user_path} has columns that datasets cannot hold: {_get_first_line(error)}"
        raise FedspanError(option, user_path, problem=problem) from error


def _require_storable_names(fields: Iterable[pa.Field]) -> None:
    """Check that no field, at any depth, has a NUL in its name, at which Arrow and datasets cut names."""
    for field in fields:
        if "\0" in field.name:
            raise ValueError(f"the name {field.name!r} has a NUL character")
        kind = field.type
        _require_storable_names(kind.field(number) for number in range(kind.num_fields))


def _get_first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__


def _describe_folder(path: Path, user_path: str) -> str:
    folder = path if os.path.isdir(path) else path.parent
    if not os.path.isdir(folder):
        return f"The folder {folder} does not exist."
    try:
        files = [file.name for file in folder.iterdir() if file.is_file() and _get_suffix(file)]
    except OSError as error:
        return f"The folder {folder} cannot be read ({error.strerror})."
    if files and folder == path:
        pattern = os.path.join(user_path, "{client}" + _get_suffix(PurePath(files[0])))
        return f"Name one of its tables, or all, by client, as {pattern!r}."
    if not files:
        kinds = "csv, tsv, txt, json, jsonl, parquet or Excel file, no images and no folders of text files"
        return f"The folder {folder} holds no {kinds}."
    return suggest_nearest(path.name, files)


def make_plain_dataset(table: pa.Table) -> datasets.Dataset:
    """Return a table as a data set; dictionaries and views become plain columns."""
    for index, column in enumerate(table.schema):
        if (plain := _get_plain_type(column.type)) != column.type:
            table = table.set_column(index, column.name, table.column(index).cast(plain))
    return make_dataset(table)


def _get_plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type, without dictionaries and views, to which Arrow casts a type that datasets may lack."""
    # pandas writes categorical columns to parquet as dictionaries; polars and DuckDB write views.
    if pa.types.is_dictionary(kind):
        return _get_plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_list(kind) or pa.types.is_list_view(kind):
        return pa.list_(_get_plain_type(kind.value_type))
    if pa.types.is_large_list(kind) or pa.types.is_large_list_view(kind):
        return pa.large_list(_get_plain_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_get_plain_type(field.type)) for field in kind])
    return kind


def _read_hub(hub_id: str, name: str | None, split: str, option: str) -> datasets.Dataset:
    import datasets

    try:
        return cast(datasets.Dataset, datasets.load_dataset(hub_id, name=name, split=split))
    # Any error of the hub's client, its HTTP library or the files is reported in one line.
    except Exception as error:
        reason = _get_first_line(error)
        if "Unknown split" in reason:
            problem = f"{hub_id} has no split {split!r} ({reason})"
            raise FedspanError(f"{option}_split", split, problem=problem) from error
        if "Config name is missing" in reason or "BuilderConfig" in reason:
            field = option.rpartition(".")[0]
            problem = f"{hub_id} has no such configuration ({reason})"
            raise FedspanError(f"{field}.hub_config", name, problem=problem) from error
        problem = f"{hub_id!r} is not a local file, and cannot be read from the hub: {reason}"
        raise FedspanError(option, hub_id, problem=problem) from error
