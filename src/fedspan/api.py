"""fedspan from Python: run a federation, go on with it, export what it trained, and use that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedspan.config import RunConfig, load_config, override, parse_config
from fedspan.errors import FedspanError
from fedspan.runs import session
from fedspan.runs.folder import RunFolder
from fedspan.runs.listener import Listener
from fedspan.runs.session import RunReport
from fedspan.serving.export import Form, Round, export_run
from fedspan.serving.results import read_report
from fedspan.serving.served import held_out, labelled_file, load_served

__all__ = ["evaluate", "export", "load_config", "predict", "resume", "run"]


def run(
    config: RunConfig | Mapping[str, Any] | str | Path | None,
    folder: str | Path,
    *,
    overrides: Sequence[str] = (),
    resume: bool = False,
    listener: Listener | None = None,
) -> RunReport:
    """Play a federation to its end: train, export the best round's adapters, compare with the baselines, report.

    Args:
        config: the path of a YAML file, the same as plain values, or a ``RunConfig``. Not used with ``resume``.
        folder: where the run is kept; empty or not there yet.
        overrides: changes to the config, as ``section.field=value``.
        resume: go on with the run in ``folder`` after its last finished round, under the config that it has.
        listener: told what happens (``fedspan.Listener``).

    Raises:
        FedspanError: for anything that the user can put right.
    """
    if resume:
        return _resume(folder, listener)
    return session.run(_config(config, overrides), folder, listener=listener)


def resume(folder: str | Path, *, listener: Listener | None = None) -> RunReport:
    """Go on with a run after its last finished round; of a finished one, only the report is read.

    The result is bit for bit that of a run that was never interrupted, on the same machine with as many threads.

    Args:
        folder: the run's.
        listener: told what happens.

    Raises:
        FedspanError: if there is no run, another process works on it, or its latest checkpoint is damaged.
    """
    return _resume(folder, listener)
