"""A claim's page, and its findings as a file that the index is made from."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib
import torch

matplotlib.use("svg")
from matplotlib.figure import Figure

from fedspan.experiments.intervals import Verdict
from fedspan.methods.describe import list_methods
from fedspan.reproduction.presets import Preset

__all__ = [
    "FOLDER",
    "Finding",
    "build_title",
    "describe_machine",
    "format_command_line",
    "format_row",
    "format_table",
    "save_figure",
    "write",
]

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "claims"


@dataclass(frozen=True)
class Finding:
    """One statement of a paper and what became of it.

    Args:
        statement: The paper's statement.
        measured: The number that supports or contradicts it.
        verdict: Verdict by the rule of ``fedspan.experiments.intervals``, or exact where nothing is random.
    """

    statement: str
    measured: str
    verdict: Verdict | Literal["not runnable here", "not run"]


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table."""
    return "\n".join([format_row(header), "|" + "---|" * len(header), *map(format_row, rows)])


def format_row(cells: Sequence[object]) -> str:
    """A line of a markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def save_figure(figure: Figure, folder: Path, name: str, alt: str) -> str:
    """Write a figure beside the page; returns the markdown that shows it. The same figure gives the same bytes."""
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
    return f"![{alt}]({name}.svg)"


def build_title(preset: Preset) -> str:
    """Of a preset's page: the system's name, the table or figure, and what that is about."""
    names = {row.key: row.name for row in list_methods()}
    return f"{names[preset.id.split('-')[0]]}, {preset.item}: {preset.title}"


def format_command_line() -> str:
    """How this was started; paths that lead elsewhere are shortened to their last part."""
    elsewhere = [Path(word).is_absolute() or Path(word).parts[:1] == ("..",) for word in sys.argv[1:]]
    words = [f"PATH/{Path(word).name}" if away else word for word, away in zip(sys.argv[1:], elsewhere, strict=True)]
    return " ".join(["python", f"claims/{Path(sys.argv[0]).name}", *map(shlex.quote, words)])


def describe_machine() -> str:
    """What this process runs on."""
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} thread(s)"
    )


def write(
    folder: Path,
    name: str,
    title: str,
    paper: str,
    findings: Sequence[Finding],
    sections: Sequence[str],
    stated: str = "the paper's statement",
    machine: str = "",
    command: str = "",
) -> None:
    """Write ``<name>.md`` and ``<name>.json``.

    Args:
        folder: Folder of the page.
        name: Name of the claim.
        title: Title of the page.
        paper: Title, venue and arXiv id of the paper.
        findings: The verdicts, first on the page.
        sections: The rest of the page, in Markdown.
        stated: Column title of the findings' statements.
        machine: What the measurements ran on; empty: this machine.
        command: The command that makes the page; empty: the one that runs.
    """
    run = {
        "command": command or format_command_line(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine or describe_machine(),
    }
    facts = {"name": name, "title": title, "paper": paper, **run}
    rows = [(finding.statement, finding.measured, f"**{finding.verdict}**") for finding in findings]
    page = [
        f"# {title}",
        f"Paper: {paper}.",
        f"Command: `{run['command']}`  \nDate: {run['date']}. Machine: {run['machine']}.",
        format_table((stated, "measured", "verdict"), rows),
        *sections,
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
    saved = {**facts, "findings": [dataclasses.asdict(finding) for finding in findings]}
    (folder / f"{name}.json").write_text(json.dumps(saved, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
