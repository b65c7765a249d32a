"""``fedspan methods``: the methods and wrappers, with their options."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from fedspan.cli.commands import Json, argument, register_command
from fedspan.cli.formatting import create_console, create_table
from fedspan.errors import FedspanError, suggest_nearest
from fedspan.methods.describe import MethodRow, Option, list_methods
from fedspan.wrappers.describe import WrapperRow, list_wrappers


@register_command("methods", "fedspan methods", "fedspan methods fedloru", "fedspan methods --json")
def methods(
    key: Annotated[str | None, argument("METHOD", "Method or wrapper to describe, with its options.")] = None,
    as_json: Json = False,
) -> None:
    """List the methods with their properties (all measured by the tests), and the wrappers.

    fedspan plan computes the traffic of a method for a model.
    """
    rows, wrappers = list_methods(), list_wrappers()
    if key is not None:
        method_keys = [row.key for row in (*rows, *wrappers)]
        if key not in method_keys:
            raise FedspanError(
                "METHOD", key, problem=f"no method or wrapper is named {key!r}. {suggest_nearest(key, method_keys)}"
            )
        rows = tuple(row for row in rows if row.key == key)
        wrappers = tuple(row for row in wrappers if row.key == key)
    if as_json:
        kinds = {"method": rows, "wrapper": wrappers}
        records = [{"role": role, **dataclasses.asdict(row)} for role, described in kinds.items() for row in described]
        typer.echo(json.dumps(records, indent=2, ensure_ascii=False))
    elif key is None:
        _show_methods(create_console(), rows)
        _show_wrappers(create_console(), wrappers)
    elif rows:
        _show_method(create_console(), rows[0])
    else:
        _show_wrapper(create_console(), wrappers[0])


def _show_methods(out: Console, rows: tuple[MethodRow, ...]) -> None:
    table = create_table()
    table.add_column("key", style="cyan", no_wrap=True)
    table.add_column("method", ratio=1, max_width=72)
    for name in ("exact", "personal", "ranks", "reply"):
        table.add_column(name, no_wrap=True)
    table.expand = True
    for row in rows:
        title, _, published = row.paper.rpartition(" (")
        description = Text.assemble((row.name, "bold"), f": {row.idea}")
        if title:
            description.append(f"\n{published.rstrip(')')}", "dim")
        table.add_row(
            row.key,
            description,
            "yes" if row.exact else "-",
            "yes" if row.personal else "-",
            "differ" if row.heterogeneous_ranks else "one",
            row.reduction,
        )
    out.print(table)
    notes = (
        "exact: does the aggregate equal the mean of the clients' weights? personal: does every client keep a model "
        "of its own? ranks: may they differ between clients? reply: a sum over clients is enough, so secure "
        "aggregation and differential privacy apply, or the server needs a stack of all replies.\n"
        "A method's paper and options: fedspan methods fedit"
    )
    out.print(notes, style="dim")


def _show_method(out: Console, row: MethodRow) -> None:
    out.print(f"{row.name}: {row.idea}", style="bold")
    out.print(f"{row.paper}\n")
    facts = [
        "exact: does the aggregate equal the mean of the clients' weights"
        if row.exact
        else "not exact: the aggregate differs from the mean of the clients' weights",
        "personal: every client keeps a model of its own" if row.personal else "one global model",
        "clients may have different ranks" if row.heterogeneous_ranks else "one rank for all clients",
        "a sum of the replies is enough" if row.reduction == "sum" else "the server needs a stack of all replies",
        f"the head's default: {row.extras}",
    ]
    for fact in facts:
        out.print(f"  {fact}")
    _show_options(out, "method.", row.options)


def _show_options(out: Console, prefix: str, options: tuple[Option, ...]) -> None:
    table = create_table()
    table.add_column("option", style="bold", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("description")
    for option in options:
        table.add_row(f"{prefix}{option.name}", json.dumps(option.default), option.help)
    out.print(table)


def _show_wrappers(out: Console, rows: tuple[WrapperRow, ...]) -> None:
    table = create_table()
    table.add_column("key", style="cyan", no_wrap=True)
    table.add_column("wrapper", ratio=1, max_width=72)
    table.add_column("kind", no_wrap=True)
    table.expand = True
    for row in rows:
        published = row.paper.rpartition(" (")[2].rstrip(")")
        table.add_row(row.key, Text.assemble((row.name, "bold"), f": {row.idea}", (f"\n{published}", "dim")), row.kind)
    out.print(table)
    notes = "Wrappers go around a method, one of a kind: method: {name: fedit, wrappers: [fedprox, fedadam]}"
    out.print(notes, style="dim")


def _show_wrapper(out: Console, row: WrapperRow) -> None:
    out.print(f"{row.name}: {row.idea}", style="bold")
    out.print(f"{row.paper}\n")
    out.print(f"  a wrapper around a method: {row.kind}")
    out.print("  method:")
    values = "".join(f", {option.name}: {json.dumps(option.default)}" for option in row.options)
    out.print(f"    wrappers: [{{name: {row.key}{values}}}]")
    _show_options(out, "", row.options)
