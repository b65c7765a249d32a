"""Loading of the examples of a `DataConfig`, checked row by row and ready to be partitioned among clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa

from fedspan.data.catalogue import get_dataset_entry
from fedspan.data.columns import LABELED_TEXTS, TaskColumns, ValidatedColumns, validate_columns
from fedspan.data.config import DataConfig
from fedspan.data.dataset_defaults import fill_data_defaults
from fedspan.data.dialects import describe_missing_header, make_positional_names
from fedspan.data.duplicates import advise_grouping, encode_groups, find_shared_with_test
from fedspan.data.files import has_own_splits, read_source
from fedspan.data.keyed import make_generator
from fedspan.data.names import get_arrow_column, make_dataset, mark_source_column, sort_names, take_rows
from fedspan.data.partition import draw_groups
from fedspan.data.source import Source
from fedspan.data.usable_rows import drop_invalid_rows, drop_rows_without_value, unwrap_lists
from fedspan.errors import FedspanError, suggest_nearest

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class LoadedData:
    """The examples of a run."""

    train: datasets.Dataset
    """Column ``image``, or ``text`` (str); for classification ``text_pair`` (str, if requested) and ``label`` (int64,
    an index into `labels`); for regression ``target`` (float64) in place of the label; for a language model ``answer``
    (str), for conversations ``history`` (JSON), and ``label`` if requested. Then the file's other columns, unchanged,
    for natural partitions."""
    test: datasets.Dataset | None
    """The held-out examples, with those columns of ``train`` that their file has; None if no test set was given and
    none was to be set aside."""
    labels: tuple[str, ...]
    """Names of the labels, in the order of the classifier's outputs; empty without classes."""
    dropped: int = 0
    """Number of rows of the files that were left out as invalid (``data.invalid: skip``)."""
    groups: np.ndarray | None = None
    """Number of each training example's group (``data.group``), int64; None without groups."""
    notes: tuple[str, ...] = ()
    """What was detected in the files, left out of them, or occurs in several parts; one sentence each."""
    is_complete: bool = True
    """Whether all rows of the files were read, and not only those at their beginning."""
    label_separator: str | None = None
    """Separator of several labels in a text; None: labels are not texts with several each."""
    ignored: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Training rows whose label is not in ``data.labels``, int64; they have the first label instead. Empty without
    ``load(ignores_labels=True)``."""


_SHOWN = 6
_IGNORED = mark_source_column("ignored")
"""Column of the examples while they are loaded: whether the label is unknown."""


def load(
    config: DataConfig,
    field: str = "data",
    *,
    seed: int = 0,
    task: TaskColumns = LABELED_TEXTS,
    limit: int | None = None,
    sources: Mapping[str, Source] | None = None,
    client_column: str | None = None,
    ignores_labels: bool = False,
) -> LoadedData:
    """Read, check and label the examples that `config` names.

    Args:
        field: The user's name of `config`; the fields of all errors begin with it.
        seed: Seed of the draws for ``test_fraction`` and ``max_examples``.
        task: The columns that the task needs (``TaskDefinition.columns``).
        limit: Number of bytes that are read at the beginning of each file; None: all.
        sources: Sources of ``train`` and ``test`` that were passed from Python; None: they are read.
        client_column: Column that assigns the training examples to clients (``partition.column``), in which
            ``data.invalid: skip`` requires a value; None: there is none.
        ignores_labels: Whether rows whose label is not in ``data.labels`` stay, as `LoadedData.ignored`. Then neither
            an error nor the number of rows depends on ``labels``.

    Returns:
        `LoadedData`; the order of the rows is that of the files.

    Raises:
        FedspanError: If a source is missing, unreadable or empty; a column is missing; a row has no text or label; a
            label is unknown; or there are too few labels or examples for the request.
    """
    config = fill_data_defaults(config, field)
    sources = sources or {}
    train = _read_part(config, task, field, "train", limit, sources.get("train"), client_column)
    if ignores_labels and config.labels is not None:
        train = _replace_unknown_labels(train, config.labels)
        config = config.model_copy(update={"keep_only": False})
    labels = _collect_labels(train.checked, task, config, field)
    labels_in_training = {*(train.checked.names or ()), *chain.from_iterable(train.checked.label_lists or ())}
    data = _encode_labels(train, labels, labels_in_training, config, field, "train")
    separator = train.checked.label_separator
    if separator is not None:  # a test file may hold other separators, within its labels
        config = config.model_copy(update={"label_separator": separator})
    parts = [train]
    notes = _describe_labels(train.checked, labels, task)
    if config.test is not None or (config.test_split is not None and has_own_splits(config.train or "")):
        parts.append(_read_part(config, task, field, "test", limit, sources.get("test"), like=train.checked.source))
        if ignores_labels:
            parts[1] = _replace_unknown_labels(parts[1], labels)
        test = _encode_labels(parts[1], labels, labels_in_training, config, field, "test")
        if count := find_shared_with_test(data, test):
            notes.append(f"duplicates: {count:,} of {len(test):,} test examples also occur in {field}.train")
    elif config.test_fraction > 0:
        data, test = _hold_out(data, config, field, seed)
        if config.group is None and (count := find_shared_with_test(data, test)):
            notes.append(
                f"duplicates: {count:,} of {len(test):,} held-out test examples also occur in training "
                f"({advise_grouping(data, task.get_example_column(config), field)})"
            )
    else:
        test = None
    data, test = _limit_examples(data, config, seed, "train"), test and _limit_examples(test, config, seed, "test")
    ignored = np.empty(0, np.int64)
    if _IGNORED in data.column_names:
        ignored = np.flatnonzero(get_arrow_column(data, _IGNORED).to_numpy())
        data = data.remove_columns(_IGNORED)
    return LoadedData(
        data,
        test,
        labels,
        sum(sum(part.skipped.values()) for part in parts),
        encode_groups(data, config, field),
        (*(note for part in parts for note in _describe_part(part, field)), *notes),
        all(part.checked.source.is_complete for part in parts),
        separator,
        ignored,
    )


@dataclass
class _Part:
    """A checked split, and the number of its rows that were left out, by reason."""

    checked: ValidatedColumns
    skipped: dict[str, int]


def _read_part(
    config: DataConfig,
    task: TaskColumns,
    field: str,
    part: Literal["train", "test"],
    limit: int | None,
    passed_source: Source | None,
    client_column: str | None = None,
    like: Source | None = None,
) -> _Part:
    if passed_source is None:
        passed_source = read_source(config, part, field, limit)
        passed_source = passed_source if like is None else _align_headers(passed_source, like)
    source = unwrap_lists(passed_source, config, task, field)
    skipped = {"with too many or too few fields": source.skipped}
    if config.invalid == "skip":
        complete = drop_invalid_rows(source, config, task, field, part, limit)
        skipped[f"without {task.required_values}"] = len(source.dataset) - len(complete.dataset)
        source = complete
        if client_column in source.dataset.column_names:
            with_client = drop_rows_without_value(source, client_column, field, part)
            skipped[f"without a client in column {client_column!r}"] = len(source.dataset) - len(with_client.dataset)
            source = with_client
    return _Part(validate_columns(source, config, task, field, part), skipped)


def _align_headers(test: Source, train: Source) -> Source:
    """Name a test file's columns by position as in training if the first line of only one of the files names them."""
    names, own_names = train.dataset.column_names, test.dataset.column_names
    positional = make_positional_names(len(names))
    if len(own_names) != len(names) or (tuple(names) == positional) == (tuple(own_names) == positional):
        return test
    if tuple(names) == positional:
        note = f"only its first line names columns: {', '.join(own_names)} are the columns of {train.name} by position"
    else:
        note = f"without column names: its columns are those of {train.name} by position, {', '.join(names)}"
    notes = tuple(one for one in test.notes if one != describe_missing_header(own_names))
    dataset = test.dataset.rename_columns(dict(zip(own_names, names, strict=True)))
    return replace(test, dataset=dataset, notes=(*notes, note))


