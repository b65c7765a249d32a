"""What finished pages say beyond their own run: ``python claims/pages.py`` updates all of them.

- Two protocols: under *each at its best* every row has a learning rate of its own, selected by validation; under *one
  rate for all* the rows share the rate that the preset's ``small.matched`` names. The preset's page compares them.
- A comparison of rows that learned nothing has no verdict, and a statement whose cells the small scale has by now is
  not run, instead of not runnable.
- ``python claims/pages.py PAGE ... --change WORDS`` marks pages whose settings or code have changed since they were
  measured. The numbers stay, and a new run of the page removes the mark. ``--note SENTENCE`` adds a sentence that
  leaves the verdicts valid.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from report import FOLDER, format_row, format_table

from fedspan.reproduction.cells import IMAGE_MODEL, MODEL, Cell, list_cells
from fedspan.reproduction.presets import Claim, Preset, list_presets

__all__ = ["SCORES", "complete", "format_command", "mark", "name_page", "read_table"]

HEADING = "## Two protocols"
SCORES = "| cell | method | held-out |"
"""How the header of the table with a page's scores begins."""


def name_page(id: str, protocol: str) -> str:
    """Return the name of a preset's page under a protocol."""
    return id if protocol == "best" else f"{id}-{protocol}"


def format_command(preset: Preset, protocol: str = "best") -> str:
    """Return the command that runs a preset's page, in Markdown."""
    config = json.dumps(preset.small.config)
    model = " --model FOLDER" if MODEL in config or IMAGE_MODEL in config else ""
    words = "" if protocol == "best" else f" --protocol {protocol}"
    return f"`python claims/reproduced.py {preset.id}{words} --data FOLDER{model}`"


