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

This page lists statements of papers about their methods, and what this library measured for each of them. Every claim
has a script in `claims/`, and every number comes from the run that its page names. Comparisons are paired by seed. A
statement *holds* if the mean difference exceeds two standard errors in the paper's direction, is *contradicted* if it
does so in the other direction, and is *inconclusive* otherwise. Results marked *outdated* were measured before a change
that their page names, and have not been measured again; only the last column of the summary counts them. `python
claims/index.py` writes this page from the saved results."""
NOT_RUN = """## Not run yet

These presets have no page yet. `python claims/all.py ID --data PATH --model PATH` runs one of them on two cores and
writes its page. `fedspan reproduce ID --scale full --out FOLDER` runs it at the paper's size."""


SYSTEMS = {"rolora": "RoLoRA", "fedloru": "FedLoRU", "fedgalore": "FedGaLore", "florg": "FLoRG"}
"""Names of the papers' systems by the first word of their pages' file names."""
REST = "All methods"
REASONS = "reasons"
"""The page that examines contradictions; its statements are not those of a paper, and are not counted."""
EXAMINED = """## Examined contradictions

Rows of contradicted statements, run again under a possible reason for the contradiction."""
VERDICTS = ("holds", "contradicted", "inconclusive", "not runnable here")
OUTDATED = "outdated"


def index(folder: Path) -> str:
    """Return the page in Markdown."""
    parts: dict[str, list[dict[str, Any]]] = {title: [] for title in (*SYSTEMS.values(), REST)}
    examined: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.json"), key=_build_sort_key):
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["name"] == REASONS:
            examined.append(saved)
            continue
        parts[SYSTEMS.get(re.split("[-_]", saved["name"])[0], REST)].append(saved)
    parts = {title: pages for title, pages in parts.items() if pages}
    sections = [OPENING, summarize_papers(parts) if parts else "No results yet."]
    for title, pages in parts.items():
        sections.append(
            f"## {title}\n\n"
            + format_table(("claim", "the paper's statement", "measured", "verdict"), format_rows(pages))
        )
    if examined:
        sections += [
            EXAMINED,
            format_table(("page", "statement under the change", "measured", "verdict"), format_rows(examined)),
        ]
    existing = {page["name"] for pages in parts.values() for page in pages}
    return "\n\n".join([*sections, *list_missing_pages(existing)]) + "\n"


def _build_sort_key(path: Path) -> list[str]:
    """Return a sort key that puts table 2 before table 10."""
    return [text.zfill(4) for text in re.split(r"(\d+)", path.stem)]


def summarize_papers(parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Count the verdicts of each paper's statements; those of outdated pages have a column of their own."""
    counts = {
        title: Counter(
            OUTDATED if "outdated" in page else finding["verdict"] for page in pages for finding in page["findings"]
        )
        for title, pages in parts.items()
    }
    columns = (*VERDICTS, OUTDATED)
    rows = [
        (title, str(len(parts[title])), str(sum(count.values())), *(str(count[column]) for column in columns))
        for title, count in counts.items()
    ]
    total = sum(counts.values(), Counter[str]())
    pages = str(sum(map(len, parts.values())))
    rows.append(("all", pages, str(sum(total.values())), *(str(total[column]) for column in columns)))
    return format_table(("paper", "claims", "statements", *(column.removesuffix(" here") for column in columns)), rows)


def format_rows(pages: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each statement; the first row of a page links to it."""
    rows: list[tuple[str, ...]] = []
    for saved in pages:
        for number, finding in enumerate(saved["findings"]):
            page = f"[{saved['title']}]({saved['name']}.md), {saved['date']}" if number == 0 else ""
            verdict = f"**{finding['verdict']}**" + (f", {OUTDATED}" if "outdated" in saved else "")
            rows.append((page, finding["statement"], finding["measured"], verdict))
    return rows


def list_missing_pages(existing: Collection[str]) -> list[str]:
    """Return the section of presets without a page; statements that no run can judge have scripts of their own.

    Args:
        existing: Names of the existing pages.
    """
    presets = [
        preset
        for preset in list_presets()
        if preset.id not in existing and any(claim.needs is None for claim in preset.claims)
    ]
    if not presets:
        return []
    rows = [
        (f"`{preset.id}`", build_title(preset), str(sum(claim.needs is None for claim in preset.claims)))
        for preset in presets
    ]
    return [NOT_RUN, format_table(("preset", "experiment", "statements"), rows)]


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    (folder / "index.md").write_text(index(folder), encoding="utf-8")
    print(f"wrote {folder / 'index.md'}")


if __name__ == "__main__":
    main()