def _describe_part(part: _Part, field: str) -> list[str]:
    source = part.checked.source
    notes = [f"{source.name}: {note}" for note in source.notes]
    if reasons := [f"{count:,} {reason}" for reason, count in part.skipped.items() if count]:
        notes.append(f"{source.name}: rows left out ({field}.invalid: skip): {', '.join(reasons)}")
    return notes


def _collect_labels(train: ValidatedColumns, task: TaskColumns, config: DataConfig, field: str) -> tuple[str, ...]:
    names = train.names
    if train.label_lists is not None:
        names = [*chain.from_iterable(train.label_lists)]
        for option in ("keep_only", "first_labels"):
            if getattr(config, option):
                problem = "it selects examples by their one label, and these have several each"
                raise FedspanError(f"{field}.{option}", getattr(config, option), problem=problem)
    if names is None:
        for option in ("labels", "first_labels"):
            if getattr(config, option) is not None:
                problem = "these examples have no classes; leave it out"
                raise FedspanError(f"{field}.{option}", getattr(config, option), problem=problem)
        return ()
    available = _order_labels(names, config, field) if config.label_columns is None else config.label_columns
    if task.complete_labels is not None:
        available = task.complete_labels(available)
        if config.labels is not None:
            _require_complete_labels(config.labels, task.complete_labels, field)
    if config.labels is not None:
        missing = [label for label in config.labels if label not in available]
        # Without keep_only a label may be absent: one client's file need not contain every class.
        if config.keep_only and missing:
            problem = (
                f"no row of {train.source.name} has the label {missing[0]!r}. {suggest_nearest(missing[0], available)}"
            )
            raise FedspanError(f"{field}.labels", missing[0], problem=problem)
        return tuple(config.labels)
    if len(available) < 2:
        only = f"all rows have the label {available[0]!r}" if available else "no row has a label"
        problem = f"{only}, where two labels or more are needed"
        raise FedspanError(f"{field}.label", config.label or "label", problem=problem)
    if config.first_labels is not None and config.first_labels > len(available):
        expected = f"at most {len(available)}, the number of labels in {train.source.name}"
        raise FedspanError(f"{field}.first_labels", config.first_labels, expected)
    return tuple(available[: config.first_labels])


