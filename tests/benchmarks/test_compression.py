"""benchmarks/compression.py: the sections of its page are written one by one."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import compression

    return compression


def test_a_section_that_is_not_written_again_stays_as_it_was(script: ModuleType) -> None:
    sections = {name: f"## {title}\n\nold {name}\n" for name, title in script.TITLES.items()}
    page = script.join_page(sections, "")
    assert page.startswith("# What compressed transfer costs and saves\n\nThis page")
    assert [page.index(section) for section in sections.values()] == sorted(map(page.index, sections.values()))
    assert script.join_page({}, page) == page
    new = {"new-values": sections["new-values"].replace("old new-values", "new new-values")}
    assert script.join_page(new, page) == page.replace("old new-values", "new new-values")
