"""Row-by-row checks of the columns that a task needs: texts, images, classes, numbers, prompts and answers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedspan.data.config import DataConfig
from fedspan.data.dialects import describe_missing_header
from fedspan.data.images import IMAGES, resolve_paths
from fedspan.data.names import (
    describe_missing_column,
    describe_partial_column,
    find_separator,
    get_arrow_column,
    is_list,
    mark_source_column,
    read_names,
    trim,
)
from fedspan.data.numbers import is_ambiguous, parse_numbers
from fedspan.data.source import Source
from fedspan.data.templates import parse_template
from fedspan.errors import FedspanError

FLAGS = {"0": False, "1": True, "false": False, "true": True}
"""Values of columns that say whether a row has a label, in lower case."""
_TASK_COLUMNS = ("text", "text_pair", "label", "target", "answer", "history", "image", "has_masks")
"""Columns of examples that tasks and partitions know by these names."""


@dataclass(frozen=True)
class ValidatedColumns:
    """A source whose rows all have the values that the task needs."""

    source: Source
    """The source as it was read."""
    columns: dict[str, pa.ChunkedArray]
    """The task's columns (`text` and others), followed by the source's other columns."""
    features: dict[str, Any]
    """Types of `columns` for `datasets`."""
    names: list[str] | None
    """Class of each row; None if rows have no single class."""
    label_lists: list[list[str]] | None = None
    """Labels of each row, any number of them; None if rows have no lists of labels."""
    label_separator: str | None = None
    """Separator of the labels in texts; None: no text was separated."""


@dataclass(frozen=True)
class ReadColumns:
    """The checked columns of a task."""

    columns: dict[str, pa.ChunkedArray]
    """Arrow columns by the task's own names (``text``, ``target``): texts, numbers, images, lists of texts."""
    used: set[str]
    """The source's columns that they were read from, which are not passed on under their own names."""
    names: list[str] | None = None
    """Class of each row, for tasks with one label for an example; it becomes the column ``label`` (int64)."""
    label_lists: list[list[str]] | None = None
    """Labels of each row, for tasks with several labels for an example or a label for each of its words; they become
    the column ``labels`` (lists of int64)."""
    label_separator: str | None = None
    """The separator by which texts were divided into `label_lists`; further parts and files are read with the same
    one."""


def _require_texts(config: DataConfig, field: str) -> list[tuple[str, ...]]:
    columns = (config.text, config.text_pair, config.label or "label")
    return [(column,) for column in columns if column is not None]


@dataclass(frozen=True, kw_only=True)
class TaskColumns:
    """The columns that a task needs, and how they are read."""

    read: Callable[[ColumnReader, DataConfig], ReadColumns]
    """Reads and checks the columns that a config names."""
    get_required_columns: Callable[[DataConfig, str], list[tuple[str, ...]]] = _require_texts
    """Returns groups of columns, for ``data.invalid: skip``; a row needs a value in at least one column of each group.
    Its arguments are the config and the user's name of it."""
    get_example_column: Callable[[DataConfig], str] = lambda config: config.text
    """Returns the column that holds the example itself, for advice on duplicates."""
    get_joined_columns: Callable[[DataConfig], Sequence[str | None]] = lambda config: (
        config.text,
        config.text_pair,
        config.answer,
    )
    """Returns the columns whose lists of texts are joined with spaces."""
    get_label_column: Callable[[DataConfig], str | None] = lambda config: config.label or "label"
    """Returns the column whose lists of one label are unpacked; None: there is none."""
    roles: tuple[str, ...] = ()
    """Further roles of columns, which a user maps to column names in ``data.roles``."""
    has_numeric_labels: bool = False
    """Whether the column of labels holds numbers."""
    is_multi_label: bool = False
    """Whether an example has any number of labels: an empty list of labels is a value, and the options
    ``label_separator`` and ``label_columns`` apply."""
    complete_labels: Callable[[Sequence[str]], list[str]] | None = None
    """Orders and completes the labels that occur; None: they are sorted."""
    find_valid_rows: Callable[[Source, DataConfig, int | None], Sequence[bool]] | None = None
    """Returns for every row of a source whether its values can be used together, for ``data.invalid: skip``; a column
    may be missing. The last argument is the number of bytes that may be read for it, None: any number. None: nothing
    but values is required."""
    required_values: str = "a text, a label or an answer"
    """The values without one of which a row is invalid, for messages."""


