"""``fedspan data`` and ``partition``: data sets that a config can name, and the assignment of examples to clients."""

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
    from fedspan.data.catalogue import DatasetEntry
    from fedspan.data.partition import ClientRow, Partition


@register_command("data", "fedspan data", "fedspan data sst2", "fedspan data --json")
def data(
    key: Annotated[str | None, argument("KEY", "Data set to describe, with a config to paste.")] = None,
    as_json: Json = False,
) -> None:
    """List the data sets of data.dataset: their tasks, licenses and locations."""
    from fedspan.data.catalogue import get_dataset_entry, list_datasets

    entries = list_datasets() if key is None else (get_dataset_entry(key, "KEY"),)
    if as_json:
        typer.echo(json.dumps([entry.model_dump(mode="json") for entry in entries], indent=2, ensure_ascii=False))
    elif key is None:
        _show_all(create_console(), entries)
    else:
        _show_entry(create_console(), entries[0])


def _show_all(out: Console, entries: tuple[DatasetEntry, ...]) -> None:
    # One table per task: a column of tasks would leave too little room for hub ids in 80 columns.
    for task in dict.fromkeys(entry.task for entry in entries):
        table = create_table()
        table.title, table.title_justify, table.title_style = f"task: {task}", "left", "bold"
        table.add_column("key", style="cyan", no_wrap=True, width=17)
        table.add_column("metric", no_wrap=True, width=11)
        table.add_column("license", width=14)
        table.add_column("hub id", min_width=30)
        for entry in entries:
            if entry.task == task:
                location = "local files only" if entry.hub is None else entry.hub.id
                location = location if len(location) <= 31 else location.replace("/", "/\n")
                table.add_row(entry.key, entry.metric, entry.license, location)
        out.print(table)
    notes = (
        "exact_match needs evaluation.generate. license: as the publisher states it; other: see the source; "
        "unknown: no statement was found.\nDetails and a config to paste: fedspan data sst2"
    )
    out.print(notes, style="dim")


def _show_entry(out: Console, entry: DatasetEntry) -> None:
    from fedspan.data.catalogue import render_snippet

    out.print(f"{entry.title}: {entry.summary}", style="bold")
    if entry.note is not None:
        out.print(entry.note)
    table = create_table()
    table.show_header = False
    table.box = None
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in list_properties(entry):
        table.add_row(name, value)
    out.print()
    out.print(table)
    builtin = entry.hub is not None and entry.hub.id.startswith("builtin:")
    configs = {"built in" if builtin else "from the hub": render_snippet(entry, "hub")}
    configs["from local files"] = render_snippet(entry, "files")
    for title, config in configs.items():
        if config is not None:
            out.print(f"\n{title}", style="dim")
            out.print("\n".join(f"  {line}" for line in config.splitlines()), soft_wrap=True)


def list_properties(entry: DatasetEntry) -> list[tuple[str, str]]:
    """List the properties of a data set as names and values, in reading order."""
    rows = f"{entry.rows.train} train" + ("" if entry.rows.test is None else f", {entry.rows.test} test")
    properties = [("task", entry.task), ("metric", entry.metric), ("rows", rows), ("license", entry.license)]
    properties.append(("source", entry.source))
    if entry.hub is None:
        properties.append(("hub", "not on the hub in this form: local files only"))
    else:
        config = "" if entry.hub.config is None else f", config {entry.hub.config}"
        splits = f"train on {entry.hub.train_split}, " + (
            "hold out a part of it for testing" if entry.hub.test_split is None else f"test on {entry.hub.test_split}"
        )
        properties += [("hub", f"{entry.hub.id}{config}"), ("splits", splits)]
    properties.append(("columns", _format_columns(entry.columns.model_dump(exclude_none=True))))
    if entry.files is not None:
        names = entry.files.train if entry.files.test is None else f"{entry.files.train}, {entry.files.test}"
        properties.append(("files", names))
        if entry.files.columns.model_dump(exclude_none=True):
            properties.append(
                ("columns of the files", _format_columns(entry.file_columns.model_dump(exclude_none=True)))
            )
        if entry.files.header is not None:
            properties.append(("no header; columns", ", ".join(entry.files.header)))
        if entry.files.quoting is not None:
            properties.append(("quoting", entry.files.quoting))
    optional = {
        "labels": None if entry.labels is None else ", ".join(entry.labels),
        "prompt": None if entry.prompt is None else entry.prompt.replace("\n", "\\n"),
        "answer pattern": entry.answer_pattern,
        "new tokens": None if entry.max_new_tokens is None else str(entry.max_new_tokens),
        "incomplete rows": "left out" if entry.invalid == "skip" else None,
    }
    properties += [(name, value) for name, value in optional.items() if value is not None]
    return properties


def _format_columns(columns: dict[str, str]) -> str:
    return ", ".join(f"{name} {column!r}" if " " in column else f"{name} {column}" for name, column in columns.items())


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
