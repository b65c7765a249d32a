"""``fedspan methods`` and ``fedspan partition``: looking before running."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedspan.errors import FedspanError, nearest

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from fedspan.data.partition import ClientRow, Partition
    from fedspan.methods.describe import MethodRow

__all__ = ["methods", "partition"]

Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Change a field of the config; may be given many times."),
]


def methods(
    key: Annotated[str | None, typer.Argument(metavar="METHOD", help="Show one method with its options.")] = None,
    as_json: Json = False,
) -> None:
    """List the methods: what each does, and what it claims (every claim is measured by the tests)."""
    from fedspan.cli.text import console
    from fedspan.methods.describe import list_methods

    rows = list_methods()
    if key is not None:
        chosen = [row for row in rows if row.key == key]
        if not chosen:
            known = nearest(key, [row.key for row in rows])
            raise FedspanError("METHOD", key, f"no such method; the nearest are {known}")
        rows = tuple(chosen)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2, ensure_ascii=False))
    elif key is not None:
        _one_method(console(), rows[0])
    else:
        _all_methods(console(), rows)


def _all_methods(out: Console, rows: tuple[MethodRow, ...]) -> None:
    from rich.text import Text

    table = _table()
    table.add_column("key", style="cyan", no_wrap=True)
    table.add_column("method", ratio=1, max_width=72)
    for name in ("exact", "personal", "ranks", "reply"):
        table.add_column(name, no_wrap=True)
    table.expand = True
    for row in rows:
        title, _, published = row.paper.rpartition(" (")
        what = Text.assemble((row.name, "bold"), f": {row.idea}")
        if title:
            what.append(f"\n{published.rstrip(')')}", "dim")
        table.add_row(
            row.key,
            what,
            "yes" if row.exact else "-",
            "yes" if row.personal else "-",
            "differ" if row.heterogeneous_ranks else "one",
            row.reduction,
        )
    out.print(table)
    notes = (
        "exact: does the aggregate equal the mean of the clients' weights? personal: does every client keep a model of its own? "
        "ranks: may they differ between clients? reply: a sum over clients is enough (secure aggregation and "
        "differential privacy apply), or the server needs a stack of all replies.\n"
        "One method's paper and options: fedspan methods fedit"
    )
    out.print(notes, style="dim")


def _one_method(out: Console, row: MethodRow) -> None:
    out.print(f"{row.name}: {row.idea}", style="bold")
    out.print(f"{row.paper}\n")
    facts = [
        "exact: does the aggregate equal the mean of the clients' weights"
        if row.exact
        else "not exact: the aggregate differs from the mean of the clients' weights",
        "personal: every client keeps a model of its own" if row.personal else "one global model",
        "clients may have different ranks" if row.heterogeneous_ranks else "one rank for all clients",
        "a sum of the replies is enough"
        if row.reduction == "sum"
        else "the server needs every reply by itself: a stack",
        f"the head's default: {row.extras}",
    ]
    for fact in facts:
        out.print(f"  {fact}")
    table = _table()
    table.add_column("option", style="bold", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("what it is")
    for option in row.options:
        table.add_row(f"method.{option.name}", json.dumps(option.default), option.help)
    out.print(table)


def _table() -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")


def partition(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")],
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw it, too.")] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Show who would hold which examples, before anything is trained."""
    from fedspan.cli.text import console
    from fedspan.config import load_config
    from fedspan.data.loading import load
    from fedspan.data.partition import partition as divide

    settings = load_config(config, overrides or ())
    data = load(settings.data, seed=settings.seed)
    parts = divide(data.train, settings.partition, settings.seed)
    rows = parts.label_table(data.labels, data.train)
    if png is not None:
        from fedspan.data.plot import plot_partition

        try:
            plot_partition(parts, data.labels, data.train, png)
        except OSError as error:
            raise FedspanError("--png", str(png), f"a file that can be written ({error.strerror or error})") from None
    if as_json:
        clients = [dataclasses.asdict(row) for row in rows]
        content = {"fingerprint": parts.fingerprint, "labels": list(data.labels), "clients": clients}
        typer.echo(json.dumps(content, ensure_ascii=False))
    else:
        test = 0 if data.test is None else len(data.test)
        _show_partition(console(), parts, rows, data.labels, test)


def _show_partition(
    out: Console, parts: Partition, rows: tuple[ClientRow, ...], labels: tuple[str, ...], test: int
) -> None:
    from fedspan.cli.text import one_line

    heldout = f"{test} held out" if test else "no held-out test set"
    out.print(f"{len(rows)} clients, {parts.examples} examples, {len(labels)} labels; {heldout}", style="bold")
    fixed = max(len("client"), *(min(24, len(row.id)) for row in rows)) + 30
    digits = max(2, *(len(str(count)) for row in rows for count in row.counts))
    table = _table()
    table.add_column("client", no_wrap=True)
    for name in ("train", "valid.", "test"):
        table.add_column(name, justify="right", no_wrap=True)
    whole = fixed + len(labels) * (digits + 2) <= out.width
    if whole:
        for index in range(len(labels)):
            table.add_column(str(index + 1), justify="right", no_wrap=True)
    else:
        table.add_column("labels", justify="right", no_wrap=True)
        table.add_column("most frequent")
    for row in rows:
        cells = [one_line(row.id, 24), str(row.train), str(row.validation), str(row.test)]
        if whole:
            cells += [str(count) if count else "." for count in row.counts]
        else:
            held = sorted(((count, -index) for index, count in enumerate(row.counts) if count), reverse=True)
            cells += [str(len(held)), ", ".join(f"{labels[-index]} {count}" for count, index in held[:3])]
        table.add_row(*cells)
    out.print(table)
    if whole:
        out.print("  ".join(f"{index}\u00a0{name}" for index, name in enumerate(labels, 1)), style="dim")
