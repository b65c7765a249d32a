"""Count the words of each section of the site against its budget: ``docs/count_words.py [--pages]``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parent
SECTIONS = {
    "Guides": (("Start", "Simulate and compare", "Bring your trainer"), 18_000),
    "Methods": (("Methods",), 11_000),
    "Reference": (("Reference",), 8_000),
    "Servers and nodes": (("Run a server", "Own a node"), 8_000),
    "Developers": (("Write a method",), 7_000),
    "Evidence": (("Evidence",), 10_000),
}
"""Tabs of the navigation, and their budget of words."""
WHOLE = 65_000
"""Budget of all pages, counted as ``wc -w docs/*.md docs/*/*.md`` does: marks of tables and headings are words, too."""


def list_pages(entry: Any) -> Iterator[str]:
    """The pages below an entry of the navigation."""
    if isinstance(entry, str):
        yield entry
        return
    for part in entry.values() if isinstance(entry, dict) else entry:
        yield from list_pages(part)


def count_words(text: str) -> int:
    """The number of words with a letter or a digit, code and tables included, without the addresses of links."""
    return sum(any(map(str.isalnum, word)) for word in re.sub(r"\]\([^)]*\)", "]", text).split())


def count_sections() -> dict[str, dict[str, int]]:
    """The words of every page, by section."""
    nav = re.search(r"(?ms)^nav:\n.*", (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8"))
    tabs = {title: entry for tab in yaml.safe_load(nav[0])["nav"] for title, entry in tab.items()}
    return {
        section: {
            page: count_words((DOCS / page).read_text(encoding="utf-8"))
            for tab in names
            for page in list_pages(tabs[tab])
        }
        for section, (names, _) in SECTIONS.items()
    }


def main(pages: bool) -> int:
    """Print the table; return 1 if a section, or all of them, are above their budget."""
    failed = False
    for section, words in count_sections().items():
        total, budget = sum(words.values()), SECTIONS[section][1]
        failed |= total > budget
        mark = " TOO LONG" if total > budget else ""
        print(f"{section:18} {len(words):4} pages {total:8,} words of {budget:7,}{mark}")
        for page, count in sorted(words.items(), key=lambda row: -row[1]) if pages else ():
            print(f"    {count:6,} {page}")
    whole = sum(len(page.read_text(encoding="utf-8").split()) for page in DOCS.rglob("*.md"))
    print(f"{'all, as wc -w':29} {whole:8,} words of {WHOLE:7,}{' TOO LONG' if whole > WHOLE else ''}")
    return int(failed or whole > WHOLE)


if __name__ == "__main__":
    sys.exit(main("--pages" in sys.argv))
