"""Write docs/claims/index.md from what the claims saved: ``python claims/index.py``."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from report import FOLDER, table, title_of

from fedspan.runs.presets import list_presets

OPENING = """# Claims

What papers say of their methods, run again with this library. One script a claim, in `claims/`; every number comes from
the run that the page names. A comparison is paired by seed: it *holds* if the mean difference exceeds two standard
errors in the paper's direction, is *contradicted* if it does in the other, and else is *inconclusive*. This page is
written by `python claims/index.py` from the claims' saved results."""
UNPLAYED = """## Not run yet

Experiments that are presets and were not played for these pages: `python claims/all.py ID --data PATH --model PATH`
plays one on two cores and writes its page, `fedspan reproduce ID --scale full --out FOLDER` plays it at the paper's
size."""


def index(folder: Path) -> str:
    """The page as markdown."""
    rows: list[tuple[str, ...]] = []
    there: set[str] = set()
    tally: Counter[str] = Counter()
    for path in sorted(folder.glob("*.json")):
        saved = json.loads(path.read_text(encoding="utf-8"))
        there.add(saved["name"])
        for number, finding in enumerate(saved["findings"]):
            tally[finding["verdict"]] += 1
            page = f"[{saved['title']}]({saved['name']}.md), {saved['date']}" if number == 0 else ""
            rows.append((page, finding["statement"], finding["measured"], f"**{finding['verdict']}**"))
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(tally.items()))
    parts = [OPENING, f"{sum(tally.values())} statements: {counts}." if tally else "No results yet."]
    parts.append(table(("claim", "the paper's statement", "measured", "verdict"), rows))
    return "\n\n".join([*parts, *unplayed(there)]) + "\n"


def unplayed(there: Collection[str]) -> list[str]:
    """What no page is of; those that something else than a run would have to judge have a script of their own.

    Args:
        there: names of pages.
    """
    presets = [
        one for one in list_presets() if one.id not in there and any(claim.needs is None for claim in one.claims)
    ]
    if not presets:
        return []
    rows = [
        (f"`{preset.id}`", title_of(preset), str(sum(claim.needs is None for claim in preset.claims)))
        for preset in presets
    ]
    return [UNPLAYED, table(("preset", "what it plays", "statements"), rows)]


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    (folder / "index.md").write_text(index(folder), encoding="utf-8")
    print(f"wrote {folder / 'index.md'}")


if __name__ == "__main__":
    main()
