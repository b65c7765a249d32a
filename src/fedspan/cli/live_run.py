"""A run with its live view, for ``fedspan run`` and ``fedspan demo``, and the message after Ctrl-C."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedspan.cli.formatting import create_console
from fedspan.progress.trackers import require_trackers

if TYPE_CHECKING:
    from fedspan.runs.report import RunReport


def find_unused_folder(folder: Path) -> Path:
    """Select a folder that does not exist: the given one, or the one with the first unused number appended."""
    candidate, number = folder, 1
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def _select_trackers(track: str | None) -> list[str]:
    """Return the requested trackers; by default TensorBoard if it is installed."""
    if track is None:
        return ["tensorboard"] if importlib.util.find_spec("tensorboard") is not None else []
    names = [] if track == "none" else [part.strip() for part in track.split(",") if part.strip()]
    require_trackers(names)  # before torch and a model are loaded
    return names


def show_run(folder: Path, config: Path | None, overrides: Sequence[str] = (), track: str | None = "none") -> RunReport:
    """Start a new run, or resume or extend one if there is no config; then print its summary and return it."""
    out, trackers = create_console(), _select_trackers(track)
    with out.status("loading torch and Transformers"):
        from fedspan.config import load_config

        # before what loads Transformers, so that a mistake is reported at once
        loaded = None if config is None else load_config(config, overrides)
        import fedspan
        from fedspan.cli.run_summary import show_report
        from fedspan.progress.view import RunView
    view = RunView(out, folder)
    try:
        with view:
            if loaded is None:
                report = fedspan.resume(folder, overrides=overrides, listener=view, track=trackers, progress=False)
            else:
                report = fedspan.run(loaded, folder, listener=view, track=trackers, progress=False)
    except KeyboardInterrupt:
        typer.echo(describe_interruption(folder, view.rounds), err=True)
        raise typer.Exit(130) from None
    show_report(out, report, folder)
    return report


def describe_interruption(folder: Path, rounds: int, command: str = "run") -> str:
    """Describe what an interrupted run has saved, and how to resume it."""
    from fedspan.run_folder import RunFolder
    from fedspan.runs.checkpoint import read_last_saved_round
    from fedspan.runs.report import is_run

    if not is_run(folder):
        return "stopped before the run began; nothing was written"
    done = read_last_saved_round(RunFolder(folder))  # the view may not have received the last round
    saved = f"{done} of {rounds} rounds are saved" if rounds else "all finished rounds are saved"
    return f"stopped; {saved}. Resume with:\n  fedspan {command} --resume {shlex.quote(str(folder))}"