def validate_columns(source: Source, config: DataConfig, task: TaskColumns, field: str, part: str) -> ValidatedColumns:
    """Check the columns that a task needs, and return them with the others unchanged.

    Args:
        part: The option that names the source, ``train`` or ``test``.
    """
    import datasets
    from datasets.features.features import generate_from_arrow_type

    read = task.read(ColumnReader(source, field, part, skips=config.invalid == "skip"), config)
    columns = dict(read.columns)
    features: dict[str, Any] = {
        name: datasets.Image() if column.type == IMAGES else generate_from_arrow_type(column.type)
        for name, column in columns.items()
    }
    # The requested column has the name of another one that happens to be called "text" or "label".
    task_names = {*_TASK_COLUMNS, *read.columns, *(() if read.label_lists is None else ("labels",))}
    for column in source.dataset.column_names:
        if column in read.used:
            continue
        values = get_arrow_column(source.dataset, column)
        if column in task_names and pa.types.is_nested(values.type):
            continue  # such as images: no row is assigned or grouped by them
        name = mark_source_column(column) if column in task_names else column
        columns[name] = values
        features[name] = source.dataset.features[column]
    return ValidatedColumns(source, columns, features, read.names, read.label_lists, read.label_separator)


class ColumnReader:
    """Reader of one source's columns; every error names the option and the row."""

    def __init__(self, source: Source, field: str, part: str, *, skips: bool = False) -> None:
        self.source, self.field, self.file = source, field, f"{field}.{part}"
        self.header_advice = f"If the first line is an example, set {field}.header: false."
        if part == "test":  # the option would apply to the training file, whose header has been found
            remedy = f"leave {field}.header out, or insert a line that names the columns as in {field}.train"
            self.header_advice = f"If the first line is an example, {remedy}."
        self.skip_advice = "" if skips else f"To leave such rows out, set {field}.invalid: skip."
        """The sentence on how to leave out invalid rows, for errors; empty if they are left out already."""

    def require(self, column: str, option: str, value: str | None = None) -> str:
        """Require a column and return the option's field."""
        dataset, option_field = self.source.dataset, f"{self.field}.{option}"
        if column not in dataset.column_names:
            problem = describe_missing_column(column, dataset.column_names, self.source.name)
            if describe_missing_header(dataset.column_names) in self.source.notes:
                problem += f" In this file, {describe_missing_header(dataset.column_names)}."
            elif self.source.header:
                problem += f" {self.header_advice}"
            partial = describe_partial_column(column)
            problem += "".join(f" In this file, {note}." for note in self.source.notes if note.startswith(partial))
            raise FedspanError(option_field, value or column, problem=problem)
        return option_field

    def read_texts(self, column: str, option: str) -> pa.ChunkedArray:
        option_field = self.require(column, option)
        texts = get_arrow_column(self.source.dataset, column)
        if not _is_text(texts.type):
            problem = f"column {column!r} of {self.source.name} holds {texts.type}, not text"
            raise FedspanError(option_field, column, problem=problem)
        texts = texts.cast(pa.string())
        filled = pc.call_function("greater", [pc.call_function("binary_length", [trim(texts)]), pa.scalar(0)])
        self._require_values(column, filled.fill_null(False).to_numpy(), "text")
        return texts

    def _require_values(self, column: str, has_value: np.ndarray | list[bool], kind: str) -> None:
        filled = np.asarray(has_value, bool)
        if not filled.all():
            row = self.source.row(int(filled.argmin()))
            problem = f"{row} has no {kind} in column {column!r}. {self.skip_advice}"
            raise FedspanError(self.file, self.source.name, problem=problem)

    def require_rows(self, is_valid: Sequence[bool], lack: str, columns: Sequence[str]) -> None:
        """Require that the values of every row fit together.

        Args:
            is_valid: Whether those of each row do.
            lack: What a row has otherwise, as a phrase: "no two different answers".
        """
        row = next((row for row, valid in enumerate(is_valid) if not valid), None)
        if row is not None:
            problem = f"{self.source.row(row)} has {lack} in the columns {', '.join(columns)}. {self.skip_advice}"
            raise FedspanError(self.file, self.source.name, problem=problem)

    def read_classes(self, column: str) -> list[str]:
        option_field = self.require(column, "label")
        values = get_arrow_column(self.source.dataset, column)
        if pa.types.is_nested(values.type):
            problem = f"column {column!r} of {self.source.name} holds {values.type}, not one label a row"
            raise FedspanError(option_field, column, problem=problem)
        names = read_names(self.source.dataset, column)
        if pa.types.is_floating(values.type):
            fraction = next((name for name in names if name is not None and not name.lstrip("-").isdigit()), None)
            if fraction is not None:
                row = self.source.row(names.index(fraction))
                problem = f"column {column!r} holds numbers, not classes: {row} has {fraction}. "
                raise FedspanError(option_field, column, problem=problem + "To predict numbers, set task: regression.")
        self._require_values(column, [name is not None for name in names], "label")
        return cast(list[str], names)

    def read_text_lists(self, column: str, option: str) -> pa.ChunkedArray:
        """Read a column of lists of texts, such as the words of a sentence; no list is empty."""
        option_field = self.require(column, option)
        values = get_arrow_column(self.source.dataset, column)
        kind = values.type
        if not is_list(kind) or not _is_text(kind.value_type):
            problem = f"column {column!r} of {self.source.name} holds {kind}, not lists of texts"
            raise FedspanError(option_field, column, problem=problem)
        self._require_values(column, [bool(value) and None not in value for value in values.to_pylist()], "texts")
        return values.cast(pa.list_(pa.string()))

    def read_tag_lists(self, column: str, option: str) -> list[list[str]]:
        """Read a column of lists of tags, as texts or as the numbers of a data set that names its classes."""
        option_field = self.require(column, option)
        values = get_arrow_column(self.source.dataset, column)
        inner: Any = getattr(self.source.dataset.features[column], "feature", None)
        classes: list[str] | None = getattr(inner, "names", None)
        if classes is None:
            return cast("list[list[str]]", self.read_text_lists(column, option).to_pylist())
        rows: list[list[int] | None] = values.to_pylist()
        is_valid = [bool(row) and all(tag is not None and 0 <= tag < len(classes) for tag in row or ()) for row in rows]
        self._require_values(column, is_valid, f"tags of {option_field}")
        return [[classes[tag] for tag in row or ()] for row in rows]

    def read_label_lists(self, column: str, separator: str | None) -> tuple[list[list[str]], str | None]:
        """Read any number of labels for each row, from lists or from texts with separated labels; repeats are dropped.

        Args:
            column: The column. Lists hold texts, whole numbers or the numbers of named classes; an empty list or text
                is no label.
            separator: Separator of the labels in texts; None: the first of ``|``, ``;`` and ``,`` in the column.

        Returns:
            The labels, and the separator of texts; None of lists, and of texts without any.
        """
        option_field = self.require(column, "label")
        values = get_arrow_column(self.source.dataset, column)
        if _is_text(values.type):
            texts: list[str | None] = values.to_pylist()
            separator = separator or find_separator(texts)
            parts = [[text or ""] if separator is None else (text or "").split(separator) for text in texts]
            return [[*dict.fromkeys(label.strip() for label in row if label.strip())] for row in parts], separator
        inner: Any = getattr(self.source.dataset.features[column], "feature", None)
        kind = getattr(values.type, "value_type", None)
        if kind is None or inner is None or not (_is_text(kind) or pa.types.is_integer(kind)):
            problem = f"column {column!r} of {self.source.name} holds {values.type}, not lists of labels or texts"
            raise FedspanError(option_field, column, problem=problem)
        classes: list[str] | None = getattr(inner, "names", None)
        rows: list[list[Any] | None] = values.to_pylist()
        limit = float("inf") if classes is None else len(classes)
        is_valid = [
            row is not None and all(label is not None and (classes is None or 0 <= label < limit) for label in row)
            for row in rows
        ]
        self._require_values(column, is_valid, "list of labels")
        names = [[str(label) if classes is None else classes[label] for label in row or ()] for row in rows]
        return [[*dict.fromkeys(label.strip() for label in row if label.strip())] for row in names], None

    def read_flags(self, column: str, option: str) -> list[bool]:
        """Read a column of zeros and ones, or of false and true."""
        option_field = self.require(column, option)
        names = read_names(self.source.dataset, column)
        self._require_values(column, [name is not None for name in names], "value")
        flags = [FLAGS.get(str(name).lower()) for name in names]
        if None in flags:
            row = flags.index(None)
            problem = f"{self.source.row(row)} has {names[row]!r} in column {column!r}. {self.skip_advice}"
            raise FedspanError(option_field, column, "0 or 1, or false or true", problem=problem)
        return [flag is True for flag in flags]

    def get_role_column(self, config: DataConfig, role: str) -> str:
        """Return the column with a role: the one that ``data.roles`` names, or else one of the role's own name."""
        return config.roles.get(role, role)

    def read_numbers(self, column: str) -> pa.ChunkedArray:
        option_field = self.require(column, "label")
        values = read_names(self.source.dataset, column)
        numbers = parse_numbers(values)
        if None in numbers:
            row = numbers.index(None)
            value, place = values[row], self.source.row(row)
            if value is None or value.lower().lstrip("+-") in ("nan", "inf", "infinity"):
                problem = f"{place} has no number in column {column!r}. {self.skip_advice}"
                raise FedspanError(self.file, self.source.name, problem=problem)
            problem = f"{place} has {value!r} in column {column!r}, which is not a number. "
            if is_ambiguous(value):
                problem = f"{place} has {value!r} in column {column!r}: a decimal comma, or one between thousands. "
                problem += "Write decimal points. "
            raise FedspanError(option_field, column, problem=problem + self.skip_advice)
        return pa.chunked_array([pa.array(numbers, pa.float64())])

    def read_images(self, column: str) -> pa.ChunkedArray:
        option_field = self.require(column, "image")
        images = get_arrow_column(self.source.dataset, column)
        has_paths = _is_text(images.type)
        if has_paths:
            images = resolve_paths(self.source, column)
        elif not pa.types.is_struct(images.type) or {field.name for field in images.type} != {"bytes", "path"}:
            problem = f"column {column!r} of {self.source.name} holds {images.type}, not images or paths of images"
            raise FedspanError(option_field, column, problem=problem)
        rows = images.to_pylist()
        self._require_values(column, [image is not None and any(image.values()) for image in rows], "image")
        missing = next((row for row, image in enumerate(rows) if has_paths and not os.path.isfile(image["path"])), None)
        if missing is not None:
            problem = f"{self.source.row(missing)} names the image {rows[missing]['path']!r}, and there is no such "
            problem += f"file. Paths are relative to the folder of {self.source.name}. {self.skip_advice}"
            raise FedspanError(option_field, column, problem=problem)
        return images.cast(IMAGES)

    def read_prompts(self, prompt: str) -> pa.ChunkedArray:
        template = parse_template(prompt, f"{self.field}.prompt")
        for column in template.required:
            self.require(column, "prompt", prompt)
        dataset = self.source.dataset
        available = [column for column in template.columns if column in dataset.column_names]
        rows = [
            dict(zip(available, values, strict=True)) for values in zip(*(dataset[c] for c in available), strict=True)
        ]
        self._require_values(
            " + ".join(template.required),
            [any(str(value or "").strip() for value in row.values()) for row in rows],
            "text",
        )
        return pa.chunked_array([pa.array([template.render(row) for row in rows], pa.string())])

    def read_conversations(self, column: str) -> dict[str, pa.ChunkedArray]:
        option_field = self.require(column, "messages")
        values = get_arrow_column(self.source.dataset, column).to_pylist()
        parts = [self._read_conversation(option_field, column, value, row) for row, value in enumerate(values)]
        keys = ("text", "answer", "history")
        return {key: pa.chunked_array([pa.array([part[key] for part in parts], pa.string())]) for key in keys}

    def _read_conversation(self, option_field: str, column: str, value: object, row: int) -> dict[str, str]:
        messages = parse_conversation(value)
        if messages is None:
            problem = (
                f"{self.source.row(row)} is not a list of messages that ends with a user's and an assistant's message. "
            )
            raise FedspanError(option_field, column, problem=problem + self.skip_advice)
        history = json.dumps(messages[:-2], ensure_ascii=False)
        return {"text": messages[-2]["content"], "answer": messages[-1]["content"], "history": history}


