"""``fedspan methods --model``: what each method would send around."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import typer

from fedspan.errors import FedspanError

__all__ = ["show_traffic"]


def show_traffic(
    model: str, keys: Sequence[str], targets: str | None, rank: int, clients: int, rounds: int, as_json: bool
) -> None:
    """Bytes of every method for a model, as a table or JSON."""
    for name, value, least in (("--rank", rank, 1), ("--clients", clients, 1), ("--rounds", rounds, 2)):
        if value < least:
            raise FedspanError(name, value, f"a whole number from {least}")
    from fedspan.cli.text import console, plain_table, size
    from fedspan.runs.planning import planned_traffic, target_layers

    modules = [part.strip() for part in (targets or "").split(",") if part.strip()]
    layers = target_layers(model, modules)
    rows = planned_traffic(layers, rank, clients, rounds, keys)
    if as_json:
        plain = [dataclasses.asdict(row) for row in rows]
        shapes = [{"name": one.name, "shape": list(one.shape)} for one in layers]
        typer.echo(json.dumps({"model": model, "layers": shapes, "methods": plain}, indent=2, ensure_ascii=False))
        return
    table = plain_table()
    table.add_column("method", style="cyan", no_wrap=True)
    for title in ("first down", "first up", "later down", "later up"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        sizes = (row.first_down, row.first_up, row.later_down, row.later_up)
        table.add_row(row.method, *(size(count) for count in sizes))
    out = console()
    out.print(f"{model}: {len(layers)} target layers, rank {rank}, {clients} clients a round", style="bold")
    out.print(table)
    out.print(
        f"Bytes of tensor data, down to and up from one client that takes part in every round; later: mean over the "
        f"rounds 2 to {rounds}. Target layers only: a head that is averaged adds 4 bytes a parameter both ways.",
        style="dim",
    )
