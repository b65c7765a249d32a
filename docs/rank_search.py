"""A hook of mkdocs: guides are found first, and pages of measurements are not searched, since they would bury them."""

from __future__ import annotations

from typing import Any

EVIDENCE = ("claims/", "results/", "published-code.md")
DETAILS = ("methods/", "architecture", "api/", "dependencies.md")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Exclude or rank a page in the theme's search."""
    if page.file.src_uri.startswith(EVIDENCE):
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri.startswith(DETAILS):
        page.meta["search"] = {"boost": 0.1}
