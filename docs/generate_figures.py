"""Draw the figures of ``docs/results`` from the tables of its pages: ``python docs/generate_figures.py``.

Each file has the digest of the numbers that it shows, which ``tests/docs`` compares with the page's.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib.figure import Figure

FOLDER = Path(__file__).parent / "results"

Rows = list[dict[str, str]]


def read_table(page: str, header: str) -> Rows:
    """Read the first table of a page whose header begins so, as rows of text by column."""
    lines = (FOLDER / f"{page}.md").read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(header))
    rows: list[list[str]] = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def read_numbers(cell: str) -> list[float]:
    """Read the numbers of a cell."""
    return [
        float(number.replace(",", "")) for number in re.findall(r"[+-]?\d[\d,]*(?:\.\d+)?", cell.replace(", ", " "))
    ]


def draw_speed(rows: Rows) -> Figure:
    """Milliseconds an example at batch 4, the fastest above."""
    figure = Figure(figsize=(7, 3.4))
    axes = figure.subplots()
    ordered = sorted(rows, key=lambda row: -float(row["ms an example"]))
    colors = ["tab:blue" if row[""].startswith("fedspan batched") else "tab:gray" for row in ordered]
    bars = axes.barh([row[""] for row in ordered], [float(row["ms an example"]) for row in ordered], color=colors)
    axes.bar_label(bars, [row["ms an example"] for row in ordered], padding=3)
    axes.set(xlabel="ms an example (batch 4, 50 clients, 2 threads)")
    axes.margins(x=0.12)
    return figure


def draw_gpu(rows: Rows) -> Figure:
    """Tokens a second by the number of clients at batch 1, beside PEFT's loop."""
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    columns = [column for column in rows[0] if column.startswith("clients: ")]
    for row in (row for row in rows if row["batch"] == "1"):
        tokens = [read_numbers(row[column])[0] for column in columns]
        (line,) = axes.loglog([read_numbers(column)[0] for column in columns], tokens, marker="o", label=row["shape"])
        axes.axhline(read_numbers(row["PEFT in a loop"])[0], linestyle=":", color=line.get_color())
    axes.set(xlabel="clients in one pass (batch 1)", ylabel="tokens a second (dotted: PEFT's loop)")
    axes.margins(y=0.1)
    axes.legend()
    return figure


def draw_load(rows: Rows) -> Figure:
    """Seconds of a round by the number of nodes."""
    figure = Figure(figsize=(6, 3.4))
    axes = figure.subplots()
    column = "seconds per round: median, maximum"
    nodes, times = [float(row["nodes"]) for row in rows], [read_numbers(row[column]) for row in rows]
    for place, (label, style) in enumerate((("median", "o-"), ("maximum", "^--"))):
        axes.loglog(nodes, [time[place] for time in times], style, label=label)
    axes.set(xlabel="nodes", ylabel="seconds of a round without training")
    axes.legend()
    return figure


def draw_compression(rows: Rows) -> Figure:
    """Kilobytes of a client's round by method and format, the least above."""
    figure = Figure(figsize=(6, 6))
    axes = figure.subplots()
    formats = [column.partition(":")[0] for column in rows[0] if column.endswith("kB")]
    totals = {row["method"]: [sum(read_numbers(row[f"{name}: down + up, kB"])) for name in formats] for row in rows}
    methods = sorted(totals, key=lambda method: -totals[method][0])
    for place, (name, marker) in enumerate(zip(formats, "os^", strict=True)):
        axes.semilogx([totals[method][place] for method in methods], methods, marker, label=name)
    axes.grid(axis="y", alpha=0.3)
    axes.set(xlabel="kB a client and round, down + up")
    axes.legend()
    return figure


FIGURES: dict[str, tuple[str, Callable[[Rows], Figure]]] = {
    "speed": ("|  | ms an example |", draw_speed),
    "gpu": ("| shape | batch |", draw_gpu),
    "load": ("| nodes | rounds |", draw_load),
    "compression": ("| method | float32: down + up, kB |", draw_compression),
}
"""Beginning of the table's header, and function that draws it, by page."""


def compute_digest(rows: Sequence[Any]) -> str:
    """Compute the digest of a table's rows."""
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def main() -> None:
    """Draw all figures."""
    for page, (header, draw) in FIGURES.items():
        rows = read_table(page, header)
        with mpl.rc_context({"svg.hashsalt": page}):
            metadata = {"Date": None, "Description": compute_digest(rows)}
            draw(rows).savefig(FOLDER / f"{page}.svg", metadata=metadata, bbox_inches="tight")


if __name__ == "__main__":
    main()
