"""What a script prints of a paper's statements, and the picture that it saves."""

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch

matplotlib.use("svg")
from matplotlib.figure import Figure

from fedspan.experiments.intervals import Verdict

OUT = Path("runs/claims")
"""Folder of the pictures, by default."""
WORDS = {"holds": "same direction", "contradicted": "opposite direction", "inconclusive": "no measurable difference"}
"""The verdicts as on the pages."""


@dataclass(frozen=True)
class Finding:
    """One statement of a paper, and what was measured.

    Args:
        statement: The paper's statement.
        measured: The number that supports or contradicts it.
        verdict: Verdict by the rule of ``fedspan.experiments.intervals``, or exact where nothing is random.
    """

    statement: str
    measured: str
    verdict: Verdict


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown."""
    head, *lines = ("| " + " | ".join(map(str, line)) + " |" for line in (header, *rows))
    return "\n".join([head, "|" + "---|" * len(header), *lines])


def describe_machine() -> str:
    """The line about code, date and machine."""
    # --dirty: a page must not name a commit that is not what ran
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    described = subprocess.run(command, capture_output=True, text=True, check=False)
    code = f"Code: {described.stdout.strip()}. " if described.returncode == 0 else ""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    return f"{code}Date: {time.strftime('%Y-%m-%d')}. Machine: {machine}."


def save_figure(figure: Figure, folder: Path, name: str) -> None:
    """Save a figure; the same one has the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")


def show(findings: Sequence[Finding], sections: Sequence[str] = ()) -> None:
    """Print the findings, then the tables behind them."""
    rows = [(finding.statement, finding.measured, WORDS[finding.verdict]) for finding in findings]
    table = format_table(("the paper's statement", "measured, with 95 % intervals", "verdict"), rows)
    print("\n\n".join([table, *sections, describe_machine()]))
