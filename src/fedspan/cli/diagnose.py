"""``fedspan diagnose``: comparison of the clients' updates."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.console import Console

from fedspan.cli.commands import Json, argument, option, register_command
from fedspan.cli.formatting import create_console, create_table
from fedspan.errors import FedspanError
from fedspan.progress.formatting import format_number

if TYPE_CHECKING:
    from fedspan.diagnostics.round_diagnosis import Diagnosis


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
        typer.echo(json.dumps(_to_dict(diagnosis), indent=2, ensure_ascii=False))
    else:
        _show(screen, diagnosis)


def _parse_round(text: str) -> int | Literal["best", "last"]:
    if text in ("best", "last"):
        return cast(Literal["best", "last"], text)
    try:
        return int(text)
    except ValueError:
        raise FedspanError("--round", text, "best, last, or a number") from None


def _to_dict(diagnosis: Diagnosis) -> dict[str, Any]:
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


def _show(out: Console, diagnosis: Diagnosis) -> None:
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
