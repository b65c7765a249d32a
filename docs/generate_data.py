"""Write docs/data.md from the catalogue of data sets: ``python docs/generate_data.py``."""

from __future__ import annotations

from pathlib import Path

from fedspan.cli.data import facts
from fedspan.data.catalogue import DatasetEntry, list_datasets, snippet

PAGE = Path(__file__).parent / "data.md"
INTRO = """# Data sets

fedspan knows these data sets by name; their texts come from the Hugging Face hub or from your own copies of the files,
not with fedspan. `data.dataset` takes the columns, the splits, the prompt and, unless the config says else, the task,
`evaluation.metric`, `evaluation.answer_pattern` and `evaluation.max_new_tokens` from here. This page is written by
`python docs/generate_data.py` from `src/fedspan/data/catalogue.yaml`; `fedspan data` shows the same.

From the hub:

```yaml
data:
  dataset: sst2
```

From local files, the original ones or copies of the hub's (csv, tsv, json, jsonl or parquet); fedspan looks which
columns they have:

```yaml
data:
  dataset: sst2
  train: SST-2/train.tsv
  test: SST-2/dev.tsv
```

What stands in the config wins over the catalogue: `data.text`, `data.label`, `data.test_split` and so on. A data set
for another task than the config's is refused.

A licence is the one that the publisher states. other: the hub's card says just that, and the source tells more.
unknown: no statement was found. Read the source before you use a data set.
"""


def table(entries: tuple[DatasetEntry, ...]) -> str:
    """All data sets, a line each."""
    lines = ["| key | what | task | metric | rows | licence | hub |", "|---|---|---|---|---|---|---|"]
    for entry in entries:
        rows = f"{entry.rows.train}" + ("" if entry.rows.test is None else f" + {entry.rows.test}")
        hub = "local files only" if entry.hub is None else f"`{entry.hub.id}`"
        link = f"[`{entry.key}`](#{entry.key.lower()})"
        lines.append(f"| {link} | {entry.summary} | {entry.task} | {entry.metric} | {rows} | {entry.licence} | {hub} |")
    return "\n".join(lines) + "\n"


def section(entry: DatasetEntry) -> str:
    """All about one."""
    lines = [f"## {entry.key}", "", f"{entry.title}: {entry.summary}.", ""]
    if entry.note is not None:
        lines += [entry.note, ""]
    for name, value in facts(entry):
        shown = value if name in ("source", "rows", "licence", "splits", "incomplete rows") else f"`{value}`"
        lines.append(f"- {name}: {shown}")
    for where, title in (("hub", "From the hub"), ("files", "From local files")):
        config = snippet(entry, where)
        if config is not None:
            builtin = entry.hub is not None and entry.hub.id.startswith("builtin:")
            lines += ["", f"{'As it comes' if builtin else title}:", "", "```yaml", config, "```"]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    entries = list_datasets()
    return "\n".join([INTRO, table(entries), *(section(entry) for entry in entries)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
