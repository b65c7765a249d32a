"""From a `DataConfig` to labelled text that is checked row by row and ready to be divided among clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from fedspan.data.config import DataConfig
from fedspan.data.files import Source, has_own_splits, read_source
from fedspan.data.keyed import generator
from fedspan.data.names import arrow_column, columns_by_likeness, names_of, sort_names
from fedspan.errors import FedspanError, nearest

__all__ = ["LoadedData", "load"]


@dataclass(frozen=True)
class LoadedData:
    """Labelled text.

    Attributes:
        train: columns ``text`` (str), ``text_pair`` (str, if asked for), ``label`` (int64, an index into `labels`),
            then the file's other columns as they were, for natural partitions.
        test: the same columns as far as its file has them; None where none was given and none was to be set aside.
        labels: the names of the labels, in the order of the classifier's outputs.
    """

    train: datasets.Dataset
    test: datasets.Dataset | None
    labels: tuple[str, ...]


@dataclass(frozen=True)
class _Checked:
    """A source with text and a label in every row.

    Attributes:
        columns: ``text``, ``text_pair`` if asked for, then the further columns.
        features: the types of `columns` to `datasets`.
        names: the label of each row.
    """

    source: Source
    columns: dict[str, pa.ChunkedArray]
    features: dict[str, Any]
    names: list[str]


def load(config: DataConfig, field: str = "data", *, seed: int = 0) -> LoadedData:
    """Read, check and label the examples that `config` names.

    Args:
        config: where they are and which columns they have.
        field: what the user calls `config`; it opens the field of every error.
        seed: of the draws for ``test_fraction`` and ``max_examples``.

    Returns:
        `LoadedData`; the order of the rows is that of the files.

    Raises:
        FedspanError: a source that is missing, unreadable or empty; a column that is not there; a row without text or
            label; a label that is unknown; too few labels or examples for what was asked.
    """
    train = _check(read_source(config, "train", field), config, field, "train")
    labels = _labels(train, config, field)
    data = _index(train, labels, set(train.names), config, field, "train")
    if config.test is not None or (config.test_split is not None and has_own_splits(config.train)):
        checked = _check(read_source(config, "test", field), config, field, "test")
        test = _index(checked, labels, set(train.names), config, field, "test")
    elif config.test_fraction > 0:
        data, test = _set_aside(data, config, field, seed)
    else:
        test = None
    return LoadedData(_cap(data, config, seed, "train"), test and _cap(test, config, seed, "test"), labels)


def _check(source: Source, config: DataConfig, field: str, part: str) -> _Checked:
    dataset = source.dataset
    wanted = {"text": config.text, "text_pair": config.text_pair, "label": config.label}
    renames = {column: option for option, column in wanted.items() if column is not None}
    for column, option in renames.items():
        if column not in dataset.column_names:
            there = columns_by_likeness(column, dataset.column_names)
            hint = f"; if its first line is an example, name the columns in {field}.columns" if source.header else ""
            raise FedspanError(f"{field}.{option}", column, f"a column of {source.name}: {there}{hint}")
    columns = {
        option: _texts(source, column, f"{field}.{part}", f"{field}.{option}")
        for column, option in renames.items()
        if option != "label"
    }
    features: dict[str, Any] = dict.fromkeys(columns, datasets.Value("string"))
    names = _label_names(source, config.label, f"{field}.{part}", f"{field}.label")
    # A further column that happens to be called "text" or "label" gives way to the one that was asked for.
    for column in dataset.column_names:
        if column not in renames and column not in wanted:
            columns[column] = arrow_column(dataset, column)
            features[column] = dataset.features[column]
    return _Checked(source, columns, features, names)


def _texts(source: Source, column: str, file: str, option: str) -> pa.ChunkedArray:
    texts = arrow_column(source.dataset, column)
    if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type) or pa.types.is_null(texts.type)):
        raise FedspanError(option, column, f"a column of text; in {source.name} it holds {texts.type}")
    empty = next((row for row, text in enumerate(texts.to_pylist()) if text is None or not text.strip()), None)
    if empty is not None:
        raise FedspanError(file, source.name, f"text in column {column!r} of every row; {source.row(empty)} has none")
    return texts.cast(pa.string())


def _label_names(source: Source, column: str, file: str, option: str) -> list[str]:
    values = arrow_column(source.dataset, column)
    if pa.types.is_nested(values.type):
        raise FedspanError(option, column, f"a column with one label a row; in {source.name} it holds {values.type}")
    names = names_of(source.dataset, column)
    if pa.types.is_floating(values.type):
        fraction = next((name for name in names if name is not None and not name.lstrip("-").isdigit()), None)
        if fraction is not None:
            raise FedspanError(
                option, column, f"a column of classes; {source.row(names.index(fraction))} has {fraction}"
            )
    missing = next((row for row, name in enumerate(names) if name is None), None)
    if missing is not None:
        raise FedspanError(
            file, source.name, f"a label in column {column!r} of every row; {source.row(missing)} has none"
        )
    return [name for name in names if name is not None]


def _labels(train: _Checked, config: DataConfig, field: str) -> tuple[str, ...]:
    there = sort_names(train.names)
    if config.labels is not None:
        absent = [label for label in config.labels if label not in there]
        # Without keep_only a label may be absent: one client's file need not hold every class.
        if config.keep_only and absent:
            raise FedspanError(
                f"{field}.labels", absent[0], f"labels of {train.source.name}: {nearest(absent[0], there)}"
            )
        return tuple(config.labels)
    if len(there) < 2:
        raise FedspanError(
            f"{field}.label", config.label, f"a column with two labels or more; all rows have {there[0]!r}"
        )
    if config.first_labels is not None and config.first_labels > len(there):
        expected = f"at most {len(there)}, the number of labels in {train.source.name}"
        raise FedspanError(f"{field}.first_labels", config.first_labels, expected)
    return tuple(there[: config.first_labels])


def _index(
    checked: _Checked, labels: Sequence[str], known: set[str], config: DataConfig, field: str, part: str
) -> datasets.Dataset:
    """The examples with their labels as indices; rows with a label not to be kept are dropped, unknown ones refused."""
    index = {label: position for position, label in enumerate(labels)}
    keep, ids = [], []
    for row, name in enumerate(checked.names):
        if name in index:
            keep.append(row)
            ids.append(index[name])
        elif not (config.keep_only or (config.first_labels is not None and name in known)):
            choice = nearest(name, labels)
            expected = f"label unknown, in {checked.source.row(row)}; the labels of train are {choice}"
            if config.labels is not None:
                expected = f"label unknown, in {checked.source.row(row)}; {field}.labels has {choice}"
                expected += f" ({field}.keep_only: true drops other rows)"
            raise FedspanError(f"{field}.{part}", name, expected)
    if not keep:
        raise FedspanError(
            f"{field}.{part}", checked.source.name, f"rows with one of the labels {', '.join(labels[:6])}"
        )
    table = pa.table(checked.columns).take(keep)
    position = 2 if config.text_pair is not None else 1
    table = table.add_column(position, "label", pa.array(ids, pa.int64()))
    features = datasets.Features({**checked.features, "label": datasets.Value("int64")})
    return datasets.Dataset(table, info=datasets.DatasetInfo(features=features))


def _set_aside(
    data: datasets.Dataset, config: DataConfig, field: str, seed: int
) -> tuple[datasets.Dataset, datasets.Dataset]:
    count = max(1, round(len(data) * config.test_fraction))
    chosen = _draw(data, count, generator(seed, "data", "test"), keep_one=True)
    if len(chosen) == 0:
        expected = "more examples, as each label has only one; or name a test set, or set test_fraction to 0"
        raise FedspanError(f"{field}.train", config.train, expected)
    rest = np.setdiff1d(np.arange(len(data)), chosen)
    return data.select(rest), data.select(chosen)


def _cap(data: datasets.Dataset, config: DataConfig, seed: int, part: str) -> datasets.Dataset:
    if config.max_examples is None or len(data) <= config.max_examples:
        return data
    return data.select(_draw(data, config.max_examples, generator(seed, "data", "cap", part), keep_one=False))


def _draw(data: datasets.Dataset, count: int, rng: np.random.Generator, *, keep_one: bool) -> np.ndarray:
    """`count` sorted row indices, each label in proportion (largest remainder); `keep_one` leaves one of each."""
    labels = arrow_column(data, "label").to_numpy()
    held = np.bincount(labels)
    quota = held * (count / len(labels))
    room = np.maximum(held - 1, 0) if keep_one else held
    taken = np.minimum(np.floor(quota).astype(np.int64), room)
    while taken.sum() < count and (taken < room).any():
        taken[np.argmax(np.where(taken < room, quota - taken, -np.inf))] += 1
    chosen = [rng.permutation(np.flatnonzero(labels == label))[:number] for label, number in enumerate(taken)]
    return np.sort(np.concatenate(chosen))
