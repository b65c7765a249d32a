"""``fedspan data``: the data sets that a config can name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedspan.cli.commands import Json, argument, register_command
from fedspan.cli.formatting import create_console, create_table

if TYPE_CHECKING:
    from fedspan.data.catalogue import DatasetEntry


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
