"""``fedspan diagnose``: how the clients' updates compare with each other."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from fedspan.cli.commands import Json, command
from fedspan.errors import FedspanError

if TYPE_CHECKING:
    from rich.console import Console

    from fedspan.diagnostics.round_diagnosis import Diagnosis

__all__ = ["diagnose"]


@command("diagnose", "fedspan diagnose runs/first", "fedspan diagnose runs/first --round best --pairs 6 --json")
def diagnose(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    round: Annotated[
        str, typer.Option("--round", metavar="ROUND", help="The checkpoint to go on from: last, best, or a number.")
    ] = "last",
    pairs: Annotated[
        int, typer.Option("--pairs", metavar="N", help="Pairs of clients between whose models the loss is measured.")
    ] = 3,
    examples: Annotated[int, typer.Option("--examples", metavar="N", help="Held-out examples for that.")] = 500,
    as_json: Json = False,
) -> None:
    """Play one more round from a checkpoint, keep nothing of it, and show how the clients' updates fit together.

    Interference of averaging, client drift, angles between subspaces, ranks, mismatch of the optimizers' moments, and
    the loss on the line between two clients' models. It costs a round, and what is printed beside it.
    """
    from fedspan.cli.formatting import console

    screen = console()
    screen.quiet = as_json
    with screen.status("running a round"):
        import fedspan

        found = fedspan.diagnose(run, _round(round), pairs=pairs, examples=examples)
    if as_json:
        typer.echo(json.dumps(_plain(found), indent=2, ensure_ascii=False))
    else:
        _show(screen, found)


def _round(text: str) -> int | Literal["best", "last"]:
    if text in ("best", "last"):
        return cast(Literal["best", "last"], text)
    try:
        return int(text)
    except ValueError:
        raise FedspanError("--round", text, "best, last, or a number") from None


def _plain(found: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis as plain JSON values; missing values are null."""
    from fedspan.diagnostics.measures import MEASURES
    from fedspan.diagnostics.round_diagnosis import STEPS

    def number(value: float | None) -> float | None:
        return None if value is None or math.isnan(value) else value

    return {
        "method": found.method,
        "round": found.round,
        "clients": list(found.clients),
        "layers": {
            name: {measure.key: number(measure.value(layer)) for measure in MEASURES}
            for name, layer in found.layers.items()
        },
        "barriers": [
            {"clients": list(one.clients), "at": list(STEPS), "losses": list(one.losses), "height": one.height}
            for one in found.barriers
        ],
        "examples": found.examples,
        "seconds": found.seconds,
    }


def _show(out: Console, found: Diagnosis) -> None:
    from fedspan.cli.formatting import number, plain_table
    from fedspan.diagnostics.measures import summarize_measures

    rows = summarize_measures(found)
    out.print(f"{found.method}, round {found.round}: {len(found.clients)} clients, {len(found.layers)} target layers")
    table = plain_table()
    table.add_column("", style="cyan", no_wrap=True)
    for title in ("mean", "least", "most"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("worst layer", overflow="fold")
    for row in rows:
        cells = (f"{value:.3g}" for value in (row.mean, row.minimum, row.maximum))
        table.add_row(row.measure.title, *cells, row.worst or "")
    out.print(table)
    if found.barriers:
        table = plain_table()
        table.add_column("loss between two clients' models", style="cyan", overflow="fold")
        for title in ("one", "highest", "other", "barrier"):
            table.add_column(title, justify="right", no_wrap=True)
        for one in found.barriers:
            losses = (one.losses[0], max(one.losses), one.losses[-1], one.height)
            table.add_row(" - ".join(one.clients), *map(number, losses))
        out.print(table)
    for row in rows:
        out.print(f"{row.measure.title}: {row.measure.reads} ({row.measure.source})", style="dim")
    if found.barriers:
        out.print(
            "barrier: By how much the loss between the two exceeds the line between its ends: near 0 their average is "
            "as good as they are. (Frankle et al., 2020; FedGaLore, figure 3c)",
            style="dim",
        )
    out.print(f"This took {found.seconds:.1f} s beside the round.", style="dim")
