"""Loading of the examples of a `DataConfig`, checked row by row and ready to be partitioned among clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import datasets
import numpy as np
import pyarrow as pa

from fedspan.data.catalogue import dataset_of
from fedspan.data.columns import Checked, TaskName, check
from fedspan.data.config import DataConfig
from fedspan.data.dataset_defaults import filled
from fedspan.data.files import has_own_splits, read_source
from fedspan.data.keyed import generator
from fedspan.data.missing_values import without_blanks
from fedspan.data.names import arrow_column, sort_names
from fedspan.errors import FedspanError, nearest

__all__ = ["LoadedData", "load"]


@dataclass(frozen=True)
class LoadedData:
    """The examples of a run.

    Attributes:
        train: Column ``image``, or ``text`` (str); for classification ``text_pair`` (str, if requested) and ``label``
            (int64, an index into `labels`); for regression ``target`` (float64) in place of the label; for a language
            model ``answer`` (str), for conversations ``history`` (JSON), and ``label`` if requested. Then the file's
            other columns, unchanged, for natural partitions.
        test: The same columns as far as its file has them; None if none was given and none was to be set aside.
        labels: Names of the labels, in the order of the classifier's outputs; empty without classes.
        dropped: Number of rows of the files that were left out because of missing values (``drop_empty``).
    """

    train: datasets.Dataset
    test: datasets.Dataset | None
    labels: tuple[str, ...]
    dropped: int = 0


def load(
    config: DataConfig, field: str = "data", *, seed: int = 0, task: TaskName = "sequence-classification"
) -> LoadedData:
    """Read, check and label the examples that `config` names.

    Args:
        config: Location and columns of the examples.
        field: The user's name of `config`; the fields of all errors begin with it.
        seed: Seed of the draws for ``test_fraction`` and ``max_examples``.
        task: The task that uses the examples.

    Returns:
        `LoadedData`; the order of the rows is that of the files.

    Raises:
        FedspanError: If a source is missing, unreadable or empty; a column is missing; a row has no text or label; a
            label is unknown; or there are too few labels or examples for the request.
    """
    config = filled(config, field)
    train, dropped = _read(config, task, field, "train")
    labels = _labels(train, config, field)
    data = _index(train, labels, set(train.names or ()), config, field, "train")
    if config.test is not None or (config.test_split is not None and has_own_splits(config.train or "")):
        checked, more = _read(config, task, field, "test")
        dropped += more
        test = _index(checked, labels, set(train.names or ()), config, field, "test")
    elif config.test_fraction > 0:
        data, test = _set_aside(data, config, field, seed)
    else:
        test = None
    capped = _cap(data, config, seed, "train"), test and _cap(test, config, seed, "test")
    return LoadedData(*capped, labels, dropped)


def _read(config: DataConfig, task: TaskName, field: str, part: Literal["train", "test"]) -> tuple[Checked, int]:
    """Return a checked source, and the number of its dropped rows."""
    source, dropped = read_source(config, part, field), 0
    if config.drop_empty:
        source, dropped = without_blanks(source, config, task, field, part)
    return check(source, config, task, field, part), dropped


def _labels(train: Checked, config: DataConfig, field: str) -> tuple[str, ...]:
    if train.names is None:
        for option in ("labels", "first_labels"):
            if getattr(config, option) is not None:
                raise FedspanError(
                    f"{field}.{option}", getattr(config, option), "nothing: these examples have no classes"
                )
        return ()
    there = _ordered(train.names, config, field)
    if config.labels is not None:
        absent = [label for label in config.labels if label not in there]
        # Without keep_only a label may be absent: one client's file need not contain every class.
        if config.keep_only and absent:
            raise FedspanError(
                f"{field}.labels", absent[0], f"labels of {train.source.name}: {nearest(absent[0], there)}"
            )
        return tuple(config.labels)
    if len(there) < 2:
        raise FedspanError(
            f"{field}.label", config.label or "label", f"a column with two labels or more; all rows have {there[0]!r}"
        )
    if config.first_labels is not None and config.first_labels > len(there):
        expected = f"at most {len(there)}, the number of labels in {train.source.name}"
        raise FedspanError(f"{field}.first_labels", config.first_labels, expected)
    return tuple(there[: config.first_labels])


def _ordered(names: Sequence[str], config: DataConfig, field: str) -> list[str]:
    """Return the available labels, sorted or in the catalogue's order."""
    there = sort_names(names)
    known = None if config.dataset is None else dataset_of(config.dataset, f"{field}.dataset").labels
    return [label for label in known if label in there] if known and set(there) <= set(known) else there


def _index(
    checked: Checked, labels: Sequence[str], known: set[str], config: DataConfig, field: str, part: str
) -> datasets.Dataset:
    """Return the examples with label indices; drop rows with labels not to be used and refuse unknown labels."""
    if checked.names is None:
        info = datasets.DatasetInfo(features=datasets.Features(checked.features))
        # In one piece: datasets hashes a table by pickling it, every slice with its whole underlying buffer.
        return datasets.Dataset(pa.table(checked.columns).combine_chunks(), info=info)
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
    position = 2 if "text_pair" in checked.columns else 1  # after the columns to be labelled
    table = table.add_column(position, "label", pa.array(ids, pa.int64()))
    features = datasets.Features({**checked.features, "label": datasets.Value("int64")})
    return datasets.Dataset(table, info=datasets.DatasetInfo(features=features))


def _set_aside(
    data: datasets.Dataset, config: DataConfig, field: str, seed: int
) -> tuple[datasets.Dataset, datasets.Dataset]:
    count = max(1, round(len(data) * config.test_fraction))
    chosen = _draw(data, count, generator(seed, "data", "test"), keep_one=True)
    if len(chosen) == 0:
        why = ", as each label has only one" if "label" in data.column_names else ""
        expected = f"more examples{why}; or name a test set, or set test_fraction to 0"
        raise FedspanError(f"{field}.train", config.train, expected)
    rest = np.setdiff1d(np.arange(len(data)), chosen)
    return data.select(rest), data.select(chosen)


def _cap(data: datasets.Dataset, config: DataConfig, seed: int, part: str) -> datasets.Dataset:
    if config.max_examples is None or len(data) <= config.max_examples:
        return data
    return data.select(_draw(data, config.max_examples, generator(seed, "data", "cap", part), keep_one=False))


def _draw(data: datasets.Dataset, count: int, rng: np.random.Generator, *, keep_one: bool) -> np.ndarray:
    """Draw `count` sorted row indices, labels in proportion (largest remainder); `keep_one` leaves one of each."""
    if "label" not in data.column_names:
        return np.sort(rng.permutation(len(data))[: min(count, len(data) - keep_one)])
    labels = arrow_column(data, "label").to_numpy()
    held = np.bincount(labels)
    quota = held * (count / len(labels))
    room = np.maximum(held - 1, 0) if keep_one else held
    taken = np.minimum(np.floor(quota).astype(np.int64), room)
    while taken.sum() < count and (taken < room).any():
        taken[np.argmax(np.where(taken < room, quota - taken, -np.inf))] += 1
    chosen = [rng.permutation(np.flatnonzero(labels == label))[:number] for label, number in enumerate(taken)]
    return np.sort(np.concatenate(chosen))
