"""The tables of traps in docs/published-code.md name tests; each is there, and each row has one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_trap_has_a_test_that_is_there() -> None:
    text = (ROOT / "docs" / "published-code.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|") and not line.startswith(("| trap", "|---"))]
    assert len(rows) > 40
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    for row in rows:
        named = re.findall(r"`(test_[^`]*)`", row.rstrip("| ").rpartition(" | ")[2])
        assert named, row
        assert set(named) <= there, set(named) - there
