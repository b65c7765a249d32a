"""``fedspan partition``: the assignment of examples to clients."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedspan.cli.commands import Json, Overrides, argument, option, register_command
from fedspan.cli.formatting import create_console, create_table
from fedspan.errors import FedspanError
from fedspan.progress.formatting import shorten

if TYPE_CHECKING:
    from fedspan.data.partition import ClientRow, Partition

_MAX_NAME = 24


@register_command(
    "partition",
    "fedspan partition my.yaml",
    "fedspan partition my.yaml --set partition.alpha=0.1 --png partition.png",
)
def partition(
    config: Annotated[Path, argument("CONFIG", "The run's YAML file.")],
    png: Annotated[Path | None, option("FILE", "Image file of a plot.")] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Show the assignment of examples to clients, without training."""
    from fedspan.config import load_config
    from fedspan.data.duplicates import describe_shared
    from fedspan.data.partition import partition as partition_examples

    settings = load_config(config, overrides or ())
    data = settings.load_examples()
    parts = partition_examples(data.train, settings.partition, settings.data_seed, groups=data.groups)
    labels = data.labels if "label" in data.train.column_names else ()  # one for each example, to be counted
    rows = parts.label_table(labels, data.train)
    if png is not None:
        from fedspan.data.plot import plot_partition

        try:
            plot_partition(parts, labels, data.train, png)
        except OSError as error:
            raise FedspanError("--png", str(png), f"a file that can be written ({error.strerror or error})") from None
    if as_json:
        clients = [dataclasses.asdict(row) for row in rows]
        content = {"fingerprint": parts.fingerprint, "labels": list(labels), "clients": clients}
        typer.echo(json.dumps({**content, "dropped": data.dropped}, ensure_ascii=False))
    else:
        test = 0 if data.test is None else len(data.test)
        _show_partition(create_console(), parts, rows, labels, test)
        natural = settings.partition.partitioner == "natural"
        for note in (*data.notes, *describe_shared(data.train, parts, settings.data, natural)):
            typer.echo(note)
        if png is not None:
            typer.echo(f"wrote {png}")


def _show_partition(
    out: Console, parts: Partition, rows: tuple[ClientRow, ...], labels: tuple[str, ...], test: int
) -> None:
    held_out = f"{test} held out" if test else "no held-out test set"
    label_count = f", {len(labels)} labels" if labels else ""
    out.print(f"{len(rows)} clients, {parts.examples} examples{label_count}; {held_out}\n", style="bold")
    counts = [(f"{row.train}+{row.validation}+{row.test}", row) for row in rows]
    names = max(6, *(min(_MAX_NAME, len(row.id)) for row in rows))
    sizes = max(8, *(len(size) for size, _ in counts)) + 1
    digits = max(len(str(count)) for row in rows for count in (*row.counts, len(labels))) + 1
    if names + sizes + digits * len(labels) <= out.width:
        _print_counts(out, counts, labels, (names, sizes, digits))
    else:
        _print_largest(out, counts, labels)
    out.print("examples: train+validation+test", style="dim")


def _print_counts(
    out: Console, counts: list[tuple[str, ClientRow]], labels: tuple[str, ...], widths: tuple[int, int, int]
) -> None:
    """Print a column for each label; rich's own tables are too wide for twenty labels in 80 columns."""
    names, sizes, digits = widths
    numbers = "".join(str(index).rjust(digits) for index in range(1, len(labels) + 1))
    out.print("client".ljust(names) + "examples".rjust(sizes) + numbers, style="dim")
    for size, row in counts:
        cells = "".join((str(count) if count else ".").rjust(digits) for count in row.counts)
        out.print(shorten(row.id, names).ljust(names) + size.rjust(sizes) + cells, soft_wrap=True)
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


def _print_largest(out: Console, counts: list[tuple[str, ClientRow]], labels: tuple[str, ...]) -> None:
    """Print each client's number of labels and its largest ones, if there are too many labels for columns."""
    table = create_table()
    table.add_column("client", no_wrap=True)
    table.add_column("examples", justify="right", no_wrap=True)
    table.add_column("labels", justify="right", no_wrap=True)
    table.add_column("most frequent")
    for size, row in counts:
        client_counts = sorted((-count, index) for index, count in enumerate(row.counts) if count)
        largest = ", ".join(f"{labels[index]} {-count}" for count, index in client_counts[:3])
        table.add_row(shorten(row.id, _MAX_NAME), size, str(len(client_counts)), largest)
    out.print(table)
