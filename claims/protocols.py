"""The section of a preset's page that compares its two protocols: ``python claims/protocols.py`` updates all pages.

Under *each at its best* every row has a learning rate of its own, selected by validation; under *one rate for all* the
rows share the rate that the preset's ``small.matched`` names, as in the paper.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from report import FOLDER, format_table

from fedspan.reproduction.cells import IMAGE_MODEL, MODEL
from fedspan.reproduction.presets import Preset, list_presets

__all__ = ["build_section", "name_page", "update"]

HEADING = "## Two protocols"


def name_page(id: str, protocol: str) -> str:
    """Return the name of a preset's page under a protocol."""
    return id if protocol == "best" else f"{id}-{protocol}"


def build_section(folder: Path, preset: Preset, findings: Mapping[str, str] | None = None) -> str:
    """Return the section in Markdown; empty if the preset has one protocol.

    Args:
        folder: Folder of the pages.
        preset: The preset.
        findings: Results of the page by statement, as they will stand in its JSON file; None: those of the file.
    """
    if not preset.small.matched:
        return ""
    best = _read_findings(folder, preset.id) if findings is None else findings
    matched = _read_findings(folder, name_page(preset.id, "matched"))
    values = ", ".join(f"`{path}` = {value:g}" for path, value in preset.small.matched.items())
    rows = [(statement, result, matched.get(statement, "not run")) for statement, result in best.items()]
    name = name_page(preset.id, "matched")
    config = json.dumps(preset.small.config)
    model = " --model FOLDER" if MODEL in config or IMAGE_MODEL in config else ""
    command = f"`python claims/reproduced.py {preset.id} --protocol matched --data FOLDER{model}`"
    outcome = f"[Its page]({name}.md) has the scores." if matched else f"It has not been run: {command}."
    text = (
        f"The paper trains all rows at one learning rate, rank and set of modules. The page's scores are those of each "
        f"row at its own best rate; the last column has {values} for all. {outcome}"
    )
    return "\n\n".join(
        (HEADING, text, format_table(("the paper's statement", "each at its best", "one rate for all"), rows))
    )


def _read_findings(folder: Path, name: str) -> dict[str, str]:
    """Return a page's results by statement; empty if there is no page."""
    path = folder / f"{name}.json"
    if not path.is_file():
        return {}
    saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    note = ", outdated" if "outdated" in saved else ""
    return {one["statement"]: f"{one['measured']}: **{one['verdict']}**{note}" for one in saved["findings"]}


def update(folder: Path, preset: Preset) -> None:
    """Write the section into the preset's page, if there is a page, in place of an earlier one."""
    path = folder / f"{preset.id}.md"
    if not path.is_file() or not preset.small.matched:
        return
    text = re.sub(rf"{HEADING}\n.*?(?=^## )", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    before, heading, rest = text.partition("## Setting\n")
    assert heading, f"{path} has no section of settings"
    path.write_text(f"{before}{build_section(folder, preset)}\n\n{heading}{rest}", encoding="utf-8")


def main() -> None:
    """Update the pages of all presets with two protocols."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    for preset in list_presets():
        update(folder, preset)


if __name__ == "__main__":
    main()