def _describe_labels(train: ValidatedColumns, labels: Sequence[str], task: TaskColumns) -> list[str]:
    """Return sentences on labels that may be one, and on those with one training example."""
    similar: dict[str, list[str]] = {}
    for label in labels:
        similar.setdefault(" ".join(label.casefold().split()), []).append(label)
    notes = [
        f"labels: {' and '.join(map(repr, same))} differ only in case or spaces, and are different labels"
        for same in similar.values()
        if len(same) > 1
    ]
    counts = Counter(train.names or (chain.from_iterable(train.label_lists or ()) if task.is_multi_label else ()))
    rare = [label for label in labels if counts[label] == 1]
    if rare and train.source.is_complete:
        shown = ", ".join(rare[:_SHOWN]) + (", ..." if rare[_SHOWN:] else "")
        notes.append(f"labels: {len(rare)} of {len(labels)} have only one example: {shown}")
    return notes


def _require_complete_labels(labels: Sequence[str], complete: Callable[[Sequence[str]], list[str]], field: str) -> None:
    """Require that all labels belong to the task's scheme, and that those are among them that it always has."""
    incomplete = next((label for label in labels if label not in complete(labels)), None)
    missing = next((label for label in complete([]) if label not in labels), None)
    if incomplete is not None or missing is not None:
        problem = (
            f"the label {missing!r} is missing" if incomplete is None else f"no example has the label {incomplete!r}"
        )
        raise FedspanError(f"{field}.labels", incomplete, ", ".join(complete(labels)), problem=problem)


def _order_labels(names: Sequence[str], config: DataConfig, field: str) -> list[str]:
    available = sort_names(names)
    listed = None if config.dataset is None else get_dataset_entry(config.dataset, f"{field}.dataset").labels
    return [label for label in listed if label in available] if listed and set(available) <= set(listed) else available


def _replace_unknown_labels(part: _Part, labels: Sequence[str]) -> _Part:
    """Return a part in which examples with an unknown label have the first one instead, and are marked."""
    import datasets

    checked, known = part.checked, set(labels)
    if checked.names is None and checked.label_lists is None:
        return part
    names, lists = checked.names, checked.label_lists
    rows = [[name] for name in names or ()] if lists is None else lists
    ignored = [not known.issuperset(row) for row in rows]
    rows = [[labels[0]] * len(row) if is_ignored else row for row, is_ignored in zip(rows, ignored, strict=True)]
    marked = replace(
        checked,
        names=None if names is None else [name for (name,) in rows],
        label_lists=None if lists is None else rows,
        columns={**checked.columns, _IGNORED: pa.array(ignored, pa.bool_())},
        features={**checked.features, _IGNORED: datasets.Value("bool")},
    )
    return replace(part, checked=marked)


def _encode_labels(
    part: _Part, labels: Sequence[str], labels_in_training: set[str], config: DataConfig, field: str, name: str
) -> datasets.Dataset:
    """Return the examples with label indices; drop rows with labels not to be used, refuse or skip unknown labels."""
    import datasets

    checked = part.checked
    if checked.label_lists is not None:
        return _encode_label_lists(part, checked.label_lists, labels, config, field, name)
    if checked.names is None:
        return make_dataset(pa.table(checked.columns), checked.features)
    index = {label: position for position, label in enumerate(labels)}
    keep, ids, unknown = [], [], 0
    for row, label in enumerate(checked.names):
        if label in index:
            keep.append(row)
            ids.append(index[label])
        elif not (config.keep_only or (config.first_labels is not None and label in labels_in_training)):
            if config.invalid == "error":
                raise _make_unknown_label_error(label, labels, checked.source.row(row), config, field, name)
            unknown += 1
    part.skipped["with an unknown label"] = unknown
    if not keep:
        problem = f"no row of {checked.source.name} has one of the labels {', '.join(labels[:6])}"
        raise FedspanError(f"{field}.{name}", checked.source.name, problem=problem)
    table = pa.table(checked.columns)
    if len(keep) < len(table):
        table = table.take(keep)
    position = 2 if "text_pair" in checked.columns else 1  # after the columns to be labeled
    table = table.add_column(position, "label", pa.array(ids, pa.int64()))
    return make_dataset(table, {**checked.features, "label": datasets.Value("int64")})


