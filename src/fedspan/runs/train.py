"""Start and resume of runs."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedspan.config import RunConfig, load_config, override, parse_config
from fedspan.errors import FedspanError
from fedspan.runs import session
from fedspan.runs.callbacks import Listener
from fedspan.runs.folder import RunFolder
from fedspan.runs.remote import flower_simulation
from fedspan.runs.session import RunReport, is_run, read_config, read_report
from fedspan.transports.flower import require

__all__ = ["resume", "run"]


def run(
    config: RunConfig | Mapping[str, Any] | str | Path,
    folder: str | Path,
    *,
    overrides: Sequence[str] = (),
    resume: bool = False,
    listener: Listener | None = None,
    track: Sequence[str] = (),
) -> RunReport:
    """Run a federation to its end: train, export the best round's adapters, compare with the baselines, report.

    Args:
        config: The path of a YAML file, its content as plain values, or a ``RunConfig``.
        folder: Folder of the run; empty, or not existing yet.
        overrides: Changes to the config, each ``section.field=value``.
        resume: Whether to resume, as ``resume(folder)`` does, if the folder holds a run of exactly this config.
        listener: Listener that receives the events of the run (a ``fedspan.Listener``).
        track: Trackers that receive the numbers of every round in addition to the run folder: ``tensorboard``,
            ``wandb``, ``mlflow``, ``trackio``; the named packages must be installed.

    Raises:
        FedspanError: If the run fails for a reason that the user can correct.
    """
    config = _config(config, overrides)
    if resume and is_run(folder):
        if read_config(folder) != config:
            raise FedspanError("config", str(folder), "the config with which this run began, or another folder")
        return _go_on(folder, listener, track)
    with _tracked(listener, track, folder) as told:
        return session.run(config, folder, listener=told, host=_host(config))


@contextmanager
def _tracked(listener: Listener | None, track: Sequence[str], folder: str | Path) -> Generator[Listener | None]:
    """Yield the listener, or one that forwards all events to it and sends numbers to trackers."""
    if not track:
        yield listener
        return
    from fedspan.runs.tracking import TrackingListener

    tracked = TrackingListener(listener or Listener(), track, Path(folder))
    try:
        yield tracked
    finally:
        tracked.close()


def _config(config: RunConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str]) -> RunConfig:
    if isinstance(config, RunConfig):
        return parse_config(override(config.model_dump(mode="json"), overrides)) if overrides else config
    if isinstance(config, Mapping):
        return parse_config(override(config, overrides))
    return load_config(config, overrides)


def resume(folder: str | Path, *, listener: Listener | None = None, track: Sequence[str] = ()) -> RunReport:
    """Resume a run after its last finished round; for a finished run, only read its report.

    On the same machine, with as many threads, the adapter is bit for bit that of a run that was never interrupted.

    Args:
        folder: Folder of the run.
        listener: Listener that receives the events of the run.
        track: Trackers, as for ``run``.

    Raises:
        FedspanError: If there is no run, another process works on it, or its latest checkpoint is damaged.
    """
    return _go_on(folder, listener, track)


def _go_on(folder: str | Path, listener: Listener | None, track: Sequence[str]) -> RunReport:
    if is_run(folder) and RunFolder(folder).report.is_file():
        return read_report(folder)
    host = _host(read_config(folder)) if is_run(folder) else None
    with _tracked(listener, track, folder) as told:
        return session.run(None, folder, resume=True, listener=told, host=host)


def _host(config: RunConfig) -> session.Host | None:
    """Return the host that connects a run to its clients; None: they are simulated in this process."""
    if config.engine.name != "flower-sim":
        return None
    require(simulation=True)
    return flower_simulation
