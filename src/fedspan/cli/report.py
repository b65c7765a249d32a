"""``fedspan report``, ``watch``, ``diagnose`` and ``export``: use of a run's folder."""

from __future__ import annotations

import json
import math
import time
import webbrowser
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.console import Console

from fedspan.cli.commands import Json, argument, flag, option, register_command
from fedspan.cli.formatting import create_console, create_table
from fedspan.cli.trained_model import ClientOption
from fedspan.errors import FedspanError
from fedspan.progress.formatting import format_number

if TYPE_CHECKING:
    from fedspan.diagnostics.round_diagnosis import Diagnosis


@register_command(
    "report",
    "fedspan report runs/first",
    "fedspan report runs/three --out three.html --diagnose",
    "fedspan report runs/first runs/second --out both.html",
)
def report(
    runs: Annotated[list[Path], argument("RUN...", "Folders of runs, or of series of runs.")],
    out: Annotated[Path, option("FILE", "File of the report.")] = Path("report.html"),
    diagnose: Annotated[
        bool, flag("--diagnose", "Run one more round of each kind of run, and show its diagnostics.")
    ] = False,
    data: Annotated[bool, typer.Option(help="Read the data again, to show each client's label distribution.")] = True,
) -> None:
    """Render one or more runs as a single HTML report: scores by round, traffic, time, clients, config and a verdict.

    The report needs no network; runs that differ only in their seed are grouped. Needs fedspan[report].
    """
    screen = create_console()
    with screen.status("reading the runs"):
        import fedspan

        path = fedspan.report([*runs], out, diagnostics=diagnose, data=data)
    screen.print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")


@register_command("watch", "fedspan watch runs/first", "fedspan watch runs/first --open")
def watch(
    run: Annotated[Path, argument("RUN", "Folder of a run; it may not exist yet.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page. Default: a free one.")] = 0,
    open_page: Annotated[bool, flag("--open", "Open the page in the browser.")] = False,
) -> None:
    """Show a run on a web page of this machine, live until Ctrl-C: rounds, curves, clients, failures, traffic, privacy.

    The page only reads the run's folder. Its address has a secret token. Needs fedspan[web].
    """
    from fedspan.monitoring.web import WebPage, require_web, write_redirect

    require_web()
    from fedspan.monitoring.run_monitor import RunMonitor, build_page_state

    monitor = RunMonitor(run)
    with ExitStack() as stack:
        page = stack.enter_context(WebPage(lambda: build_page_state(monitor), port=port))
        typer.echo(f"{run} is shown at\n  {page.url}\nuntil Ctrl-C")
        if open_page:
            webbrowser.open(stack.enter_context(write_redirect(page.url)).as_uri())
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            typer.echo("stopped; the run itself is not affected", err=True)


@register_command(
    "diagnose", "fedspan diagnose runs/first", "fedspan diagnose runs/first --round best --pairs 6 --json"
)
def diagnose(
    run: Annotated[Path, argument("RUN", "A run's folder.")],
    round: Annotated[str, option("ROUND", "Checkpoint to continue from: last, best, or a round's number.")] = "last",
    pairs: Annotated[int, option("N", "Number of client pairs whose loss barrier is measured.")] = 3,
    examples: Annotated[int, option("N", "Held-out examples for the loss barrier.")] = 500,
    as_json: Json = False,
) -> None:
    """Run one more round from a checkpoint without saving it, and compare the clients' updates.

    Reports interference of averaging, client drift, angles between subspaces, ranks, mismatch of the optimizers'
    moments, and the loss between two clients' models. It costs one round and the printed additional time.
    """
    screen = create_console()
    screen.quiet = as_json
    with screen.status("running a round"):
        import fedspan

        diagnosis = fedspan.diagnose(run, _parse_round(round), pairs=pairs, examples=examples)
    if as_json:
        typer.echo(json.dumps(_to_plain_values(diagnosis), indent=2, ensure_ascii=False))
    else:
        _show_diagnosis(screen, diagnosis)


def _parse_round(text: str) -> int | Literal["best", "last"]:
    if text in ("best", "last"):
        return cast(Literal["best", "last"], text)
    try:
        return int(text)
    except ValueError:
        raise FedspanError("--round", text, "best, last, or a number") from None


