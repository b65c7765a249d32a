"""One split, read unchanged from a local file, a built-in corpus or the hub; every failure names what to change."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from importlib.resources import as_file
from pathlib import Path
from typing import Literal, cast

import datasets
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from fedspan.data.builtin import PREFIX, corpus_file
from fedspan.data.config import DataConfig
from fedspan.data.images import holds_images, read_images
from fedspan.data.multiple_files import read_several
from fedspan.data.path_patterns import has_places, matching
from fedspan.data.source import Source
from fedspan.errors import FedspanError, nearest

__all__ = ["column_names", "has_own_splits", "read_source"]

_PACKABLE = (".csv", ".tsv", ".jsonl", ".json")
SUFFIXES = (*_PACKABLE, *(f"{suffix}.gz" for suffix in _PACKABLE), ".parquet")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILE_SUFFIX = re.compile(r"\.[A-Za-z]\w{0,7}")


def has_own_splits(where: str) -> bool:
    """Check whether `where` names a source with several splits (a hub id, a built-in corpus) rather than one file."""
    return where.startswith(PREFIX) or _is_hub_id(where)


def read_source(config: DataConfig, part: Literal["train", "test"], field: str) -> Source:
    """Read the split that `config` names for `part`.

    Raises:
        FedspanError: If the source is missing, unreadable, malformed or has no example, or the hub cannot be reached.
    """
    option = f"{field}.{part}"
    where = config.train if part == "train" or config.test is None else config.test
    if where is None:  # only a config that names a data set lacks it, and that one is filled earlier
        raise FedspanError(option, where, "is required")
    split = config.train_split if part == "train" else config.test_split or "test"
    if where.startswith(PREFIX):
        with as_file(corpus_file(where, split, option)) as path:
            source = _read_file(path, where, config, field, option)
    elif _is_hub_id(where):
        source = Source(_read_hub(where, config.hub_config, split, option), f"{where} ({split})")
    elif has_places(where):
        source = read_several(where, option, lambda path: _read_file(path, str(path), config, field, option))
    elif holds_images(_path(where)):
        source = Source(read_images(_path(where), where, option), where)
    else:
        source = _read_file(_path(where), where, config, field, option)
    if len(source.dataset) == 0:
        raise FedspanError(option, where, "a data set with examples in it; this one is empty")
    return source


def column_names(where: str) -> list[str] | None:
    """Return the column names in a local file's first line, first object or parquet schema; None if there are none.

    Of several files the first is read. If nothing can be read, `read_source` reports why.
    """
    path = next(iter(matching(where, "data.train")), _path(where)) if has_places(where) else _path(where)
    kind = _suffix(path).removesuffix(".gz").removeprefix(".")
    try:
        if kind == "parquet":
            return list(pyarrow.parquet.read_schema(path).names)
        with pa.input_stream(path) as stream:
            if kind == "json":
                content = stream.read().decode("utf-8-sig")
                return list(json.JSONDecoder().raw_decode(content, content.index("{"))[0])
            line = io.TextIOWrapper(cast(io.BufferedReader, stream), encoding="utf-8-sig").readline().rstrip("\r\n")
        if kind == "jsonl":
            return list(json.loads(line))
        # Quotes in the first line do not affect column names.
        return next(csv.reader([line], delimiter="\t" if kind == "tsv" else ","))
    except (OSError, ValueError, TypeError, RecursionError, StopIteration, csv.Error, pa.ArrowException):
        return None


def _path(where: str) -> Path:
    return Path(os.path.expanduser(where))  # Path raises for the home of an unknown user


def _suffix(path: Path) -> str:
    name = path.name.lower()
    return next((suffix for suffix in sorted(SUFFIXES, key=len, reverse=True) if name.endswith(suffix)), "")


def _is_hub_id(where: str) -> bool:
    path = Path(where)
    # A hub id may have dots (v1.5) but rarely ends like a file; "notes.txt" is a file that cannot be read.
    looks_like_file = _suffix(path) or _FILE_SUFFIX.fullmatch(path.suffix)
    # os.path, since Path raises for a name that is too long for the disk.
    is_local = os.path.exists(path) or ("/" in where and os.path.isdir(path.parent))
    return bool(_HUB_ID.fullmatch(where)) and not looks_like_file and not is_local


def _read_file(path: Path, where: str, config: DataConfig, field: str, option: str) -> Source:
    suffix = _suffix(path)
    if not os.path.isfile(path):
        raise FedspanError(option, where, _what_is_there(path))
    if not suffix:
        expected = f"a file that ends in one of {', '.join(SUFFIXES)}; images: an idx file, or a folder of classes"
        raise FedspanError(option, where, expected)
    kind = suffix.removesuffix(".gz").removeprefix(".")
    if config.columns is not None and kind not in ("csv", "tsv"):
        raise FedspanError(
            f"{field}.columns", config.columns, f"nothing for {where}: only csv and tsv files lack names"
        )
    try:
        if kind == "parquet":
            # Not read_table, which takes a folder called "seed=3" for a column.
            with pyarrow.parquet.ParquetFile(path) as file:
                table = file.read()
        elif kind in ("csv", "tsv"):
            table = _read_delimited(path, kind, config)
        else:
            table = _table(_records(path, kind))
    # ArrowInvalid is a ValueError, a broken gzip an OSError; RecursionError: JSON nested too deeply.
    except (OSError, ValueError, RecursionError, pa.ArrowException) as error:
        if path.stat().st_size == 0:
            raise FedspanError(option, where, "a file with examples in it; this one is empty") from error
        reason = _first_line(error)
        hint = f" (if quotes enclose fields: {field}.quotes: true)" if kind == "tsv" and not config.quotes else ""
        raise FedspanError(
            option, where, f"a readable {kind} file in UTF-8; reading it said: {reason}{hint}"
        ) from error
    names = table.column_names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise FedspanError(option, where, f"a file whose columns have different names; {twice!r} is there twice")
    if config.columns is not None and [str(table[name][0]) for name in names if len(table)] == names:
        raise FedspanError(
            f"{field}.columns", config.columns, f"nothing for {where}: its first line names them already"
        )
    header = kind in ("csv", "tsv") and config.columns is None
    return Source(_dataset(table, kind, where, option), where, header)


def _dataset(table: pa.Table, kind: str, where: str, option: str) -> datasets.Dataset:
    # Only parquet has types that datasets lacks, or contains datasets' own type notes, which may be damaged.
    try:
        return datasets.Dataset(_without_dictionaries(table))
    except (ValueError, TypeError, LookupError, AttributeError, NotImplementedError, pa.ArrowException) as error:
        expected = f"a {kind} file with columns that datasets can hold; it said: {_first_line(error)}"
        raise FedspanError(option, where, expected) from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__


def _what_is_there(path: Path) -> str:
    folder = path if os.path.isdir(path) else path.parent
    if not os.path.isdir(folder):
        return f"a file; the folder {folder} does not exist"
    try:
        files = [file.name for file in folder.iterdir() if file.is_file() and _suffix(file)]
    except OSError as error:
        return f"a file; the folder {folder} cannot be read ({error.strerror})"
    if not files:
        return f"a file; {folder} holds no csv, tsv, json, jsonl or parquet file and no images"
    return f"a file; in {folder} there is {nearest(path.name, files)}"


def _read_delimited(path: Path, kind: str, config: DataConfig) -> pa.Table:
    delimiter = "\t" if kind == "tsv" else ","
    # GLUE's tsv files contain literal, unbalanced quotes; a csv quotes fields that contain commas and line breaks.
    if config.quotes if config.quotes is not None else kind == "csv":
        parse = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    else:
        parse = pyarrow.csv.ParseOptions(delimiter=delimiter, quote_char=False, double_quote=False)
    # One thread; otherwise a malformed row is reported without its number.
    read = pyarrow.csv.ReadOptions(column_names=config.columns, use_threads=False)
    # From memory, since the content is read twice: Arrow's read-ahead thread outlives the first reader, and on a file
    # reopened under the same descriptor it took whole blocks of rows away from the second.
    with pa.input_stream(path) as stream:
        content = pa.py_buffer(stream.read())
    names = config.columns
    if names is None:
        with pyarrow.csv.open_csv(pa.BufferReader(content), read, parse) as reader:
            names = reader.schema.names
    # Everything as text: a type guessed from the content would turn the label 01 into 1 and the text NA into a null.
    convert = pyarrow.csv.ConvertOptions(column_types={name: pa.string() for name in names})
    return pyarrow.csv.read_csv(pa.BufferReader(content), read, parse, convert)


def _records(path: Path, kind: str) -> list[dict[str, object]]:
    # The standard json module reports the place of a mistake; pandas and Arrow convert date-like texts to dates.
    with pa.input_stream(path) as stream:
        content = stream.read().decode("utf-8-sig")
    if kind == "json":
        records = json.loads(content)
        if not isinstance(records, list):
            raise ValueError("not a list of objects (one object a line goes into a .jsonl file)")
    else:
        # Not splitlines: JSON strings may contain other literal line separators.
        records = []
        for line in filter(str.strip, content.split("\n")):
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"row {len(records) + 1}: {error}") from error
    odd = next((row for row, record in enumerate(records, start=1) if not isinstance(record, dict)), None)
    if odd is not None:
        raise ValueError(f"row {odd}: not an object with the columns as its keys")
    return records


def _table(records: list[dict[str, object]]) -> pa.Table:
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys(key for record in records for key in record):
        values = [record.get(name) for record in records]
        try:
            columns[name] = pa.array(values)
        # A column that mixes types, such as the labels 1 and "other", or contains integers of more than 64 bits.
        except (pa.ArrowException, OverflowError):
            columns[name] = pa.array([None if value is None else str(value) for value in values])
    return pa.table(columns)


def _without_dictionaries(table: pa.Table) -> pa.Table:
    # pandas writes categorical columns to parquet as dictionaries, which datasets has no feature for.
    for index, column in enumerate(table.schema):
        if pa.types.is_dictionary(column.type):
            plain = table.column(index).cast(column.type.value_type)
            table = table.set_column(index, column.name, plain)
    return table


def _read_hub(where: str, name: str | None, split: str, option: str) -> datasets.Dataset:
    try:
        return cast(datasets.Dataset, datasets.load_dataset(where, name=name, split=split))
    # Whatever the hub's client, its HTTP library or the files there raise, the user sees one line.
    except Exception as error:
        reason = _first_line(error)
        if "Unknown split" in reason:
            raise FedspanError(f"{option}_split", split, f"a split of {where}; the hub said: {reason}") from error
        if "Config name is missing" in reason or "BuilderConfig" in reason:
            field = option.rpartition(".")[0]
            raise FedspanError(
                f"{field}.hub_config", name, f"a configuration of {where}; the hub said: {reason}"
            ) from error
        expected = f"a hub id that can be reached from here, or the path of a local file; the hub said: {reason}"
        raise FedspanError(option, where, expected) from error
