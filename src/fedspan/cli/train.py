"""``fedspan run`` and ``fedspan demo``."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli.methods import Overrides
from fedspan.errors import FedspanError

__all__ = ["demo", "fresh_folder", "run", "stopped"]


def run(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="The YAML file of a new run.")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Folder of the run; left out: runs/ and the config's name."),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="FOLDER", help="Go on with an interrupted run, under its own config."),
    ] = None,
    track: Annotated[
        str | None,
        typer.Option(
            "--track",
            metavar="A,B",
            help="tensorboard, wandb, mlflow, trackio, or none; left out: tensorboard if it is installed.",
        ),
    ] = None,
) -> None:
    """Train across the clients, round by round, and export the best round's adapter.

    Every round is saved. Stop it with Ctrl-C, or lose the machine: --resume goes on to the very same adapter.
    """
    if resume is not None:
        extra = {"CONFIG": config, "--out": out, "--set": " ".join(overrides or ())}
        for name, value in extra.items():
            if value:
                raise FedspanError(name, str(value), "nothing beside --resume: a run goes on under its own config")
        _play(resume, None, track=track)
        return
    if config is None:
        raise FedspanError("CONFIG", None, "a YAML file, or --resume FOLDER; fedspan demo --show-config prints one")
    _play(out or fresh_folder(Path("runs") / config.stem), config, overrides or (), track)


def demo(
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Folder of the run; left out: runs/demo, runs/demo-2, ..."),
    ] = None,
    overrides: Overrides = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the demo's config, to start your own from.")
    ] = False,
) -> None:
    """See it work: ten clinics learn to sort patients' messages together, and no message leaves its clinic."""
    packaged = files("fedspan").joinpath("demo.yaml")
    if show_config:
        typer.echo(packaged.read_text(encoding="utf-8"), nl=False)
        return
    with as_file(packaged) as path:
        _play(out or fresh_folder(Path("runs") / "demo"), path, overrides or ())


def fresh_folder(folder: Path) -> Path:
    """Return the folder, or the folder with the first unused number appended."""
    candidate, number = folder, 1
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def _trackers(track: str | None) -> list[str]:
    """Return the requested trackers; by default TensorBoard if it is installed."""
    if track is None:
        return ["tensorboard"] if importlib.util.find_spec("tensorboard") is not None else []
    return [] if track == "none" else [part.strip() for part in track.split(",") if part.strip()]


def _play(folder: Path, config: Path | None, overrides: Sequence[str] = (), track: str | None = "none") -> None:
    """Start a new run, or resume one if there is no config; then print its summary."""
    from fedspan.cli.formatting import console

    out = console()
    with out.status("loading torch and Transformers"):
        import fedspan
        from fedspan.cli.live import RunView
        from fedspan.cli.run_summary import show_report
    view = RunView(out, folder)
    try:
        with view:
            if config is None:
                report = fedspan.resume(folder, listener=view, track=_trackers(track))
            else:
                report = fedspan.run(config, folder, overrides=overrides, listener=view, track=_trackers(track))
    except KeyboardInterrupt:
        typer.echo(stopped(folder, view.rounds), err=True)
        raise typer.Exit(130) from None
    show_report(out, report, folder)


def stopped(folder: Path, rounds: int, command: str = "run") -> str:
    """Describe a run that Ctrl-C ended: what is saved, and how to resume."""
    from fedspan.runs.checkpoint import saved
    from fedspan.runs.folder import RunFolder
    from fedspan.runs.results import is_run

    if not is_run(folder):
        return "stopped before the run began; nothing was written"
    done = saved(RunFolder(folder))  # the view may not have received the last round
    kept = f"{done} of {rounds} rounds are saved" if rounds else "the rounds that it had finished are saved"
    return f"stopped; {kept}. Go on with:\n  fedspan {command} --resume {shlex.quote(str(folder))}"
