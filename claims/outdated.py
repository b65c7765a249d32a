"""Mark pages whose settings or code have changed since they were measured: ``python claims/outdated.py --help``.

The numbers stay; the page and the index name the change. Running the page's command again removes the mark.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from report import FOLDER

__all__ = ["mark"]


def mark(folder: Path, name: str, change: str) -> None:
    """Add a change to a page and to its JSON file, once.

    Args:
        folder: Folder of the pages.
        name: Name of the page.
        change: The change, a sentence without a capital letter and a full stop.

    Raises:
        FileNotFoundError: If there is no such page.
    """
    page, facts = folder / f"{name}.md", folder / f"{name}.json"
    saved = json.loads(facts.read_text(encoding="utf-8"))
    changes = saved.setdefault("outdated", [])
    if change in changes:
        return
    text = page.read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("Date: "))
    before = f"{line}\n\n{_build_note(changes)}" if changes else line
    assert before in text, f"{page} has another note than its JSON file"
    changes.append(change)
    page.write_text(text.replace(before, f"{line}\n\n{_build_note(changes)}", 1), encoding="utf-8")
    facts.write_text(json.dumps(saved, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _build_note(changes: list[str]) -> str:
    return f"**Outdated:** since this run, {'; '.join(changes)}. The command above measures it again."


def main() -> None:
    """Mark the named pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", help="names of pages, such as fedloru-table1")
    parser.add_argument("--change", required=True, help="what has changed, as in 'the default of tau is 10'")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    for name in args.pages:
        mark(args.folder, name, args.change)


if __name__ == "__main__":
    main()
