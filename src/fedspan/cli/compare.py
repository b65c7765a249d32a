"""``fedspan compare`` and ``fedspan sweep``: several runs, one table."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console

from fedspan.cli.commands import Json, Overrides, argument, option, refuse_options, register_command
from fedspan.cli.formatting import create_console, create_table
from fedspan.errors import FedspanError

if TYPE_CHECKING:
    from fedspan.experiments.comparison import CompareReport
    from fedspan.experiments.search import SweepReport
    from fedspan.experiments.series import Watcher
    from fedspan.experiments.tables import Table

Config = Annotated[Path | None, argument("CONFIG", "The YAML file that all runs share.")]
Out = Annotated[
    Path | None, option("FOLDER", "Folder of the runs and the table; an existing series is resumed.", "--out")
]
Resume = Annotated[Path | None, option("FOLDER", "Resume a series with its original settings.", "--resume")]
Seeds = Annotated[str | None, option("N,N", "Seeds, separated by commas.", "--seeds")]
Report = TypeVar("Report")

RESUMED = "it cannot be combined with --resume, which keeps the original settings"


@register_command(
    "compare",
    "fedspan compare my.yaml --methods fedit,rolora,flora --seeds 0,1,2 --out runs/three",
    "fedspan compare my.yaml --methods fedit,fedloru --set-for fedloru:method.tau=5 --out runs/two",
    "fedspan compare --resume runs/three --against flora",
)
def compare(
    config: Config = None,
    methods: Annotated[str | None, option("KEY,KEY", "Methods; fedspan methods lists them.")] = None,
    seeds: Seeds = None,
    out: Out = None,
    overrides: Overrides = None,
    overrides_for: Annotated[
        list[str] | None,
        option("METHOD:A.B=C", "Override a config field for one method; may be repeated.", "--set-for"),
    ] = None,
    against: Annotated[str | None, option("METHOD", "Row to compare with. Default: the first.")] = None,
    resume: Resume = None,
    as_json: Json = False,
) -> None:
    """Run several methods and seeds (default: 0,1,2) on the same partition of the data, and print one table.

    Every run is an ordinary run folder inside FOLDER. After an interruption, the same command or --resume continues.
    """
    options = {"--methods": methods, "--seeds": seeds, "--set-for": overrides_for}
    folder = _select_folder(config, out, resume, {**options, "--set": overrides})
    keys = [key.strip() for key in (methods or "").split(",") if key.strip()]
    numbers, own = parse_seeds(seeds or "0,1,2"), _parse_overrides_for(overrides_for or [])

    def validate() -> None:
        from fedspan.config import to_plain_values
        from fedspan.experiments.comparison import plan_comparison

        if config is not None:
            plan_comparison(to_plain_values(config, overrides or ()), keys, numbers, own, against)

    def run(watcher: Watcher) -> CompareReport:
        import fedspan

        if config is None:
            return fedspan.resume_compare(folder, against=against, listener=watcher, progress=False)
        return fedspan.compare(
            config,
            folder,
            keys,
            numbers,
            overrides=overrides or (),
            overrides_for=own,
            against=against,
            listener=watcher,
            progress=False,
        )

    report = _run_with_view("compare", folder, as_json, validate, run)
    _show(report, report.build_table(), as_json)
    if not as_json:
        typer.echo(f"table {folder / 'table.md'}, {folder / 'table.csv'}, {folder / 'table.tex'}")
        typer.echo(f"figure {folder / 'figure.pdf'}")


@register_command(
    "sweep",
    "fedspan sweep my.yaml --over training.lr=1e-4,1e-3,1e-2 --over method.r=4,8 --out runs/sweep",
    "fedspan sweep my.yaml --over training.lr=1e-4..1e-1 --trials 12 --rounds 3 --out runs/search",
    "fedspan sweep --resume runs/search",
)
def sweep(
    config: Config = None,
    over: Annotated[
        list[str] | None, option("A.B=V,V", "Values to try for a field; with --trials also a range V..V.")
    ] = None,
    trials: Annotated[int | None, option("N", "Number of random combinations. Default: all combinations.")] = None,
    rounds: Annotated[int | None, option("R", "Rounds of a trial. Default: as in the config.")] = None,
    seeds: Seeds = None,
    out: Out = None,
    overrides: Overrides = None,
    resume: Resume = None,
    as_json: Json = False,
) -> None:
    """Search settings, select the best on the clients' validation parts (never on a test set), and write best.yaml.

    Tries all combinations, or a random sample with --trials. After an interruption, the same command or --resume
    continues.
    """
    options = {"--over": over, "--trials": trials, "--rounds": rounds, "--seeds": seeds, "--set": overrides}
    folder = _select_folder(config, out, resume, options)
    space, numbers = _parse_search_space(over or []), parse_seeds(seeds or "0")

    def validate() -> None:
        from fedspan.config import to_plain_values
        from fedspan.experiments.search import plan_sweep

        if config is not None:
            plan_sweep(to_plain_values(config, overrides or ()), space, trials, rounds, numbers)

    def run(watcher: Watcher) -> SweepReport:
        import fedspan

        if config is None:
            return fedspan.resume_sweep(folder, listener=watcher, progress=False)
        return fedspan.sweep(
            config,
            folder,
            space,
            trials=trials,
            rounds=rounds,
            seeds=numbers,
            overrides=overrides or (),
            listener=watcher,
            progress=False,
        )

    report = _run_with_view("sweep", folder, as_json, validate, run)
    _show(report, report.build_table(), as_json)
    if report.best is None:
        rates = [trial.values.get("training.lr") for trial in report.trials]
        shown = [value for value in rates if value is not None]
        raise FedspanError("training.lr", shown or None, problem="every trial diverged. Try lower learning rates")
    if not as_json:
        typer.echo(f"table {folder / 'table.md'}, {folder / 'table.csv'}")
        typer.echo(f"run the best settings: fedspan run {shlex.quote(report.best)}")


def _select_folder(config: Path | None, out: Path | None, resume: Path | None, options: Mapping[str, object]) -> Path:
    """Select the folder of the series; refuse options that exclude each other."""
    if resume is not None:
        refuse_options({"CONFIG": config, "--out": out, **options}, RESUMED)
        return resume
    if config is None:
        raise FedspanError("CONFIG", None, "a YAML file, or --resume FOLDER")
    if out is None:
        raise FedspanError("--out", None, "a folder for the runs and the table")
    return out


def parse_seeds(text: str) -> list[int]:
    """Parse the value of ``--seeds``."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise FedspanError("--seeds", text, "whole numbers separated by commas, such as 0,1,2") from None


