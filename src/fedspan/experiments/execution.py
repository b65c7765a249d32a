"""Execution of a series: its runs, one after another in one folder, can be stopped and resumed at any time.

A finished run is reused by copying: on one machine, equal configs and versions give bit-identical results.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

import yaml

from fedspan.config import RunConfig, load_yaml, override, parse_config, parse_yaml
from fedspan.data.images import has_images
from fedspan.data.multiple_files import has_placeholders, match_paths
from fedspan.errors import FedspanError
from fedspan.experiments.series import Step, Watcher
from fedspan.files import (
    build_temporary_path,
    convert_disk_errors,
    delete_temporary_files,
    is_temporary,
    read_bytes,
    write_atomic,
)
from fedspan.run_folder import RunFolder
from fedspan.runs import train
from fedspan.runs.environment import is_same_environment
from fedspan.runs.integrity import read_config, require_intact
from fedspan.runs.privacy_budget import is_secret
from fedspan.runs.report import RunReport, is_run
from fedspan.training.prefix_rows import start_next_run


class FinishedRuns:
    """Finished run folders by their configs."""

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        self._places: dict[str, list[Path]] = {}
        reports = {path.resolve() for folder in folders for path in folder.rglob("report.json")}
        for path in sorted(reports):
            if not is_temporary(path.parent):
                self.add(path.parent)

    def add(self, folder: Path) -> None:
        """Add a finished run; a folder without a finished, readable run is ignored."""
        run_folder = RunFolder(folder)
        if run_folder.config.is_file() and run_folder.report.is_file() and run_folder.environment.is_file():
            with suppress(FedspanError):
                # Parsed, not compared as text: an option added since has the earlier behavior as its default.
                config = parse_config(parse_yaml(run_folder.read_config_text(), str(run_folder.config)))
                run_folder.read_json(run_folder.report)
                run_folder.read_json(run_folder.environment)
                self._places.setdefault(_build_key(config), []).append(run_folder.path)

    def copy(self, config: RunConfig, folder: Path) -> bool:
        """Fill the folder of a run with a copy of a finished run that had the same config, versions and machine.

        Returns:
            Whether a run was copied. A run with secret noise is never copied, nor is a run that is older than one of
            the local data or model files that it read, or whose own files were changed after it finished.
        """
        if folder.exists() or is_secret(config):
            return False
        sources = self._places.get(_build_key(config), [])
        since = _read_since(config) if sources else 0.0
        for source in sources:
            run_folder = RunFolder(source)
            if not run_folder.config.is_file() or run_folder.config.stat().st_mtime < since:
                continue
            if is_same_environment(run_folder, config) and _is_intact(run_folder):
                partial = build_temporary_path(folder)
                try:
                    with convert_disk_errors(folder.parent, "choose another folder"):
                        shutil.copytree(source, partial, ignore=shutil.ignore_patterns(run_folder.lock.name))
                        partial.rename(folder)
                except FedspanError:
                    shutil.rmtree(partial, ignore_errors=True)
                    raise
                return True
        return False


def _is_intact(run_folder: RunFolder) -> bool:
    try:
        require_intact(run_folder)
    except FedspanError:
        return False
    return True


def _build_key(config: RunConfig) -> str:
    return json.dumps(config.model_dump(mode="json"), sort_keys=True)


def _read_since(config: RunConfig) -> float:
    """Return the last modification time of the local files that a run reads, in seconds since 1970; 0 for none."""
    names = [name for name in (config.data.train, config.data.test, config.model.name, config.model.adapter) if name]
    paths = [Path(os.path.expanduser(name)) for name in names]
    for name, option in ((config.data.train, "data.train"), (config.data.test, "data.test")):
        if name and has_placeholders(name):
            paths += match_paths(name, option)
    nested_entries = [entry for path in paths if os.path.isdir(path) for entry in path.rglob("*")]
    # Image files are read together with the files next to them: labels and class names.
    pictures = [path for path in paths if os.path.isfile(path) and has_images(path)]
    nested_entries += [entry for path in pictures for entry in path.parent.iterdir()]
    return max((path.stat().st_mtime for path in [*paths, *nested_entries] if os.path.isfile(path)), default=0.0)


_RUNS: ContextVar[FinishedRuns | None] = ContextVar("fedspan_finished_runs", default=None)


@contextmanager
def reuse_finished_runs(folders: Iterable[Path]) -> Generator[None]:
    """Copy runs of a series within this context that are finished in one of the folders or earlier in the context."""
    token = _RUNS.set(FinishedRuns(folders))
    try:
        yield
    finally:
        _RUNS.reset(token)


def get_reusable_runs() -> FinishedRuns | None:
    """Return the finished runs of the context; None outside of one."""
    return _RUNS.get()


_SHORT = 1.0  # seconds; models of shorter runs are too small to matter, and a collection takes a third of a second


def format_command_line(arguments: Sequence[str]) -> list[str]:
    """Return the command line for a table, as typed but without the program's folder."""
    program = Path(arguments[0]).name if arguments else ""
    return ["fedspan" if program in ("", "__main__.py") else program, *arguments[1:]]


