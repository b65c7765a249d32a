"""Reuse of finished runs by copying: on one machine, equal configs and versions give bit-identical results."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from fedspan.config import RunConfig, parse_config, parse_text
from fedspan.data.images import holds_images
from fedspan.data.path_patterns import has_places, matching
from fedspan.errors import FedspanError
from fedspan.files import disk_errors, is_temporary, temporary
from fedspan.runs.folder import RunFolder, same_environment
from fedspan.runs.privacy_budget import is_secret

__all__ = ["FinishedRuns", "finished_runs", "runs_in_use"]


class FinishedRuns:
    """Finished run folders by their configs.

    Args:
        folders: Folders that are searched for finished runs, at any depth.
    """

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        self._places: dict[str, list[Path]] = {}
        reports = {path.resolve() for folder in folders for path in folder.rglob("report.json")}
        for path in sorted(reports):
            if not is_temporary(path.parent):
                self.add(path.parent)

    def add(self, folder: Path) -> None:
        """Add a finished run; a folder without a finished, readable run is ignored."""
        place = RunFolder(folder)
        if place.config.is_file() and place.report.is_file() and place.environment.is_file():
            with suppress(FedspanError):
                # Parsed, not compared as text: an option added since has the earlier behaviour as its default.
                config = parse_config(parse_text(place.config_text(), str(place.config)))
                place.read_json(place.report)
                place.read_json(place.environment)
                self._places.setdefault(_key(config), []).append(place.path)

    def copy(self, config: RunConfig, folder: Path) -> bool:
        """Fill the folder of a run with a copy of a finished run that had the same config, versions and machine.

        Args:
            config: Config of the run.
            folder: Folder of the run; if it exists, nothing is copied.

        Returns:
            Whether a run was copied. A run with secret noise is never copied, nor is a run that is older than one of
            the local data or model files that it read.

        Raises:
            FedspanError: If the disk is full or not writable.
        """
        if folder.exists() or is_secret(config):
            return False
        sources = self._places.get(_key(config), [])
        since = _read_since(config) if sources else 0.0
        for source in sources:
            place = RunFolder(source)
            if not place.config.is_file() or place.config.stat().st_mtime < since:
                continue
            if same_environment(place, config):
                partial = temporary(folder)
                try:
                    with disk_errors(folder.parent, "choose another folder"):
                        shutil.copytree(source, partial, ignore=shutil.ignore_patterns(place.lock.name))
                        partial.rename(folder)
                except FedspanError:
                    shutil.rmtree(partial, ignore_errors=True)
                    raise
                return True
        return False


def _key(config: RunConfig) -> str:
    return json.dumps(config.model_dump(mode="json"), sort_keys=True)


def _read_since(config: RunConfig) -> float:
    """Return the last modification time of the local files that a run reads, in seconds since 1970; 0 for none."""
    names = [name for name in (config.data.train, config.data.test, config.model.name, config.model.adapter) if name]
    paths = [Path(os.path.expanduser(name)) for name in names]
    for name, option in ((config.data.train, "data.train"), (config.data.test, "data.test")):
        if name and has_places(name):
            paths += matching(name, option)
    inside = [entry for path in paths if os.path.isdir(path) for entry in path.rglob("*")]
    # Image files are read together with the files next to them: labels and class names.
    pictures = [path for path in paths if os.path.isfile(path) and holds_images(path)]
    inside += [entry for path in pictures for entry in path.parent.iterdir()]
    return max((path.stat().st_mtime for path in [*paths, *inside] if os.path.isfile(path)), default=0.0)


_RUNS: ContextVar[FinishedRuns | None] = ContextVar("fedspan_finished_runs", default=None)


@contextmanager
def finished_runs(folders: Iterable[Path]) -> Generator[None]:
    """Copy runs of a series within this context if they are finished in one of the folders or earlier in the context.

    Args:
        folders: Folders that are searched once, at the start.
    """
    token = _RUNS.set(FinishedRuns(folders))
    try:
        yield
    finally:
        _RUNS.reset(token)


def runs_in_use() -> FinishedRuns | None:
    """Return the finished runs of the context; None outside of one."""
    return _RUNS.get()