def _parse_overrides_for(texts: list[str]) -> dict[str, list[str]]:
    """Parse ``METHOD:a.b=c`` into overrides by method."""
    by_method: dict[str, list[str]] = {}
    for text in texts:
        method, separator, setting = text.partition(":")
        if not separator or "=" in method or "=" not in setting:
            raise FedspanError("--set-for", text, "METHOD:section.field=value")
        by_method.setdefault(method.strip(), []).append(setting)
    return by_method


def _parse_search_space(texts: list[str]) -> dict[str, str]:
    """Parse ``a.b=values`` into values by path."""
    by_path: dict[str, str] = {}
    for text in texts:
        path, separator, values = text.partition("=")
        if not separator:
            raise FedspanError("--over", text, "section.field=value,value,...")
        if path.strip() in by_path:
            raise FedspanError(
                "--over", text, problem=f"{path.strip()} is given twice. Give it once, with all its values"
            )
        by_path[path.strip()] = values
    return by_path


def _run_with_view(
    command: str, folder: Path, quiet: bool, validate: Callable[[], None], run: Callable[[Watcher], Report]
) -> Report:
    """Validate a series and run it with its live view; on Ctrl-C, print how to resume."""
    out = create_console()
    if quiet:
        out.quiet = True
    with out.status("loading torch and Transformers"):
        validate()  # before Transformers is imported, so that a mistake is reported at once
        from fedspan.cli.series import SeriesView
    view = SeriesView(out, folder)
    try:
        with view:
            return run(view)
    except KeyboardInterrupt:
        typer.echo(_describe_interruption(command, folder, view.done, view.runs), err=True)
        raise typer.Exit(130) from None


def _describe_interruption(command: str, folder: Path, done: int, runs: int) -> str:
    if not (folder / f"{command}.yaml").is_file():
        return "stopped before the first run began; nothing was written"
    finished = f"{done} of {runs} runs are finished" if runs else "finished runs are saved"
    return f"stopped; {finished}. Resume with:\n  fedspan {command} --resume {shlex.quote(str(folder))}"


def _show(report: CompareReport | SweepReport, table: Table, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), indent=2, ensure_ascii=False))
    else:
        print_table(create_console(), table)


def print_table(out: Console, table: Table) -> None:
    """Print a table with its notes, the best row in bold."""
    shown = create_table()
    for index, title in enumerate(table.head):
        shown.add_column(title, justify="right" if index else "left", overflow="fold", no_wrap=False)
    for index, row in enumerate(table.rows):
        shown.add_row(*row, style="bold" if index == table.best else "")
    out.print()
    out.print(shown)
    for note in table.notes:
        out.print(note, style="dim")
