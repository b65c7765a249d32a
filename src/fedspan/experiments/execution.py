"""Execution of a series: its runs, one after another in one folder, can be stopped and resumed at any time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from fedspan.config import RunConfig, override, read_values
from fedspan.errors import FedspanError
from fedspan.experiments.reuse import runs_in_use
from fedspan.experiments.series import Step, Watcher
from fedspan.files import disk_errors, read_bytes, sweep, write_atomic
from fedspan.runs import train
from fedspan.runs.folder import RunFolder
from fedspan.runs.session import RunReport, is_run, read_config
from fedspan.training.prefix_rows import next_run

__all__ = ["ConfigLike", "begin", "command_line", "plain_values", "read_settings", "run_step"]

_SHORT = 1.0  # seconds; models of shorter runs are too small to matter, and a collection takes a third of a second

ConfigLike = RunConfig | Mapping[str, Any] | str | Path


def plain_values(config: ConfigLike, overrides: Sequence[str]) -> dict[str, Any]:
    """Return a config's values with overrides, not validated: they may hold options that only some methods have.

    Raises:
        FedspanError: If the file cannot be read or an override is malformed.
    """
    if isinstance(config, RunConfig):
        config = config.model_dump(mode="json")
    return override(config if isinstance(config, Mapping) else read_values(config), overrides)


def command_line(arguments: Sequence[str]) -> list[str]:
    """Return the command line for a table, as typed but without the program's folder."""
    program = Path(arguments[0]).name if arguments else ""
    return ["fedspan" if program in ("", "__main__.py") else program, *arguments[1:]]


def read_settings(
    folder: Path, name: str, kinds: Mapping[str, type | tuple[type, ...]], later: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read the settings of a series.

    Args:
        folder: Folder of the series.
        name: Name of the settings file, such as ``compare.yaml``.
        kinds: The settings with their types.
        later: Default values of settings that earlier versions did not write.

    Raises:
        FedspanError: If the folder holds no such series, or the settings file is malformed.
    """
    path = folder / name
    if not path.is_file():
        raise FedspanError(
            "folder", str(folder), problem=f"{str(folder)!r} holds no {name}. Give a config to start a new series"
        )
    expected = f"the settings {', '.join(kinds)}, as they were written at the beginning"
    try:
        values = yaml.safe_load(read_bytes(path))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FedspanError(str(path), None, expected, problem=f"the file is not valid YAML ({error})") from None
    if isinstance(values, dict):
        values = {**(later or {}), **values}
    if not isinstance(values, dict) or set(values) != set(kinds):
        raise FedspanError(str(path), values, expected)
    for setting, kind in kinds.items():
        if not isinstance(values[setting], kind):
            raise FedspanError(str(path), {setting: values[setting]}, expected)
    return cast(dict[str, Any], values)


def begin(folder: Path, name: str, settings: Mapping[str, Any], steps: Sequence[Step]) -> None:
    """Create the folder of a series, or reuse one whose runs all belong to the series.

    Args:
        folder: Folder of the series.
        name: Name of the settings file.
        settings: Plain values from which the series can be resumed.
        steps: The runs.

    Raises:
        FedspanError: If the folder holds anything else, such as runs of another config.
    """
    if folder.exists() and not folder.is_dir():
        raise FedspanError("folder", str(folder), problem=f"{str(folder)!r} is a file. Choose another name")
    path, wanted = folder / name, {step.name: step.config for step in steps}
    entries = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    others = [entry for entry in entries if not entry.startswith(f"{name}.tmp-")]
    if others and not path.is_file():
        raise FedspanError(
            "folder", str(folder), problem=f"{str(folder)!r} holds other files ({others[0]}). Choose another folder"
        )
    for entry in others:
        if not is_run(folder / entry):
            continue
        if entry not in wanted:
            raise FedspanError(
                "folder",
                str(folder),
                problem=(
                    f"{str(folder)!r} holds the run {entry}, which does not belong to this series. Choose "
                    "another folder"
                ),
            )
        if read_config(folder / entry) != wanted[entry]:
            problem = f"the run {entry} in {str(folder)!r} began with another config. Use that config or another folder"
            raise FedspanError("config", str(folder), problem=problem)
    with disk_errors(folder, "choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        try:
            text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
        except yaml.YAMLError as error:
            raise FedspanError("config", str(error).splitlines()[0], "plain YAML values") from None
        write_atomic(path, text.encode())


def run_step(step: Step, folder: Path, watcher: Watcher, score: Callable[[RunReport], float | None]) -> RunReport:
    """Start or resume one run of a series, or read it if it is finished, here or in ``reuse.finished_runs``.

    Args:
        step: The run.
        folder: Folder of the series.
        watcher: The watcher that is notified of every event.
        score: Function that extracts the reported score from a run's report.

    Raises:
        FedspanError: If the run fails; the message names the run.
    """
    place, known = folder / step.name, runs_in_use()
    watcher.run_started(step)
    if known is not None:
        known.copy(step.config, place)
    finished = RunFolder(place).report.is_file()
    if not finished:
        next_run()
    try:
        report = train.run(step.config, place, resume=True, listener=watcher)
    except FedspanError as error:
        raise error.at(note=f"This is in the run {step.name}.") from None
    if not finished and report.seconds > _SHORT:
        # The model's replaced methods refer back to it, which would keep it alive; a GPU has no room for two models.
        gc.collect()
    if known is not None and not finished:
        known.add(place)
    watcher.run_finished(step, report.metric, score(report), report.seconds, not finished)
    return report
