"""Table of a series: the same cells for the terminal and Markdown, plain numbers for CSV."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import numpy as np

from fedspan.errors import FedspanError
from fedspan.files import convert_disk_errors, neutralize_formula, write_atomic
from fedspan.run_folder import RunFolder
from fedspan.runs.predictions import Items
from fedspan.runs.report import RunReport
from fedspan.tasks.metrics import METRICS

_MACHINE = ("platform", "machine", "accelerator", "threads")
_LATEX = {letter: rf"\{letter}" for letter in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
}
_OTHER = (*_MACHINE, "seed", "command")


@dataclass(frozen=True)
class Table:
    """A readable table."""

    head: tuple[str, ...]
    """Titles of the columns; the first is left-aligned, all others are right-aligned."""
    rows: tuple[tuple[str, ...], ...]
    best: int | None
    """Index of the highlighted row, if any."""
    notes: tuple[str, ...]
    """Explanation of the numbers, line by line."""


def format_heading(quantity: str, metric: str) -> str:
    """Return a column title with the metric and its unit."""
    return f"{quantity} {METRICS[metric].title}{', %' if METRICS[metric].is_percentage else ''}"


def format_mean(metric: str, value: float | None, error: float | None, sign: bool = False) -> str:
    """Format ``95.4 ± 0.7`` for a metric in percent, four decimals for any other; without the error if it is None.

    Args:
        value: Value of the metric, or a difference; None is a dash.
        error: Standard deviation or standard error, in the same unit.
    """
    if value is None:
        return "-"
    factor, digits = (100, 1) if METRICS[metric].is_percentage else (1, 4)
    text = f"{factor * value:{'+' if sign else ''}.{digits}f}"
    return text if error is None else f"{text} ± {factor * error:.{digits}f}"


def format_megabytes(count: float | None) -> str:
    """Format bytes in millions, with three decimals for small numbers."""
    return "-" if count is None else f"{count / 1e6:.{1 if count >= 1e7 else 3}f}"


def format_seconds(value: float | None) -> str:
    """Format seconds with one decimal."""
    return "-" if value is None else f"{value:.1f}"


def write_tables(
    folder: Path,
    title: str,
    table: Table,
    plain: Sequence[Mapping[str, object]],
    command: Sequence[str],
    runs: Sequence[str],
    extra: Table | None = None,
) -> None:
    """Write ``table.csv``, ``table.tex`` and ``table.md``, which states the command, machine and date of its numbers.

    Args:
        plain: Rows of ``table`` in machine-readable form, by column.

    Raises:
        FedspanError: If the folder cannot be written, or the runs used different data.
    """
    lines = [f"# {title}", "", *_describe_provenance(folder, command, runs), "", *format_markdown(table)]
    if extra is not None:
        lines += ["", *format_markdown(extra)]
    with convert_disk_errors(folder):
        write_atomic(folder / "table.md", ("\n".join(lines) + "\n").encode())
        write_atomic(folder / "table.csv", _format_csv(plain).encode())
        write_atomic(folder / "table.tex", ("\n".join(format_latex(table)) + "\n").encode())


def _format_csv(plain: Sequence[Mapping[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(plain[0]), lineterminator="\n")
    writer.writeheader()
    for row in plain:  # None is an empty cell
        writer.writerow({key: neutralize_formula(cell) if isinstance(cell, str) else cell for key, cell in row.items()})
    return text.getvalue()


def format_markdown(table: Table) -> list[str]:
    """Return the Markdown lines of a table with its notes."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    rows = [
        line([cell and f"**{cell}**" for cell in row] if index == table.best else row)
        for index, row in enumerate(table.rows)
    ]
    rule = "|---|" + "---:|" * (len(table.head) - 1)
    return [line(table.head), rule, *rows, "", *[note + "  " for note in table.notes[:-1]], *table.notes[-1:]]


def format_latex(table: Table) -> list[str]:
    """Return the lines of a LaTeX table of the package booktabs."""

    def line(cells: Sequence[str], pattern: str = "{}") -> str:
        escaped = ("".join(_LATEX.get(letter, letter) for letter in cell) for cell in cells)
        return " & ".join(pattern.replace("{}", cell) for cell in escaped) + r" \\"

    rows = [line(row, r"\textbf{{}}" if index == table.best else "{}") for index, row in enumerate(table.rows)]
    columns = "l" + "r" * (len(table.head) - 1)
    top, end = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"], [r"\bottomrule", r"\end{tabular}"]
    return [*top, line(table.head), r"\midrule", *rows, *end]


def _describe_provenance(folder: Path, command: Sequence[str], runs: Sequence[str]) -> list[str]:
    """Return the provenance of the numbers, read from the runs so that a regenerated table states the same."""
    folders = [RunFolder(folder / name) for name in runs]
    environments = [cast(dict[str, Any], entry.read_json(entry.environment)) for entry in folders]
    partitions = {
        str(cast(dict[str, Any], entry.read_json(entry.partition))["fingerprint"]): entry for entry in folders
    }
    if len(partitions) > 1:
        (_, first), (_, other) = list(partitions.items())[:2]
        problem = (
            f"{other.path.name} and {first.path.name} have different partitions, because the data changed between them"
        )
        raise FedspanError("partition", str(other.path), problem=problem)
    lines = [f"Command: `{shlex.join(command)}`  "]
    finished = [entry.report.stat().st_mtime for entry in folders if entry.report.is_file()]
    if finished:
        lines.append(f"Date: {datetime.fromtimestamp(max(finished), UTC):%Y-%m-%d}.  ")
    for index, environment in enumerate(dict.fromkeys(_describe_environment(values) for values in environments)):
        lines.append(f"{'Machine' if index == 0 else 'Also on'}: {environment}.  ")
    lines += [f"Same partition of the data in all runs: {next(iter(partitions))[:16]}."] if partitions else []
    return lines


def _describe_environment(environment: Mapping[str, Any]) -> str:
    machine = [f"{environment[name]}" for name in _MACHINE[:-1] if environment.get(name)]
    versions = [f"{name} {value}" for name, value in environment.items() if name not in _OTHER and value]
    return f"{', '.join(machine)}, threads {environment.get('threads')}; {', '.join(versions)}"


def compute_majority(metric: str, items: Items | None) -> float | None:
    """Return the accuracy of always predicting the most frequent class; None for other metrics."""
    if metric != "accuracy" or items is None:
        return None
    return float(np.bincount(items.targets).max() / len(items.targets))


def describe_majority(metric: str, items: Items | None) -> str:
    """Describe the accuracy of always predicting the most frequent class; empty for other metrics."""
    share = compute_majority(metric, items)
    if share is None:
        return ""
    return f"Majority class: {100 * share:.1f} % of the held-out examples have the most frequent label."


def describe_extension(report: RunReport, folder: Path) -> str:
    """Say how to extend a run whose last round is the best by validation; empty for another run."""
    # Under privacy more rounds spend more, which is the owners' decision.
    if report.privacy or not report.selected or not report.rounds or report.best_round != report.rounds:
        return ""
    rounds = report.rounds + max(1, report.rounds // 2)
    resumed = f"fedspan run --resume {shlex.quote(str(folder))} --set federation.rounds={rounds}"
    return f"Validation still improves: extend with {resumed}"