def complete(folder: Path, preset: Preset) -> None:
    """Settle the verdicts of a preset's pages, as far as there are any, and compare its protocols."""
    names = [name_page(preset.id, protocol) for protocol in ("best", "matched")]
    for name in names:
        if (folder / f"{name}.json").is_file():
            _settle(folder, name, preset)
    page = folder / f"{preset.id}.md"
    if not page.is_file() or not preset.small.matched:
        return
    text = re.sub(rf"{HEADING}\n.*?(?=^## )", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    before, heading, rest = text.partition("## Setting\n")
    assert heading, f"{page} has no section of settings"
    page.write_text(f"{before}{_build_section(folder, preset)}\n\n{heading}{rest}", encoding="utf-8")


def _build_section(folder: Path, preset: Preset) -> str:
    """Return the section in Markdown that compares a preset's two protocols."""
    name = name_page(preset.id, "matched")
    best, matched = _read_results(folder, preset.id), _read_results(folder, name)
    values = ", ".join(f"`{path}` = {value:g}" for path, value in preset.small.matched.items())
    rows = [(statement, result, matched.get(statement, "not run")) for statement, result in best.items()]
    outcome = (
        f"[Its page]({name}.md) has the scores." if matched else f"It was not run: {format_command(preset, 'matched')}."
    )
    text = (
        f"The page's scores are those of each row at its own best rate; the last column has {values} for all. {outcome}"
    )
    return "\n\n".join(
        (HEADING, text, format_table(("the paper's statement", "each at its best", "one rate for all"), rows))
    )


def _read_results(folder: Path, name: str) -> dict[str, str]:
    """Return a page's results by statement; empty if there is no page."""
    path = folder / f"{name}.json"
    if not path.is_file():
        return {}
    saved = _read(path)
    note = ", outdated" if "outdated" in saved else ""
    return {one["statement"]: f"{one['measured']}: **{one['verdict']}**{note}" for one in saved["findings"]}


def _settle(folder: Path, name: str, preset: Preset) -> None:
    """Replace verdicts that a page's scores do not support, in the page and in its JSON file."""
    page, facts = folder / f"{name}.md", folder / f"{name}.json"
    text, saved = page.read_text(encoding="utf-8"), _read(facts)
    cells, scores = list_cells(preset, "small"), read_table(text, SCORES)
    run, unlearned = {row["cell"] for row in scores}, find_unlearned(scores)
    pairs = {
        f"{claim.statement}: {claim.better} against {worse}": (claim, worse)
        for claim in preset.claims
        for worse in claim.worse
    }
    for finding in saved["findings"]:
        if finding["statement"] not in pairs:
            continue
        claim, worse = pairs[finding["statement"]]
        before = format_row((finding["statement"], finding["measured"], f"**{finding['verdict']}**"))
        fitting = [cell for cell in cells if all(cell.values[axis] in values for axis, values in claim.cells.items())]
        if finding["verdict"] == "not runnable here" and fitting and not run & {cell.name for cell in fitting}:
            finding["measured"], finding["verdict"] = f"its cells were not run: {format_command(preset)}", "not run"
        elif reason := _find_reason(claim, worse, fitting, cells, unlearned):
            finding["measured"] = f"{finding['measured'].partition(';')[0]}; {reason}"
            finding["verdict"] = "inconclusive"
        after = format_row((finding["statement"], finding["measured"], f"**{finding['verdict']}**"))
        assert before in text, f"{page} has other findings than its JSON file"
        text = text.replace(before, after)
    page.write_text(text, encoding="utf-8")
    _write(facts, saved)


def find_unlearned(rows: Sequence[Mapping[str, str]]) -> set[tuple[str, str]]:
    """Return the rows, as (cell, method), of models that always predict one class.

    These have the same score with every seed, and so has another row of the cell.

    Args:
        rows: A page's scores by column.
    """
    constant = [row for row in rows if re.fullmatch(r"-?[\d.]+ ± 0\.0+", row["held-out"])]
    count = Counter((row["cell"], row["held-out"]) for row in constant)
    return {(row["cell"], row["method"]) for row in constant if count[row["cell"], row["held-out"]] > 1}


def _find_reason(
    claim: Claim, worse: str, fitting: Sequence[Cell], cells: Sequence[Cell], unlearned: Collection[tuple[str, str]]
) -> str:
    """Return why a claim about scores cannot have a verdict; empty if it can.

    A row that learned nothing has nothing to lose, so a comparison of losses takes two rows that learned; a comparison
    of scores takes one.
    """
    if claim.measure != "score" or not fitting:
        return ""
    if claim.gap is not None:
        gap = claim.gap
        starts = [{**cell.values, gap.axis: gap.before} for cell in fitting if cell.values[gap.axis] == gap.after]
        fitting = [cell for cell in cells if cell.values in starts]
    idle = [
        label for label in (claim.better, worse) if fitting and all((cell.name, label) in unlearned for cell in fitting)
    ]
    if len(idle) < (1 if claim.gap is not None else 2):
        return ""
    return f"{' and '.join(idle)} learned nothing in {', '.join(cell.name for cell in fitting)}"


def read_table(text: str, beginning: str) -> list[dict[str, str]]:
    """Return the rows of a page's first table whose header begins so, by column; empty if there is none."""
    lines = text[text.find(beginning) :].splitlines() if beginning in text else []
    table: list[list[str]] = []
    for line in lines:
        if not line.startswith("|"):
            break
        table.append(line.strip("| ").split(" | "))
    return [dict(zip(table[0], row, strict=True)) for row in table[2:] if len(row) == len(table[0])]


def mark(folder: Path, name: str, change: str, key: str = "outdated") -> None:
    """Add a change to a page and to its JSON file, once.

    Args:
        folder: Folder of the pages.
        name: Name of the page.
        change: What has changed since, without a capital letter and a full stop; for ``noted`` a sentence.
        key: ``outdated``: the results are no longer those of today's settings; ``noted``: they still count.

    Raises:
        FileNotFoundError: If there is no such page.
    """
    facts = folder / f"{name}.json"
    saved = _read(facts)
    changes = saved.setdefault(key, [])
    if change not in changes:
        changes.append(change)
        _write(facts, saved)
        write_notes(folder, name)


def write_notes(folder: Path, name: str) -> None:
    """Write what is marked in a page's JSON file under its date, instead of earlier notes."""
    page, saved = folder / f"{name}.md", _read(folder / f"{name}.json")
    text = re.sub(r"^\*\*(Outdated|Note)\b.*\n\n", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    date = next(line for line in text.splitlines() if line.startswith("Date: "))
    notes = [
        f"**Outdated, not run with today's settings:** since this run, {'; '.join(changes)}. The command above runs it."
        for changes in (saved.get("outdated"),)
        if changes
    ]
    notes += [f"**Note:** {sentence}" for sentence in saved.get("noted", ())]
    page.write_text(text.replace(date, "\n\n".join((date, *notes)), 1), encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _write(path: Path, saved: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(saved, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Update all pages, or mark the named ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="names of pages to mark, such as fedloru-table1")
    marks = parser.add_mutually_exclusive_group()
    marks.add_argument("--change", help="what has changed, as in 'the default of tau is 10'")
    marks.add_argument("--note", help="a sentence that leaves the verdicts valid")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    if bool(args.pages) != bool(args.change or args.note):
        parser.error("pages are marked with --change or --note")
    for name in args.pages:
        mark(args.folder, name, args.change or args.note, "outdated" if args.change else "noted")
    for path in args.folder.glob("*.json"):
        write_notes(args.folder, path.stem)
    for preset in list_presets():
        complete(args.folder, preset)


if __name__ == "__main__":
    main()
