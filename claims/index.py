"""Write docs/claims/index.md from what the claims saved: ``python claims/index.py``."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from report import FOLDER, build_title, format_table

from fedspan.reproduction.presets import list_presets

OPENING = """# Claims

What papers say of their methods, run again with this library. One script a claim, in `claims/`; every number comes from
the run that the page names. A comparison is paired by seed: it *holds* if the mean difference exceeds two standard
errors in the paper's direction, is *contradicted* if it does in the other, and else is *inconclusive*. This page is
written by `python claims/index.py` from the claims' saved results."""
UNPLAYED = """## Not run yet

Experiments that are presets and were not played for these pages: `python claims/all.py ID --data PATH --model PATH`
plays one on two cores and writes its page, `fedspan reproduce ID --scale full --out FOLDER` plays it at the paper's
size."""


SYSTEMS = {"rolora": "RoLoRA", "fedloru": "FedLoRU", "fedgalore": "FedGaLore", "florg": "FLoRG"}
"""The papers' systems by what their pages' names begin with."""
REST = "All methods"
REASONS = "reasons"
"""The page that examines contradictions; its statements are no paper's, and are not counted."""
LOOKED = "## Looked into\n\nRows of contradicted statements, played again under what might be the reason."
VERDICTS = ("holds", "contradicted", "inconclusive", "not runnable here")


def index(folder: Path) -> str:
    """The page as markdown."""
    parts: dict[str, list[dict[str, Any]]] = {title: [] for title in (*SYSTEMS.values(), REST)}
    looked: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.json"), key=_sort_by_number):
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["name"] == REASONS:
            looked.append(saved)
            continue
        parts[SYSTEMS.get(re.split("[-_]", saved["name"])[0], REST)].append(saved)
    parts = {title: pages for title, pages in parts.items() if pages}
    whole = [OPENING, summarize_papers(parts) if parts else "No results yet."]
    for title, pages in parts.items():
        whole.append(
            f"## {title}\n\n"
            + format_table(("claim", "the paper's statement", "measured", "verdict"), format_rows(pages))
        )
    if looked:
        whole += [LOOKED, format_table(("page", "under what is changed", "measured", "verdict"), format_rows(looked))]
    there = {page["name"] for pages in parts.values() for page in pages}
    return "\n\n".join([*whole, *list_missing_pages(there)]) + "\n"


def _sort_by_number(path: Path) -> list[str]:
    """Table 2 before table 10."""
    return [text.zfill(4) for text in re.split(r"(\d+)", path.stem)]


def summarize_papers(parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """How many statements of each paper came out how."""
    counts = {
        title: Counter(finding["verdict"] for page in pages for finding in page["findings"])
        for title, pages in parts.items()
    }
    shown = [
        (title, str(len(parts[title])), str(sum(count.values())), *(str(count[one]) for one in VERDICTS))
        for title, count in counts.items()
    ]
    whole = sum(counts.values(), Counter[str]())
    pages = str(sum(map(len, parts.values())))
    shown.append(("all", pages, str(sum(whole.values())), *(str(whole[one]) for one in VERDICTS)))
    return format_table(("paper", "claims", "statements", *(one.removesuffix(" here") for one in VERDICTS)), shown)


def format_rows(pages: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each statement, a page's first with a link to it."""
    found: list[tuple[str, ...]] = []
    for saved in pages:
        for number, finding in enumerate(saved["findings"]):
            page = f"[{saved['title']}]({saved['name']}.md), {saved['date']}" if number == 0 else ""
            found.append((page, finding["statement"], finding["measured"], f"**{finding['verdict']}**"))
    return found


def list_missing_pages(there: Collection[str]) -> list[str]:
    """What no page is of; those that something else than a run would have to judge have a script of their own.

    Args:
        there: Names of the existing pages.
    """
    presets = [
        one for one in list_presets() if one.id not in there and any(claim.needs is None for claim in one.claims)
    ]
    if not presets:
        return []
    rows = [
        (f"`{preset.id}`", build_title(preset), str(sum(claim.needs is None for claim in preset.claims)))
        for preset in presets
    ]
    return [UNPLAYED, format_table(("preset", "what it plays", "statements"), rows)]


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    (folder / "index.md").write_text(index(folder), encoding="utf-8")
    print(f"wrote {folder / 'index.md'}")


if __name__ == "__main__":
    main()
