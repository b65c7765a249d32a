"""Tables of hand-written pages can be read: no cell is longer than a line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.code_blocks import PAGES, ROOT

LONGEST = 120
"""Number of visible characters of the longest cell."""
QUOTING = {Path("docs/published-code.md"), Path("docs/results/faults.md")}
"""Pages whose cells list names of tests, or quote what a run printed."""


def find_long_cells(text: str) -> list[str]:
    """Find the cells of a page's tables that are too long, without the addresses of their links."""
    text = re.sub(r"(?ms)^```.*?^```", "", text)
    rows = [line.strip().strip("|") for line in text.splitlines() if line.startswith("|")]
    cells = [re.sub(r"\]\([^)]*\)", "]", cell.strip()) for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    return [cell for cell in cells if len(re.sub(r"[\[\]]", "", cell)) > LONGEST]


def test_the_scan_measures_what_is_visible() -> None:
    fits, long = "x" * LONGEST, "y" * (LONGEST + 1)
    table = f"| [{fits}](page.md) | {long} |\n"
    assert find_long_cells(table) == [long]
    assert find_long_cells(f"```text\n{table}```\n") == []


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name != "claims" and p not in QUOTING], ids=str)
def test_no_cell_of_a_table_is_long(page: Path) -> None:
    """Scripts write the pages of claims, with the papers' statements."""
    assert find_long_cells((ROOT / page).read_text(encoding="utf-8")) == []
