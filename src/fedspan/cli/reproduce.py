"""``fedspan reproduce``: the papers' tables and figures, planned or reproduced."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fedspan.cli.commands import Json, Overrides, argument, flag, option, refuse_options, register_command
from fedspan.cli.compare import RESUMED, Out, Resume, Seeds, parse_seeds, print_table
from fedspan.cli.formatting import create_console, create_table
from fedspan.errors import FedspanError
from fedspan.progress.formatting import format_size

if TYPE_CHECKING:
    from fedspan.experiments.series import Watcher
    from fedspan.reproduction.presets import Scale
    from fedspan.reproduction.rehearsal import PlannedCell


@register_command(
    "reproduce",
    "fedspan reproduce",
    "fedspan reproduce rolora-table1 --scale full --dry-run",
    "fedspan reproduce rolora-table1 --data ~/data --out runs/table1",
)
def reproduce(
    id: Annotated[str | None, argument("ID", "Preset to reproduce. Default: list all presets.")] = None,
    scale: Annotated[str, option("SCALE", "small: for two CPU cores; full: as in the paper.")] = "small",
    dry_run: Annotated[bool, flag("--dry-run", "Show steps, bytes and memory; nothing is read.")] = False,
    data: Annotated[Path | None, option("FOLDER", "Folder of local data sets, if the preset reads files.")] = None,
    model: Annotated[Path | None, option("FOLDER", "Folder of a model, if the preset requires one.")] = None,
    out: Out = None,
    seeds: Seeds = None,
    overrides: Overrides = None,
    reuse: Annotated[
        list[Path] | None, option("FOLDER", "Folder of finished runs, of which equal ones are copied; may be repeated.")
    ] = None,
    resume: Resume = None,
    as_json: Json = False,
) -> None:
    """Reproduce a table or figure of a paper and judge its statements, or estimate the cost.

    In every cell, each method's learning rate is selected by validation on one seed; then all seeds are run, and the
    paper's statements are judged by differences paired by seed. After an interruption, the same command continues.
    """
    if resume is None and id is None:
        options = {
            "--out": out,
            "--data": data,
            "--model": model,
            "--seeds": seeds,
            "--set": overrides,
            "--reuse": reuse,
        }
        for name, value in options.items():
            if value:
                raise FedspanError("ID", None, f"a preset together with {name} (fedspan reproduce lists the presets)")
        _list(as_json)
    elif dry_run:
        if id is None:
            raise FedspanError("ID", None, "a preset together with --dry-run, and no --resume")
        _show_dry_run(id, cast("Scale", scale), overrides or [], as_json)
    else:
        _reproduce(id, scale, data, model, out, seeds, overrides or [], reuse or [], resume, as_json)


def _list(as_json: bool) -> None:
    from fedspan.reproduction.presets import list_presets

    presets = list_presets()
    if as_json:
        typer.echo(json.dumps([preset.model_dump(mode="json") for preset in presets], indent=2, ensure_ascii=False))
        return
    table = create_table()
    table.add_column("preset", style="cyan", no_wrap=True)
    for title in ("item", "title"):
        table.add_column(title, overflow="fold")
    for preset in presets:
        table.add_row(preset.id, preset.item, preset.title)
    out = create_console()
    out.print(table)
    out.print("fedspan reproduce ID --dry-run shows the cost; --scale full: at the paper's size.", style="dim")


def _show_dry_run(id: str, scale: Scale, overrides: list[str], as_json: bool) -> None:
    from fedspan.reproduction.rehearsal import dry_run

    cells = dry_run(id, scale=scale, overrides=overrides)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(cell) for cell in cells], indent=2, ensure_ascii=False))
        return
    _show_plan(cells)


def _show_plan(cells: tuple[PlannedCell, ...]) -> None:
    out = create_console()
    for cell in dict.fromkeys(planned.cell for planned in cells):
        table = create_table()
        table.add_column("method", overflow="fold")
        for title in ("runs", "rounds", "steps", "trains", "down", "up", "client", "server"):
            table.add_column(title, justify="right", no_wrap=True)
        for planned in cells:
            plan = planned.plan
            if planned.cell == cell:
                table.add_row(
                    planned.method,
                    str(planned.runs),
                    str(plan.rounds),
                    "-" if plan.all_steps is None else f"{plan.all_steps:,}",
                    f"{plan.trainable:,}",
                    ("" if plan.exact else "~") + format_size(plan.bytes_down),
                    ("" if plan.exact else "~") + format_size(plan.bytes_up),
                    format_size(plan.client.total),
                    format_size(plan.server.total),
                )
        out.print(cell, style="bold")
        out.print(table)
    notes = (
        "Per run: rounds; optimizer steps of all clients; trainable parameters of a client; total bytes of tensor data "
        "down and up (~: returning clients may receive more); peak memory of a client and of the server. "
        "Runs: those of the sweep and of all seeds."
    )
    out.print(notes, style="dim")


def _reproduce(
    id: str | None,
    scale: str,
    data: Path | None,
    model: Path | None,
    out: Path | None,
    seeds: str | None,
    overrides: list[str],
    reuse: list[Path],
    resume: Path | None,
    as_json: bool,
) -> None:
    options = {"ID": id, "--data": data, "--model": model, "--out": out, "--seeds": seeds}
    options |= {"--set": overrides, "--reuse": reuse}
    if resume is not None:
        refuse_options(options, RESUMED)
    elif out is None:
        raise FedspanError("--out", None, "a folder for the runs and the tables, or --dry-run")
    numbers = None if seeds is None else parse_seeds(seeds)
    screen = create_console()
    screen.quiet = as_json
    with screen.status("loading torch and Transformers"):
        from fedspan.cli.series import SeriesView
        from fedspan.reproduction import reproduce
    folder = cast(Path, resume or out)

    def run_series(watcher: Watcher) -> Any:
        if resume is not None:
            return reproduce.resume_reproduction(resume, listener=watcher, progress=False)
        return reproduce.reproduce(
            cast(str, id),
            folder,
            scale=cast("Scale", scale),
            data=data,
            model=model,
            overrides=overrides,
            reuse=reuse,
            seeds=numbers,
            listener=watcher,
            progress=False,
        )

    try:
        with SeriesView(screen, folder) as view:
            report = run_series(view)
    except KeyboardInterrupt:
        typer.echo(f"stopped. Resume with:\n  fedspan reproduce --resume {shlex.quote(str(folder))}", err=True)
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), indent=2, ensure_ascii=False))
        return
    from fedspan.reproduction.verdicts import tabulate_verdicts

    print_table(screen, report.build_table())
    verdicts = tabulate_verdicts(report.verdicts)
    for statement, rows, by, _, verdict in verdicts.rows:  # sentences do not fit into the columns of a narrow terminal
        screen.print(f"{statement} ({rows}, by {by}): ", end="")
        screen.print(verdict, style="bold")
    for note in verdicts.notes:
        screen.print(note, style="dim")
    typer.echo(f"table {folder / 'table.md'}, {folder / 'table.json'}")
