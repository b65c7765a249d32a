"""``fedspan methods`` and ``fedspan partition``: inspection before a run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedspan.errors import FedspanError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from fedspan.data.partition import ClientRow, Partition
    from fedspan.methods.describe import MethodRow, Option
    from fedspan.wrappers.describe import WrapperRow

__all__ = ["methods", "partition"]

Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Change a field of the config; may be given many times."),
]
_LONGEST = 24


def methods(
    key: Annotated[str | None, typer.Argument(metavar="METHOD", help="Show one of them with its options.")] = None,
    as_json: Json = False,
) -> None:
    """List the methods, what each does and claims (every claim is measured by the tests), and the wrappers.

    What each would send for a model: fedspan plan.
    """
    from fedspan.cli.formatting import console
    from fedspan.methods.describe import list_methods
    from fedspan.wrappers.describe import list_wrappers

    rows, wrappers = list_methods(), list_wrappers()
    if key is not None:
        known = [row.key for row in (*rows, *wrappers)]
        if key not in known:
            raise FedspanError("METHOD", key, f"no such method or wrapper; the nearest are {nearest(key, known)}")
        rows = tuple(row for row in rows if row.key == key)
        wrappers = tuple(row for row in wrappers if row.key == key)
    if as_json:
        kinds = {"method": rows, "wrapper": wrappers}
        plain = [{"role": role, **dataclasses.asdict(row)} for role, chosen in kinds.items() for row in chosen]
        typer.echo(json.dumps(plain, indent=2, ensure_ascii=False))
    elif key is None:
        _all_methods(console(), rows)
        _all_wrappers(console(), wrappers)
    elif rows:
        _one_method(console(), rows[0])
    else:
        _one_wrapper(console(), wrappers[0])


def _all_methods(out: Console, rows: tuple[MethodRow, ...]) -> None:
    from rich.text import Text

    from fedspan.cli.formatting import plain_table

    table = plain_table()
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
        "exact: does the aggregate equal the mean of the clients' weights? personal: does every client keep a model "
        "of its own? ranks: may they differ between clients? reply: a sum over clients is enough, so secure "
        "aggregation and differential privacy apply, or the server needs a stack of all replies.\n"
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
    _options(out, "method.", row.options)


def _options(out: Console, prefix: str, options: tuple[Option, ...]) -> None:
    from fedspan.cli.formatting import plain_table

    table = plain_table()
    table.add_column("option", style="bold", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("what it is")
    for option in options:
        table.add_row(f"{prefix}{option.name}", json.dumps(option.default), option.help)
    out.print(table)


def _all_wrappers(out: Console, rows: tuple[WrapperRow, ...]) -> None:
    from rich.text import Text

    from fedspan.cli.formatting import plain_table

    table = plain_table()
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


def _one_wrapper(out: Console, row: WrapperRow) -> None:
    out.print(f"{row.name}: {row.idea}", style="bold")
    out.print(f"{row.paper}\n")
    out.print(f"  a wrapper, to be put around a method: {row.kind}")
    out.print("  method:")
    values = "".join(f", {option.name}: {json.dumps(option.default)}" for option in row.options)
    out.print(f"    wrappers: [{{name: {row.key}{values}}}]")
    _options(out, "", row.options)


def partition(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")],
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw it, too.")] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Show who would hold which examples, before anything is trained."""
    from fedspan.cli.formatting import console
    from fedspan.config import load_config
    from fedspan.data.loading import load
    from fedspan.data.partition import partition as divide

    settings = load_config(config, overrides or ())
    data = load(settings.data, seed=settings.data_seed, task=settings.task)
    parts = divide(data.train, settings.partition, settings.data_seed)
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
        typer.echo(json.dumps({**content, "dropped": data.dropped}, ensure_ascii=False))
    else:
        test = 0 if data.test is None else len(data.test)
        _show_partition(console(), parts, rows, data.labels, test)
        if data.dropped:
            typer.echo(f"left out: {data.dropped} rows that lack a text, a label or an answer")
        if png is not None:
            typer.echo(f"wrote {png}")


def _show_partition(
    out: Console, parts: Partition, rows: tuple[ClientRow, ...], labels: tuple[str, ...], test: int
) -> None:
    heldout = f"{test} held out" if test else "no held-out test set"
    many = f", {len(labels)} labels" if labels else ""
    out.print(f"{len(rows)} clients, {parts.examples} examples{many}; {heldout}\n", style="bold")
    counts = [(f"{row.train}+{row.validation}+{row.test}", row) for row in rows]
    names = max(6, *(min(_LONGEST, len(row.id)) for row in rows))
    sizes = max(8, *(len(size) for size, _ in counts)) + 1
    digits = max(len(str(count)) for row in rows for count in (*row.counts, len(labels))) + 1
    if names + sizes + digits * len(labels) <= out.width:
        _count_table(out, counts, labels, (names, sizes, digits))
    else:
        _largest_table(out, counts, labels)
    out.print("examples: train+validation+test", style="dim")


def _count_table(
    out: Console, counts: list[tuple[str, ClientRow]], labels: tuple[str, ...], widths: tuple[int, int, int]
) -> None:
    """Print a column for each label; rich's own tables are too wide for twenty labels in 80 columns."""
    from fedspan.cli.formatting import one_line

    names, sizes, digits = widths
    numbers = "".join(str(index).rjust(digits) for index in range(1, len(labels) + 1))
    out.print("client".ljust(names) + "examples".rjust(sizes) + numbers, style="dim")
    for size, row in counts:
        cells = "".join((str(count) if count else ".").rjust(digits) for count in row.counts)
        out.print(one_line(row.id, names).ljust(names) + size.rjust(sizes) + cells, soft_wrap=True)
    out.print()
    if not labels:
        return
    line = ""
    for entry in [f"{index} {name}" for index, name in enumerate(labels, 1)]:
        if line and len(line) + 2 + len(entry) > out.width:
            out.print(line, style="dim")
            line = ""
        line += ("  " if line else "") + entry
    out.print(line, style="dim")


def _largest_table(out: Console, counts: list[tuple[str, ClientRow]], labels: tuple[str, ...]) -> None:
    """Print each client's number of labels and its largest ones, if there are too many labels for columns."""
    from fedspan.cli.formatting import one_line, plain_table

    table = plain_table()
    table.add_column("client", no_wrap=True)
    table.add_column("examples", justify="right", no_wrap=True)
    table.add_column("labels", justify="right", no_wrap=True)
    table.add_column("most frequent")
    for size, row in counts:
        held = sorted((-count, index) for index, count in enumerate(row.counts) if count)
        largest = ", ".join(f"{labels[index]} {-count}" for count, index in held[:3])
        table.add_row(one_line(row.id, _LONGEST), size, str(len(held)), largest)
    out.print(table)