def read_settings(folder: Path, name: str, kinds: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """Read the settings of a series.

    Args:
        name: Name of the settings file, such as ``compare.yaml``.
    """
    path = folder / name
    if not path.is_file():
        raise FedspanError(
            "folder", str(folder), problem=f"{str(folder)!r} holds no {name}. Give a config to start a new series"
        )
    expected = f"the settings {', '.join(kinds)}, as they were written at the beginning"
    try:
        values = load_yaml(read_bytes(path))
    except ValueError as error:
        raise FedspanError(str(path), None, expected, problem=f"the file is not valid YAML ({error})") from None
    if not isinstance(values, dict) or set(values) != set(kinds):
        raise FedspanError(str(path), values, expected)
    for setting, kind in kinds.items():
        if not isinstance(values[setting], kind):
            raise FedspanError(str(path), {setting: values[setting]}, expected)
    return cast(dict[str, Any], values)


def open_series(folder: Path, name: str, settings: Mapping[str, Any], steps: Sequence[Step]) -> None:
    """Create the folder of a series, or reuse one whose runs all belong to the series."""
    if folder.exists() and not folder.is_dir():
        raise FedspanError("folder", str(folder), problem=f"{str(folder)!r} is a file. Choose another name")
    path, expected = folder / name, {step.name: step.config for step in steps}
    entries = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    others = [entry for entry in entries if not entry.startswith(f"{name}.tmp-")]
    if others and not path.is_file():
        raise FedspanError(
            "folder", str(folder), problem=f"{str(folder)!r} holds other files ({others[0]}). Choose another folder"
        )
    for entry in others:
        if not is_run(folder / entry):
            continue
        if entry not in expected:
            raise FedspanError(
                "folder",
                str(folder),
                problem=(
                    f"{str(folder)!r} holds the run {entry}, which does not belong to this series. Choose "
                    "another folder"
                ),
            )
        if read_config(folder / entry) != expected[entry]:
            problem = f"the run {entry} in {str(folder)!r} began with another config. Use that config or another folder"
            raise FedspanError("config", str(folder), problem=problem)
    with convert_disk_errors(folder, "choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        delete_temporary_files(folder)
        try:
            # of a copy, because YAML would write a list that occurs twice as an alias
            text = yaml.safe_dump(override(settings, ()), sort_keys=False, allow_unicode=True)
        except yaml.YAMLError as error:
            raise FedspanError("config", str(error).splitlines()[0], "plain YAML values") from None
        write_atomic(path, text.encode())


def run_step(step: Step, folder: Path, watcher: Watcher, score: Callable[[RunReport], float | None]) -> RunReport:
    """Start or resume one run of a series, or read it if it is finished here or in ``reuse_finished_runs``.

    Raises:
        FedspanError: If the run fails; the message names the run.
    """
    run_folder, reusable_runs = folder / step.name, get_reusable_runs()
    watcher.on_run_start(step)
    if reusable_runs is not None:
        reusable_runs.copy(step.config, run_folder)
    finished = RunFolder(run_folder).report.is_file()
    if not finished:
        start_next_run()
    try:
        report = train.run(step.config, run_folder, resume=True, listener=watcher, progress=False)
    except FedspanError as error:
        raise error.relocate(note=f"This is in the run {step.name}.") from None
    if not finished and report.seconds > _SHORT:
        # The model's replaced methods refer back to it, which would keep it alive; a GPU has no room for two models.
        gc.collect()
    if reusable_runs is not None and not finished:
        reusable_runs.add(run_folder)
    watcher.on_run_finish(step, report.metric, score(report), report.seconds, not finished)
    return report
