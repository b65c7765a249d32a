"""The table of a series: the same cells for the terminal and for markdown, plain numbers for csv."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from fedspan.errors import FedspanError
from fedspan.files import disk_errors, write_atomic
from fedspan.runs.folder import RunFolder
from fedspan.tasks.metrics import METRICS

__all__ = ["Table", "heading", "markdown", "megabytes", "plus_minus", "seconds", "size", "write_tables"]

_MACHINE = ("platform", "machine", "accelerator", "threads")
_OTHER = (*_MACHINE, "seed", "command")


@dataclass(frozen=True)
class Table:
    """A table as people read it.

    Args:
        head: titles of the columns; the first is aligned left, all others right.
        rows: cells.
        best: the row to be marked, if any.
        notes: what the numbers are, line by line.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: int | None
    notes: tuple[str, ...]


def heading(what: str, metric: str) -> str:
    """A column's title with the metric and its unit."""
    return f"{what} {METRICS[metric].title}{', %' if METRICS[metric].percent else ''}"


def plus_minus(metric: str, value: float | None, error: float | None, sign: bool = False) -> str:
    """``95.4 ± 0.7`` of a metric in percent, four decimals of any other; without the error if there is none.

    Args:
        metric: whose unit to take.
        value: of it, or a difference; None is a dash.
        error: a standard deviation or error, in the same unit.
        sign: whether to show a plus.
    """
    if value is None:
        return "-"
    factor, digits = (100, 1) if METRICS[metric].percent else (1, 4)
    shown = f"{factor * value:{'+' if sign else ''}.{digits}f}"
    return shown if error is None else f"{shown} ± {factor * error:.{digits}f}"


def megabytes(count: float | None) -> str:
    """Bytes in millions, with three digits behind the point where they are few."""
    return "-" if count is None else f"{count / 1e6:.{1 if count >= 1e7 else 3}f}"


def size(count: float) -> str:
    """Bytes in decimal units: 3 412 345 as 3.4 MB."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.5:
            return f"{count:.{0 if count >= 99.95 else 1}f} {unit}"
    return f"{count / 1000:.1f} TB"


def seconds(value: float | None) -> str:
    """Seconds with one decimal."""
    return "-" if value is None else f"{value:.1f}"


def write_tables(
    folder: Path,
    title: str,
    table: Table,
    plain: Sequence[Mapping[str, object]],
    command: Sequence[str],
    runs: Sequence[str],
    more: Table | None = None,
) -> None:
    """Write ``table.csv`` and ``table.md``, which says by which command, where and when its numbers came about.

    Args:
        folder: of the series.
        title: of the markdown page.
        table: for people.
        plain: the same for machines, by column.
        command: the command line.
        runs: folders of the runs inside ``folder`` that were played.
        more: a further table for the page.

    Raises:
        FedspanError: if the folder cannot be written, or the runs were on different data.
    """
    lines = [f"# {title}", "", *_provenance(folder, command, runs), "", *markdown(table)]
    if more is not None:
        lines += ["", *markdown(more)]
    with disk_errors(folder):
        write_atomic(folder / "table.md", ("\n".join(lines) + "\n").encode())
        write_atomic(folder / "table.csv", _csv(plain).encode())


def _csv(plain: Sequence[Mapping[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(plain[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain)  # None is an empty cell
    return text.getvalue()


def markdown(table: Table) -> list[str]:
    """The lines of a table with its notes."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    rows = [
        line([cell and f"**{cell}**" for cell in row] if at == table.best else row) for at, row in enumerate(table.rows)
    ]
    rule = "|---|" + "---:|" * (len(table.head) - 1)
    return [line(table.head), rule, *rows, "", *[note + "  " for note in table.notes[:-1]], *table.notes[-1:]]


def _provenance(folder: Path, command: Sequence[str], runs: Sequence[str]) -> list[str]:
    """Who made the numbers: read from the runs, so that a table made anew later says the same."""
    places = [RunFolder(folder / name) for name in runs]
    found = [cast(dict[str, Any], place.read_json(place.environment)) for place in places]
    divisions = {str(cast(dict[str, Any], place.read_json(place.partition))["fingerprint"]): place for place in places}
    if len(divisions) > 1:
        (_, one), (_, other) = list(divisions.items())[:2]
        expected = f"the same division of the data as in {one.path.name}; the data have changed between the two"
        raise FedspanError("partition", str(other.path), expected)
    shown = [f"Command: `{shlex.join(command)}`  "]
    finished = [place.report.stat().st_mtime for place in places if place.report.is_file()]
    if finished:
        shown.append(f"Date: {datetime.fromtimestamp(max(finished), UTC):%Y-%m-%d}.  ")
    for index, environment in enumerate(dict.fromkeys(_environment(each) for each in found)):
        shown.append(f"{'Machine' if index == 0 else 'Also on'}: {environment}.  ")
    shown += [f"Same division of the data in all runs: {next(iter(divisions))[:16]}."] if divisions else []
    return shown


def _environment(environment: Mapping[str, Any]) -> str:
    machine = [f"{environment[name]}" for name in _MACHINE[:-1] if environment.get(name)]
    versions = [f"{name} {value}" for name, value in environment.items() if name not in _OTHER and value]
    return f"{', '.join(machine)}, threads {environment.get('threads')}; {', '.join(versions)}"
