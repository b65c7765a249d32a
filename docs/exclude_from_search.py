"""A hook of mkdocs: pages of measurements are not searched, since they would bury the guides."""

from __future__ import annotations

from typing import Any

EVIDENCE = ("claims/", "results/", "published-code.md")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Mark a page of evidence for the theme's search."""
    if page.file.src_uri.startswith(EVIDENCE):
        page.meta["search"] = {"exclude": True}
