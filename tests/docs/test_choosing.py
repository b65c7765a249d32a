"""docs/choosing.md and other pages mark links to results that were measured with earlier settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.code_blocks import PAGES, ROOT

OUTDATED = {page for page in PAGES if "\n**Outdated" in (ROOT / page).read_text(encoding="utf-8")}
"""The pages that say that their results are outdated."""


def find_unmarked_links(page: Path, text: str) -> list[str]:
    """Find links to outdated pages without the mark after them."""
    links = re.finditer(r"\]\(([^)#:]+\.md)[^)]*\)(?!\s\(outdated\))", text)
    return [link[1] for link in links if (ROOT / page).parent.joinpath(link[1]).resolve().relative_to(ROOT) in OUTDATED]


def test_the_scan_finds_an_unmarked_link() -> None:
    name = min(OUTDATED).name
    assert find_unmarked_links(Path("docs/page.md"), f"[a](claims/{name}), [b](claims/{name}) (outdated)") == [
        f"claims/{name}"
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "claims"], ids=str)
def test_links_to_outdated_results_are_marked(page: Path) -> None:
    """The pages of claims name the state of each in a column or a sentence of their own."""
    assert find_unmarked_links(page, (ROOT / page).read_text(encoding="utf-8")) == []
