"""Settings that ``data.dataset`` implies, from the catalogue of data sets."""

from __future__ import annotations

import re
from typing import Any

import pydantic

from fedspan.data.catalogue import Columns, DatasetEntry, get_dataset_entry
from fedspan.data.config import DataConfig
from fedspan.data.files import has_own_splits, read_column_names
from fedspan.errors import FedspanError

_DELIMITED = re.compile(r"\.[ct]sv(\.gz)?$")


def fill_data_defaults(config: DataConfig, field: str = "data") -> DataConfig:
    """Complete the settings with the catalogue's values for ``config.dataset``; the user's settings take precedence.

    The column names of a local file are read, to distinguish the original files from copies of the hub's.
    """
    if config.dataset is None:
        return config
    entry = get_dataset_entry(config.dataset, f"{field}.dataset")
    defaults = _get_train_defaults(entry, config, field)
    if config.messages is None:
        defaults["prompt"] = entry.prompt
    defaults["invalid"] = entry.invalid
    user_settings = config.model_dump(exclude_unset=True)
    if config.train is None:  # an explicit null leaves it to the catalogue, too
        user_settings.pop("train", None)
    try:
        return DataConfig.model_validate({**defaults, **user_settings})
    except pydantic.ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        problem = f"the settings beside it do not fit it: {message}"
        raise FedspanError(f"{field}.dataset", config.dataset, problem=problem) from None


def _get_train_defaults(entry: DatasetEntry, config: DataConfig, field: str) -> dict[str, Any]:
    """Return the settings that depend on the location of the training examples."""
    hub = entry.hub
    if config.train is None:
        if hub is None:
            example = "" if entry.files is None else f" such as {entry.files.train}"
            expected = f"the path of a local file{example}: {entry.key} is not on the hub (see {entry.source})"
            raise FedspanError(f"{field}.train", None, expected)
    elif not has_own_splits(config.train):
        return _get_file_defaults(entry, config.train)
    settings = _list_options(entry.columns)
    if hub is not None and config.train in (None, hub.id):
        settings |= {"train": hub.id, "hub_config": hub.config}
        settings |= {"train_split": hub.train_split, "test_split": hub.test_split}
    return settings


def _get_file_defaults(entry: DatasetEntry, path: str) -> dict[str, Any]:
    names = read_column_names(path)
    original, hub = entry.file_columns, entry.columns
    header = None if entry.files is None else entry.files.header
    quoting = None if entry.files is None else entry.files.quoting
    if names is not None and (header is not None or not _has_columns(names, original)) and _has_columns(names, hub):
        return _list_options(hub)
    # In an original file without a header, the first line is an example.
    has_no_header = names is not None and not _has_columns(names, original) and bool(_DELIMITED.search(path.lower()))
    return {**_list_options(original), "columns": header if has_no_header else None, "quoting": quoting}


def _has_columns(names: list[str], columns: Columns) -> bool:
    return set(columns.model_dump(exclude_none=True).values()) <= set(names)


def _list_options(columns: Columns) -> dict[str, Any]:
    return columns.model_dump(exclude_none=True)
