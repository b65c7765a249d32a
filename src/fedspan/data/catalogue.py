"""Data sets that fedspan knows by name: where they are, which columns they have, and what they are measured by.

The table itself is ``catalogue.yaml`` beside this file; ``fedspan data`` shows it, and ``data.dataset`` takes from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from fedspan.errors import FedspanError, nearest

__all__ = ["Columns", "DatasetEntry", "Files", "Hub", "Rows", "dataset_of", "list_datasets", "snippet"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Columns(_Record):
    """Which columns hold what; those that a task has no use for are None."""

    text: str | None = None
    text_pair: str | None = None
    label: str | None = None
    answer: str | None = None
    image: str | None = None


class Hub(_Record):
    """Where it is on the Hugging Face hub.

    Args:
        id: of the repository; ``builtin:...`` for a corpus that comes with fedspan.
        config: which of the repository's configurations.
        train_split: what is trained on.
        test_split: what is tested on; None where a part of the training split has to be set aside.
    """

    id: str
    config: str | None = None
    train_split: str = "train"
    test_split: str | None = "test"


class Files(_Record):
    """Its original files, as they are published.

    Args:
        train: what the file with the training rows is called.
        test: what the file with the test rows is called; None if there is none.
        columns: those that differ from the hub's.
        header: all column names, where the files have none of their own.
        quotes: whether quotes enclose fields in a tsv file.
    """

    train: str
    test: str | None = None
    columns: Columns = Columns()
    header: list[str] | None = None
    quotes: bool | None = None


class Rows(_Record):
    """How many rows there are; None for a split that there is none of."""

    train: int
    test: int | None = None


class DatasetEntry(_Record):
    """One data set.

    Args:
        key: what ``data.dataset`` calls it.
        title: what people call it.
        summary: what is in it, in one line.
        task: what it is for.
        metric: by which it is usually measured; ``exact_match`` needs ``evaluation.generate``.
        hub: where it is on the hub; None if only files can be used.
        columns: on the hub.
        files: its original files; None if there are none that can be read.
        labels: in the order of the classifier's outputs, where the alphabet's would turn F1 to the wrong one.
        classes: how many labels there are; None where there are none, or nobody counted.
        prompt: what a language model is given: a template, or the name of one.
        answer_pattern: what counts of an answer.
        max_new_tokens: of a generated answer.
        drop_empty: whether some rows lack a text or an answer and are left out.
        rows: how many.
        licence: as its publisher states it.
        note: what else to know.
        source: where it is described.
    """

    key: str
    title: str
    summary: str
    task: Literal["sequence-classification", "regression", "causal-lm", "image-classification"]
    metric: str
    hub: Hub | None = None
    columns: Columns
    files: Files | None = None
    labels: list[str] | None = None
    classes: int | None = Field(default=None, ge=2)
    prompt: str | None = None
    answer_pattern: str | None = None
    max_new_tokens: int | None = Field(default=None, ge=1)
    drop_empty: bool = False
    rows: Rows
    licence: str
    note: str | None = None
    source: str

    @property
    def file_columns(self) -> Columns:
        """The columns of its original files."""
        if self.files is None:
            return self.columns
        differing = self.files.columns.model_dump(exclude_none=True)
        return self.columns.model_copy(update=differing)


@cache
def _catalogue() -> Mapping[str, DatasetEntry]:
    text = files("fedspan.data").joinpath("catalogue.yaml").read_text(encoding="utf-8")
    return {key: DatasetEntry(key=key, **entry) for key, entry in yaml.safe_load(text).items()}


def list_datasets() -> tuple[DatasetEntry, ...]:
    """All data sets that ``data.dataset`` can name, in the order of the catalogue."""
    return tuple(_catalogue().values())


def dataset_of(key: str, field: str) -> DatasetEntry:
    """The entry of a data set.

    Args:
        key: as the user wrote it.
        field: what the user calls the option.

    Raises:
        FedspanError: no such data set.
    """
    known = _catalogue()
    if key not in known:
        raise FedspanError(field, key, f"no such data set; the nearest are {nearest(key, known)}")
    return known[key]


def snippet(entry: DatasetEntry, where: Literal["hub", "files"]) -> str | None:
    """A part of a config to paste, YAML; None where the data set can't be used so."""
    data: dict[str, Any] = {"dataset": entry.key}
    if where == "files":
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
