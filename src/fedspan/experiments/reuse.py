"""Finished runs that are copied and not played again: on one machine, equal configs and versions give equal bits."""

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
from fedspan.runs.environment import same_environment
from fedspan.runs.folder import RunFolder
from fedspan.runs.privacy_budget import is_secret

__all__ = ["FinishedRuns", "finished_runs", "runs_in_use"]


class FinishedRuns:
    """Run folders by their configs.

    Args:
        folders: searched for finished runs, at any depth.
    """

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        self._places: dict[str, list[Path]] = {}
        reports = {path.resolve() for folder in folders for path in folder.rglob("report.json")}
        for path in sorted(reports):
            if not is_temporary(path.parent):
                self.add(path.parent)

    def add(self, folder: Path) -> None:
        """A run that is finished; nothing happens if there is none in the folder, or one that can't be read."""
        place = RunFolder(folder)
        if place.config.is_file() and place.report.is_file() and place.environment.is_file():
            with suppress(FedspanError):
                # Parsed, not as text: an option may have been added since, whose default is what was done then.
                config = parse_config(parse_text(place.config_text(), str(place.config)))
                place.read_json(place.report)
                place.read_json(place.environment)
                self._places.setdefault(_key(config), []).append(place.path)

    def copy(self, config: RunConfig, folder: Path) -> bool:
        """Fill the folder of a run with a copy of one that had its config, its versions and its machine.

        Args:
            config: the run's.
            folder: the run's; if anything is there, nothing is copied.

        Returns:
            Whether there was one. A run whose noise is secret has no equal; one that is older than a local file that
            it read, data or model, may have read something else.

        Raises:
            FedspanError: if the disk is full or refuses.
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
    """When the last of the local files that a run reads was changed, seconds since 1970; 0 where it reads none."""
    names = [name for name in (config.data.train, config.data.test, config.model.name, config.model.adapter) if name]
    paths = [Path(os.path.expanduser(name)) for name in names]
    for name, option in ((config.data.train, "data.train"), (config.data.test, "data.test")):
        if name and has_places(name):
            paths += matching(name, option)
    inside = [entry for path in paths if os.path.isdir(path) for entry in path.rglob("*")]
    # Files of images are read with what lies beside them: labels, names of classes.
    pictures = [path for path in paths if os.path.isfile(path) and holds_images(path)]
    inside += [entry for path in pictures for entry in path.parent.iterdir()]
    return max((path.stat().st_mtime for path in [*paths, *inside] if os.path.isfile(path)), default=0.0)


_RUNS: ContextVar[FinishedRuns | None] = ContextVar("fedspan_finished_runs", default=None)


@contextmanager
def finished_runs(folders: Iterable[Path]) -> Generator[None]:
    """Within this context the runs of a series are copied where they are finished in one of these folders, or before.

    Args:
        folders: searched once, at the beginning.
    """
    token = _RUNS.set(FinishedRuns(folders))
    try:
        yield
    finally:
        _RUNS.reset(token)


def runs_in_use() -> FinishedRuns | None:
    """Those of the context; None outside of one."""
    return _RUNS.get()