def _to_plain_values(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis as plain JSON values; missing values are null."""
    from fedspan.diagnostics.measures import MEASURES
    from fedspan.diagnostics.round_diagnosis import STEPS

    def to_number(value: float | None) -> float | None:
        return None if value is None or math.isnan(value) else value

    return {
        "method": diagnosis.method,
        "round": diagnosis.round,
        "clients": list(diagnosis.clients),
        "layers": {
            name: {measure.key: to_number(measure.value(layer)) for measure in MEASURES}
            for name, layer in diagnosis.layers.items()
        },
        "barriers": [
            {
                "clients": list(barrier.clients),
                "at": list(STEPS),
                "losses": list(barrier.losses),
                "height": barrier.height,
            }
            for barrier in diagnosis.barriers
        ],
        "examples": diagnosis.examples,
        "seconds": diagnosis.seconds,
    }


def _show_diagnosis(out: Console, diagnosis: Diagnosis) -> None:
    from fedspan.diagnostics.measures import summarize_measures

    rows = summarize_measures(diagnosis)
    clients, layers = len(diagnosis.clients), len(diagnosis.layers)
    out.print(f"{diagnosis.method}, round {diagnosis.round}: {clients} clients, {layers} target layers")
    table = create_table()
    table.add_column("", style="cyan", no_wrap=True)
    for title in ("mean", "min", "max"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("worst layer", overflow="fold")
    for row in rows:
        cells = (f"{value:.3g}" for value in (row.mean, row.minimum, row.maximum))
        table.add_row(row.measure.title, *cells, row.worst or "")
    out.print(table)
    if diagnosis.barriers:
        table = create_table()
        table.add_column("loss between two clients' models", style="cyan", overflow="fold")
        for title in ("one", "highest", "other", "barrier"):
            table.add_column(title, justify="right", no_wrap=True)
        for barrier in diagnosis.barriers:
            losses = (barrier.losses[0], max(barrier.losses), barrier.losses[-1], barrier.height)
            table.add_row(" - ".join(barrier.clients), *map(format_number, losses))
        out.print(table)
    for row in rows:
        out.print(f"{row.measure.title}: {row.measure.reads} ({row.measure.source})", style="dim")
    if diagnosis.barriers:
        out.print(
            "barrier: excess of the loss between two clients' models over the line between their own losses; near 0, "
            "the average of the models is as good as they are. (Frankle et al., 2020; FedGaLore, figure 3c)",
            style="dim",
        )
    out.print(f"The diagnostics took {diagnosis.seconds:.1f} s, in addition to the round.", style="dim")


class FormOption(StrEnum):
    """The form of an exported model."""

    adapter = "adapter"
    merged = "merged"


@register_command(
    "export",
    "fedspan export runs/first --out adapter",
    "fedspan export runs/first --out model --form merged",
    "fedspan export runs/personal --out theirs --client client-03",
)
def export(
    run: Annotated[Path, argument("RUN", "The run folder.")],
    out: Annotated[Path, option("DIR", "Folder of the export; it must not exist.")],
    form: Annotated[
        FormOption, typer.Option(help="PEFT adapter, or merged Transformers model with its tokenizer.")
    ] = FormOption.adapter,
    client: ClientOption = None,
    round: Annotated[
        str, option("N", "best (by validation), last, or the number of a round with a checkpoint.")
    ] = "best",
    rank: Annotated[int | None, option("R", "Truncate the adapter to this rank (best approximation).")] = None,
) -> None:
    """Export a run's trained model, as a PEFT adapter or merged into its base."""
    import fedspan

    selected = int(round) if round.isdecimal() else round
    path = fedspan.export(run, out, form.value, client, selected, rank)  # pyright: ignore[reportArgumentType]
    if rank is not None:
        errors = fedspan.read_notes(path)["relative_error"]
        width = max(map(len, errors))
        typer.echo(f"{'layer':<{width}}  relative error")
        for layer, error in errors.items():
            typer.echo(f"{layer:<{width}}  {100 * error:12.4f} %")
    typer.echo(f"wrote {path}")
