"""Where to read more about a mistake: every page and heading is there, and every section of a config has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedspan.cli import hints
from fedspan.cli.hints import PAGES, find_page
from fedspan.config import RunConfig

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("field", PAGES)
def test_the_page_and_its_heading_are_there(field: str) -> None:
    page, _, anchor = str(find_page(field)).partition("#")
    titles = re.findall(r"^#+ (.+)$", Path(page).read_text(encoding="utf-8"), re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    assert not anchor or anchor in slugs


def test_every_section_of_a_config_has_a_page() -> None:
    alone = {"seed", "device", "threads", "deterministic", "centralized_lr"}
    assert set(RunConfig.model_fields) - alone <= PAGES.keys()


def test_the_longest_entry_counts() -> None:
    assert find_page("federation.secure.bits") == f"{DOCS / 'deployment.md'}#secure-aggregation"
    assert find_page("federation.rounds") == f"{DOCS / 'config.md'}#federation"
    assert find_page("texts") is None


def test_an_installed_package_has_the_pages_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(hints, "files", lambda _: tmp_path)
    assert find_page("privacy") == str(tmp_path / "docs" / "privacy.md")
