"""docs/security.md names a test for every attack; each is there, and the counts of fuzzing are those of the script."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_attack_has_a_test_that_is_there() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    table = text[text.index("| attack |") :].split("\n\n", 1)[0].splitlines()[2:]
    assert len(table) > 30
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    for row in table:
        named = re.findall(r"`(test_[^`]*)`", row.rstrip("| ").rpartition(" | ")[2])
        assert named, row
        assert set(named) <= there, set(named) - there


def test_the_readme_counts_the_attacks_of_the_table() -> None:
    readme, page = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/security.md"))
    rows = page[page.index("| attack |") :].split("\n\n", 1)[0].splitlines()[2:]
    assert re.findall(r"(\d+)\s+attacks", readme) == [str(len(rows))]


def test_every_replayed_attack_is_in_the_table() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    attacks = (ROOT / "tests" / "transports" / "flower" / "test_attacks.py").read_text(encoding="utf-8")
    for name in re.findall(r"^def (test_\w+)", attacks, re.MULTILINE):
        assert f"`{name}`" in text, name
