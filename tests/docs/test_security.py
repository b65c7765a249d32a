"""docs/security.md names a test for every attack; each is there, and the counts of fuzzing are those of the script."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def read_attacks() -> tuple[list[str], list[str]]:
    """Return the rows of the table of attacks, and the entries of the list of their tests."""
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    rows = page[page.index("| no. | attack |") :].split("\n\n", 1)[0].splitlines()[2:]
    entries = page[page.index("\n1. `test_") + 1 :].split("\n\n", 1)[0].splitlines()
    return rows, entries


def test_every_attack_has_a_test_that_is_there() -> None:
    rows, entries = read_attacks()
    assert len(rows) > 30
    assert [row.split(" | ")[0] for row in rows] == [f"| {number}" for number in range(1, len(rows) + 1)]
    assert [entry.partition(". ")[0] for entry in entries] == [str(number) for number in range(1, len(rows) + 1)]
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    for entry in entries:
        named = re.findall(r"`(test_[^`]*)`", entry)
        assert named, entry
        assert set(named) <= there, set(named) - there


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_front_pages_count_the_attacks_of_the_table(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.findall(r"(\d+)\s+attacks", text) == [str(len(read_attacks()[0]))]


def test_every_replayed_attack_is_in_the_table() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    attacks = (ROOT / "tests" / "transports" / "flower" / "test_attacks.py").read_text(encoding="utf-8")
    for name in re.findall(r"^def (test_\w+)", attacks, re.MULTILINE):
        assert f"`{name}`" in text, name
