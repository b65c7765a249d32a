"""Data sets that fedspan knows by name: their locations, columns and usual metrics.

The table itself is ``catalogue.yaml`` beside this file; ``fedspan data`` shows it, and ``data.dataset`` refers to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from fedspan.data.dialects import Quoting
from fedspan.errors import FedspanError, suggest_nearest


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Columns(_Record):
    """Columns by role; those that a task does not use are None."""

    text: str | None = None
    text_pair: str | None = None
    label: str | None = None
    answer: str | None = None
    image: str | None = None


class Hub(_Record):
    """Location on the Hugging Face hub."""

    id: str
    """Id of the repository; ``builtin:...`` for a corpus that ships with fedspan."""
    config: str | None = None
    """Configuration of the repository."""
    train_split: str = "train"
    test_split: str | None = "test"
    """Split to test on; None if a part of the training split has to be set aside."""


class Files(_Record):
    """Original files, as published."""

    train: str
    """Name of the file with the training rows."""
    test: str | None = None
    """Name of the file with the test rows; None if there is none."""
    columns: Columns = Columns()
    """Columns that differ from the hub's."""
    header: list[str] | None = None
    """All column names, if the files have no header."""
    quoting: Quoting | None = None
    """Quotes that enclose fields; None: as usual for the suffix."""


class Rows(_Record):
    """Numbers of rows; None for a split that does not exist."""

    train: int
    test: int | None = None


class DatasetEntry(_Record):
    """One data set."""

    key: str
    """Name in ``data.dataset``."""
    title: str
    """Common name of the data set."""
    summary: str
    """Content, in one line."""
    task: str
    metric: str
    """Usual metric; ``exact_match`` needs ``evaluation.generate``."""
    hub: Hub | None = None
    """Location on the hub; None if only files can be used."""
    columns: Columns
    """Columns on the hub."""
    files: Files | None = None
    """Original files; None if there are none that can be read."""
    labels: list[str] | None = None
    """Labels in the order of the classifier's outputs, if alphabetical order would compute F1 for the wrong one."""
    classes: int | None = Field(default=None, ge=2)
    """Number of labels; None if there are none, or they were not counted."""
    prompt: str | None = None
    """Prompt of a language model: a template, or the name of one."""
    answer_pattern: str | None = None
    """Regex of the part of an answer that is compared."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Maximal number of tokens of a generated answer."""
    invalid: Literal["error", "skip"] = "error"
    """``skip`` if rows without a text or an answer occur, which are left out."""
    rows: Rows
    license: str
    """License as its publisher states it."""
    note: str | None = None
    source: str
    """Address of its description."""

    @property
    def file_columns(self) -> Columns:
        """Columns of the original files."""
        if self.files is None:
            return self.columns
        overrides = self.files.columns.model_dump(exclude_none=True)
        return self.columns.model_copy(update=overrides)


@cache
def _load_catalogue() -> Mapping[str, DatasetEntry]:
    text = files("fedspan.data").joinpath("catalogue.yaml").read_text(encoding="utf-8")
    return {key: DatasetEntry(key=key, **entry) for key, entry in yaml.safe_load(text).items()}


def list_datasets() -> tuple[DatasetEntry, ...]:
    """Return all data sets that ``data.dataset`` can name, in the order of the catalogue.

    Returns:
        The entries, each with its ``key``, task, columns and license.

    Examples:
        >>> [entry.key for entry in fedspan.list_datasets()]
    """
    return tuple(_load_catalogue().values())


def get_dataset_entry(key: str, field: str) -> DatasetEntry:
    """Return the entry of a data set."""
    catalogue = _load_catalogue()
    if key not in catalogue:
        raise FedspanError(field, key, problem=f"no data set is named {key!r}. {suggest_nearest(key, catalogue)}")
    return catalogue[key]


def render_snippet(entry: DatasetEntry, source: Literal["hub", "files"]) -> str | None:
    """Return a part of a config to paste, as YAML; None if the data set can't be used that way."""
    data: dict[str, Any] = {"dataset": entry.key}
    if source == "files":
        if entry.files is None:
            return None
        data["train"] = entry.files.train
        if entry.files.test is not None:
            data["test"] = entry.files.test
    elif entry.hub is None:
        return None
    content: dict[str, Any] = {"data": data}
    if entry.metric == "exact_match":
        content["evaluation"] = {"generate": True}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True).rstrip("\n")