def parse_messages(value: object) -> list[dict[str, str]] | None:
    """Return a list of messages, each with the texts ``role`` and ``content``; None if the value is none.

    A call of a tool, whose content is missing, and parts of other kinds than text are no texts.
    """
    try:
        messages = [
            {"role": message["role"], "content": message["content"]} for message in cast(list[Mapping[str, Any]], value)
        ]
    except (TypeError, KeyError):
        return None
    return messages if all(isinstance(text, str) for message in messages for text in message.values()) else None


def parse_conversation(value: object) -> list[dict[str, str]] | None:
    """Return the messages of a conversation; None if it does not end with a user's and an assistant's."""
    messages = parse_messages(value)
    if messages is None:
        return None
    roles = [message["role"] for message in messages]
    if len(messages) < 2 or roles[-2:] != ["user", "assistant"] or not messages[-1]["content"].strip():
        return None
    return messages


def _is_text(type: pa.DataType) -> bool:
    return pa.types.is_string(type) or pa.types.is_large_string(type) or pa.types.is_null(type)


def read_text_columns(reader: ColumnReader, config: DataConfig) -> tuple[dict[str, pa.ChunkedArray], set[str]]:
    """Read the column of texts and, if the config names one, that of second texts, with the columns that are used."""
    columns = {"text": reader.read_texts(config.text, "text")}
    if config.text_pair is not None:
        columns["text_pair"] = reader.read_texts(config.text_pair, "text_pair")
    return columns, {config.text, config.text_pair or config.text, config.label or "label"}


def _read_labeled_texts(reader: ColumnReader, config: DataConfig) -> ReadColumns:
    columns, used = read_text_columns(reader, config)
    return ReadColumns(columns, used, reader.read_classes(config.label or "label"))


LABELED_TEXTS = TaskColumns(read=_read_labeled_texts)
"""A text or a pair of texts with one label."""
