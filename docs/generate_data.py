"""Write docs/data.md from the catalogue of data sets: ``python docs/generate_data.py``."""

from __future__ import annotations

from pathlib import Path

from fedspan.cli.data import list_properties
from fedspan.data.catalogue import DatasetEntry, list_datasets, render_snippet

PAGE = Path(__file__).parent / "data.md"
INTRO = """# Data sets

This page lists the data sets that `data.dataset` can name. fedspan downloads them from the Hugging Face hub or reads
your copies of the files. Two small ones, `banking-queries` and `patient-messages`, come with it.

From the hub:

```yaml
data:
  dataset: sst2
```

From local files (csv, tsv, json, jsonl or parquet), the publisher's or copies of the hub's; fedspan detects which
columns they have:

```yaml
data:
  dataset: sst2
  train: SST-2/train.tsv
  test: SST-2/dev.tsv
```

The name sets the columns, the splits, the prompt, the task, `evaluation.metric`, `evaluation.answer_pattern` and
`evaluation.max_new_tokens`. Fields in the config (`data.text`, `data.label`, `data.test_split`, ...) override it. A
data set for another task than the config's is refused.

Licenses are as stated by the publisher: *other* means that the hub's card names no standard license, *unknown* that no
statement was found. Read the source before you use a data set. `fedspan data` prints the same entries.
`python docs/generate_data.py` writes this page from `src/fedspan/data/catalogue.yaml`.
"""


def format_table(entries: tuple[DatasetEntry, ...]) -> str:
    """All data sets, one row each."""
    lines = ["| key | content | task | metric | rows | license | hub |", "|---|---|---|---|---|---|---|"]
    for entry in entries:
        rows = f"{entry.rows.train}" + ("" if entry.rows.test is None else f" + {entry.rows.test}")
        hub = "local files only" if entry.hub is None else f"`{entry.hub.id}`"
        link = f"[`{entry.key}`](#{entry.key.lower()})"
        lines.append(f"| {link} | {entry.summary} | {entry.task} | {entry.metric} | {rows} | {entry.license} | {hub} |")
    return "\n".join(lines) + "\n"


def format_section(entry: DatasetEntry) -> str:
    """The section of one data set."""
    lines = [f"## {entry.key}", "", f"{entry.title}: {entry.summary}.", ""]
    if entry.note is not None:
        lines += [entry.note, ""]
    for name, value in list_properties(entry):
        shown = value if name in ("source", "rows", "license", "splits", "incomplete rows") else f"`{value}`"
        lines.append(f"- {name}: {shown}")
    for where, title in (("hub", "From the hub"), ("files", "From local files")):
        config = render_snippet(entry, where)
        if config is not None:
            builtin = entry.hub is not None and entry.hub.id.startswith("builtin:")
            lines += ["", f"{'Built in' if builtin else title}:", "", "```yaml", config, "```"]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page."""
    entries = list_datasets()
    return "\n".join([INTRO, format_table(entries), *(format_section(entry) for entry in entries)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
