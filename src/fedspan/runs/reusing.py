"""Finished runs that are copied and not played again: on one machine, equal configs and versions give equal bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from fedspan.config import RunConfig, parse_config, parse_text
from fedspan.errors import FedspanError
from fedspan.runs.environment import same_environment
from fedspan.runs.files import disk_errors, is_temporary, temporary
from fedspan.runs.folder import RunFolder
from fedspan.runs.spending import new_key

__all__ = ["FinishedRuns", "finished_runs", "runs_in_use"]


class FinishedRuns:
    """Run folders by their configs.

    Args:
        folders: searched for finished runs, at any depth.
    """

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        self._places: dict[str, list[Path]] = {}
        reports = {path.resolve() for folder in folders for path in folder.rglob(RunFolder(folder).report.name)}
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
                self._places.setdefault(_key(config), []).append(place.path)

    def copy(self, config: RunConfig, folder: Path) -> bool:
        """Fill the folder of a run with a copy of one that had its config, its versions and its machine.

        Args:
            config: the run's.
            folder: the run's; if anything is there, nothing is copied.

        Returns:
            Whether there was one. A run whose noise is secret has no equal.

        Raises:
            FedspanError: if the disk is full or refuses.
        """
        if folder.exists() or new_key(config) is not None:
            return False
        for source in self._places.get(_key(config), []):
            if source.is_dir() and same_environment(RunFolder(source), config.seed):
                partial = temporary(folder)
                with disk_errors(folder.parent, "choose another folder"):
                    shutil.copytree(source, partial, ignore=shutil.ignore_patterns(RunFolder(source).lock.name))
                    partial.rename(folder)
                return True
        return False


def _key(config: RunConfig) -> str:
    return json.dumps(config.model_dump(mode="json"), sort_keys=True)


_RUNS: ContextVar[FinishedRuns | None] = ContextVar("fedspan_finished_runs", default=None)


@contextmanager
def finished_runs(folders: Iterable[Path]) -> Generator[None]:
    """Within this context the runs of a series are copied where they are finished in one of these folders, or before.

    Args:
        folders: searched once, at the beginning.

    Raises:
        FedspanError: if one of them is not there.
    """
    places = tuple(folders)
    for place in places:
        if not place.is_dir():
            raise FedspanError("--reuse", str(place), "a folder that holds finished runs")
    token = _RUNS.set(FinishedRuns(places))
    try:
        yield
    finally:
        _RUNS.reset(token)


def runs_in_use() -> FinishedRuns | None:
    """Those of the context; None outside of one."""
    return _RUNS.get()
