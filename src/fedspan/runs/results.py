"""Readers of a run folder: the report, the config and the clients of a run."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, cast

from fedspan.config import RunConfig, parse_config, parse_text
from fedspan.data.partition import Partition
from fedspan.errors import FedspanError, nearest
from fedspan.files import read_bytes
from fedspan.runs.folder import RunFolder
from fedspan.runs.session import RunReport

_LATER = {"failures", "other_bytes", "privacy"}
"""Fields that reports of earlier versions lack."""

__all__ = ["is_run", "read_config", "read_partition", "read_report", "require_client"]


def is_run(folder: str | Path) -> bool:
    """Check whether a folder holds a run (an exported model has a config.json, but no config.yaml)."""
    return os.path.isfile(RunFolder(folder).config)  # Path's own raises for a name that is too long for the disk


def read_report(folder: str | Path) -> RunReport:
    """Read the report of a finished run.

    Raises:
        FedspanError: If there is no run in the folder, it is not finished, or report.json was changed.
    """
    place = RunFolder(folder)
    if not is_run(folder):
        raise FedspanError("run folder", str(folder), "no run was begun here")
    if not place.report.is_file():
        raise FedspanError("run folder", str(folder), f"this run is not finished; go on with --resume {folder}")
    values = place.read_json(place.report)
    names = {field.name for field in dataclasses.fields(RunReport)}
    if not isinstance(values, dict) or not names - _LATER <= set(values) <= names:
        found = sorted(values) if isinstance(values, dict) else values
        raise FedspanError(str(place.report), found, f"a report with {', '.join(sorted(names))}")
    content = cast(dict[str, Any], values)
    adapters, examples = content["adapters"], content.pop("examples")
    if not isinstance(adapters, dict) or not all(isinstance(path, str) for path in adapters.values()):
        raise FedspanError(f"{place.report}, adapters", adapters, "folders by client id, or under global")
    if not isinstance(examples, list):
        raise FedspanError(f"{place.report}, examples", examples, "a list")
    return RunReport(examples=tuple(examples), **content)


def read_config(folder: str | Path) -> RunConfig:
    """Read the config of a run.

    Raises:
        FedspanError: If config.yaml is missing or no longer a valid config.
    """
    place = RunFolder(folder)
    return parse_config(parse_text(place.config_text(), str(place.config)))


def read_partition(folder: str | Path) -> Partition:
    """Read the partition of a run: the examples of each client.

    Raises:
        FedspanError: If partition.json is missing or was changed.
    """
    place = RunFolder(folder)
    return Partition.from_json(read_bytes(place.partition).decode(errors="replace"), str(place.partition))


def require_client(folder: str | Path, client: str) -> None:
    """Check that a run has a client.

    Raises:
        FedspanError: If it has not; the error names the nearest ids.
    """
    ids = [part.id for part in read_partition(folder).clients]
    if client not in ids:
        raise FedspanError("client", client, f"no such client in {folder}; the nearest are {nearest(client, ids)}")
