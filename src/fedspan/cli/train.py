"""``fedspan demo``, ``init`` and ``run``: a config to begin with, and training with its live view."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedspan.cli.commands import Overrides, argument, flag, option, refuse_options, register_command
from fedspan.cli.formatting import create_console
from fedspan.errors import FedspanError, build_install_command
from fedspan.progress.formatting import format_size
from fedspan.progress.trackers import require_trackers

if TYPE_CHECKING:
    from fedspan.runs.report import RunReport


@register_command(
    "demo",
    "fedspan demo",
    "fedspan demo --set method.name=fedsa-lora --out runs/personal",
    "fedspan demo --show-config > my.yaml",
)
def demo(
    out: Annotated[Path | None, option("FOLDER", "Folder of the run. Default: runs/demo, runs/demo-2, ...")] = None,
    overrides: Overrides = None,
    show_config: Annotated[bool, flag("--show-config", "Print the demo's config, as a template of your own.")] = False,
) -> None:
    """Run a demo: twelve companies learn to tell praise from complaints in reviews, and no review leaves its company.

    With fedspan[report], the demo also writes the page that `fedspan report` makes.
    """
    packaged = files("fedspan").joinpath("demo.yaml")
    if show_config:
        typer.echo(packaged.read_text(encoding="utf-8"), nl=False)
        return
    with as_file(packaged) as path:
        folder = out or find_unused_folder(Path("runs") / "demo")
        report = show_run(folder, path, overrides or ())
    _show_result(report, folder)


def _show_result(report: RunReport, folder: Path) -> None:
    """Print what was sent instead of data, and write the report's page if its library is installed."""
    out = create_console()
    sent = report.bytes["up"] + sum(count["up"] for count in report.other_bytes.values())
    out.print(
        f"\nIn the federation, no example left its client: the clients sent {format_size(sent)} of updates and "
        "statistics."
    )
    if importlib.util.find_spec("plotly") is None:
        install = build_install_command("report")
        out.print(f"A page with curves: {install}, then fedspan report {shlex.quote(str(folder))}")
        return
    with out.status("writing the page"):
        import fedspan

        page = fedspan.report([folder], folder / "report.html")
    out.print(f"A page with curves, clients and traffic: {page}", soft_wrap=True)


@register_command(
    "init",
    "fedspan init messages.csv --test held-out.csv",
    "fedspan init notes.parquet --text note --label diagnosis --by hospital --out hospitals.yaml",
    "fedspan init export.xlsx --set data.sheet=Answers",
    "fedspan init dialogues.jsonl --task causal-lm --model Qwen/Qwen2.5-0.5B",
)
def init(
    data: Annotated[
        str, argument("DATA", "A file, a folder or archive of images or texts by class, or a hub data set.")
    ],
    out: Annotated[Path, option("FILE", "File of the config.")] = Path("fedspan.yaml"),
    test: Annotated[str | None, option("FILE", "Test set. Default: a fifth of DATA.")] = None,
    task: Annotated[str | None, option("TASK", "Learning task. Default: inferred.")] = None,
    text: Annotated[str | None, option("COLUMN", "Column of texts, prompts or images.")] = None,
    label: Annotated[str | None, option("COLUMN", "Column of labels or numbers.")] = None,
    answer: Annotated[str | None, option("COLUMN", "Column of answers to prompts.")] = None,
    by: Annotated[str | None, option("COLUMN", "Column that assigns each row to a client.")] = None,
    clients: Annotated[int | None, option("N", "Number of clients of a random partition. Default: at most 10.")] = None,
    model: Annotated[str | None, option("ID", "Base model. Default: a small one.")] = None,
    method: Annotated[str, option("KEY", "Method; fedspan methods lists them.")] = "fedit",
    fast: Annotated[bool, flag("--fast", "Adapt the last layers alone: faster, less accurate.")] = False,
    force: Annotated[bool, flag("--force", "Replace an existing file.")] = False,
    overrides: Annotated[
        list[str] | None, option("data.FIELD=VALUE", "Set an option of data, such as data.delimiter=^.", "--set")
    ] = None,
) -> None:
    """Infer a commented config from the beginning of your own data, and describe the data."""
    screen = create_console()
    options = _parse_options(overrides or ())
    with screen.status("inspecting the data"):
        from fedspan.config.starter import write_starter_config

        starter = write_starter_config(
            data,
            out,
            test=test,
            task=task,
            text=text,
            label=label,
            answer=answer,
            by=by,
            clients=clients,
            model=model,
            method=method,
            fast=fast,
            force=force,
            options=options,
        )
    for line in starter.findings:
        screen.print(line)
    path = shlex.quote(str(starter.path))
    screen.print(f"wrote {starter.path}. Next:\n  fedspan plan {path}\n  fedspan run {path} --out runs/first")


def _parse_options(overrides: Sequence[str]) -> dict[str, Any]:
    from fedspan.config.reading import override

    for text in overrides:
        if not text.startswith("data."):
            problem = f"init sets only options of data, not {text!r}; set other sections in the config's file"
            raise FedspanError("--set", text, "data.FIELD=VALUE", problem=problem)
    return override({"data": {}}, overrides)["data"]


@register_command(
    "run",
    "fedspan run my.yaml --out runs/first",
    "fedspan run my.yaml --set method.name=ffa-lora --set training.lr=2e-3",
    "fedspan run --resume runs/first",
    "fedspan run --resume runs/first --set federation.rounds=40",
)
def run(
    config: Annotated[Path | None, argument("CONFIG", "The YAML file of a new run.")] = None,
    out: Annotated[Path | None, option("FOLDER", "Folder of the run. Default: runs/ and the config's name.")] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        option(
            "FOLDER",
            "Resume a run with its own config; with --set federation.rounds=N, extend it to N "
            "rounds, even a finished one.",
        ),
    ] = None,
    track: Annotated[
        str | None,
        option("A,B", "tensorboard, wandb, mlflow, trackio, or none. Default: tensorboard if it is installed."),
    ] = None,
) -> None:
    """Train across the clients, round by round, and export the best round's adapter.

    Every round is saved: after Ctrl-C or a crash, --resume continues to the same adapter, bit for bit. A finished run
    can be extended if the learning-rate schedule allows it (constant, or with cycle_rounds).
    """
    if resume is not None:
        problem = "it cannot be combined with --resume, because a resumed run keeps its own config"
        refuse_options({"CONFIG": config, "--out": out}, problem)
        show_run(resume, None, overrides or (), track)
        return
    if config is None:
        raise FedspanError(
            "CONFIG", None, "a YAML file, or --resume FOLDER (fedspan demo --show-config prints a config)"
        )
    show_run(out or find_unused_folder(Path("runs") / config.stem), config, overrides or (), track)


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
