"""The results of a run: its report, partition and clients, read from its folder."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from fedspan.data.partition import Partition
from fedspan.errors import FedspanError, suggest_nearest
from fedspan.files import read_bytes
from fedspan.runs.folder import RunFolder, describe_missing_run
from fedspan.runs.model_card import RunReport
from fedspan.runs.records import RECORDS


def is_run(folder: str | Path) -> bool:
    """Check whether a folder holds a run (an exported model has a config.json, but no config.yaml)."""
    return os.path.isfile(RunFolder(folder).config)  # Path's own raises for a name that is too long for the disk


def read_report(folder: str | Path) -> RunReport:
    """Read the report of a finished run.

    Returns:
        The report that ``run`` returned.

    Examples:
        >>> fedspan.read_report("runs/first").scores["test"]

    Raises:
        FedspanError: If there is no run in the folder, it is not finished, or report.json was changed.
    """
    run_folder = RunFolder(folder)
    if not is_run(folder):
        raise FedspanError("run folder", str(folder), problem=describe_missing_run(folder))
    if not run_folder.report.is_file():
        raise FedspanError(
            "run folder", str(folder), problem=f"this run is not finished. Continue it with --resume {folder}"
        )
    content = run_folder.read_sealed(run_folder.report)
    values = {name: value for name, value in content.items() if name not in RECORDS}
    names = {field.name for field in dataclasses.fields(RunReport)}
    if set(values) != names:
        raise FedspanError(str(run_folder.report), sorted(values), f"a report with {', '.join(sorted(names))}")
    examples, warnings = values.pop("examples"), values.pop("warnings")
    return RunReport(examples=tuple(examples), warnings=tuple(warnings), **values)


def read_partition(folder: str | Path) -> Partition:
    """Read the partition of a run: the examples of each client.

    Raises:
        FedspanError: If partition.json is missing or was changed.
    """
    run_folder = RunFolder(folder)
    return Partition.from_json(read_bytes(run_folder.partition).decode(errors="replace"), str(run_folder.partition))


def require_client(folder: str | Path, client: str) -> None:
    """Check that a run has a client.

    Raises:
        FedspanError: If it has not; the error names the nearest ids.
    """
    ids = [part.id for part in read_partition(folder).clients]
    if client not in ids:
        raise FedspanError(
            "client", client, problem=f"{folder} has no client {client!r}. {suggest_nearest(client, ids)}"
        )