def _encode_label_lists(
    part: _Part, label_lists: list[list[str]], labels: Sequence[str], config: DataConfig, field: str, name: str
) -> datasets.Dataset:
    """Return the examples with lists of label indices; refuse or skip rows with an unknown label."""
    import datasets

    checked, index = part.checked, {label: position for position, label in enumerate(labels)}
    keep: list[int] = []
    for row, names in enumerate(label_lists):
        unknown = next((label for label in names if label not in index), None)
        if unknown is None:
            keep.append(row)
        elif config.invalid == "error":
            raise _make_unknown_label_error(unknown, labels, checked.source.row(row), config, field, name)
    part.skipped["with an unknown label"] = len(label_lists) - len(keep)
    if not keep:
        problem = f"every row of {checked.source.name} has a label that is not one of {', '.join(labels[:6])}"
        raise FedspanError(f"{field}.{name}", checked.source.name, problem=problem)
    ids = pa.array([[index[label] for label in label_lists[row]] for row in keep], pa.list_(pa.int64()))
    table = pa.table(checked.columns).take(keep).append_column("labels", ids)
    return make_dataset(table, {**checked.features, "labels": datasets.List(datasets.Value("int64"))})


def _make_unknown_label_error(
    label: str, labels: Sequence[str], row: str, config: DataConfig, field: str, part: str
) -> FedspanError:
    origin = f"{field}.labels" if config.labels is not None else "the training data"
    problem = f"{row} has the label {label!r}, which is not in {origin}. {suggest_nearest(label, labels)} "
    return FedspanError(
        f"{field}.{part}", label, problem=f"{problem}To leave such rows out, set {field}.invalid: skip."
    )


def _hold_out(
    data: datasets.Dataset, config: DataConfig, field: str, seed: int
) -> tuple[datasets.Dataset, datasets.Dataset]:
    count = max(1, round(len(data) * config.test_fraction))
    rng, groups = make_generator(seed, "data", "test"), encode_groups(data, config, field)
    selected = (
        _draw_rows(data, count, rng, keep_one=True)
        if groups is None
        else draw_groups(groups, count, rng, _get_label_ids(data))
    )
    if len(selected) == 0 and groups is not None:
        problem = f"all rows are one group, of which no part can be held out; set {field}.test_fraction: 0"
        raise FedspanError(f"{field}.group", config.group, problem=problem)
    if len(selected) == 0:
        reason = "each label has only one example" if "label" in data.column_names else "there is only one example"
        problem = f"{reason}, so none can be held out for testing. Name a test set, or set {field}.test_fraction: 0."
        raise FedspanError(f"{field}.train", config.train, problem=problem)
    remaining = np.setdiff1d(np.arange(len(data)), selected)
    return take_rows(data, remaining), take_rows(data, selected)


def _get_label_ids(data: datasets.Dataset) -> np.ndarray | None:
    return get_arrow_column(data, "label").to_numpy() if "label" in data.column_names else None


def _limit_examples(data: datasets.Dataset, config: DataConfig, seed: int, part: str) -> datasets.Dataset:
    if config.max_examples is None or len(data) <= config.max_examples:
        return data
    return take_rows(
        data, _draw_rows(data, config.max_examples, make_generator(seed, "data", "cap", part), keep_one=False)
    )


def _draw_rows(data: datasets.Dataset, count: int, rng: np.random.Generator, *, keep_one: bool) -> np.ndarray:
    """Draw `count` sorted row indices, labels in proportion (largest remainder); `keep_one` leaves one of each."""
    labels = _get_label_ids(data)
    if labels is None:
        return np.sort(rng.permutation(len(data))[: min(count, len(data) - keep_one)])
    label_counts = np.bincount(labels)
    quota = label_counts * (count / len(labels))
    capacity = np.maximum(label_counts - 1, 0) if keep_one else label_counts
    sizes = np.minimum(np.floor(quota).astype(np.int64), capacity)
    while sizes.sum() < count and (sizes < capacity).any():
        sizes[np.argmax(np.where(sizes < capacity, quota - sizes, -np.inf))] += 1
    selected = [rng.permutation(np.flatnonzero(labels == label))[:number] for label, number in enumerate(sizes)]
    return np.sort(np.concatenate(selected))
