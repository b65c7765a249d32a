"""Write docs/data.md from the catalogue of data sets: ``python docs/generate_data.py``."""

from __future__ import annotations

from pathlib import Path

from fedspan.data.catalogue import DatasetEntry, list_datasets

PAGE = Path(__file__).parent / "data.md"
INTRO = """# Data sets by name

These are the data sets that `data.dataset` can name. fedspan downloads them from the Hugging Face hub, or reads your
copies of the files. Two small ones, `review-sentences` and `patient-messages`, come with it. [Your own
files](files.md) need no name.

```yaml
data:
  dataset: sst2
  train: SST-2/train.tsv   # your copy (csv, tsv, json, jsonl or parquet); without train and test: from the hub
  test: SST-2/dev.tsv
```

The name sets the task, the columns, the splits, the prompt, and the metric with its `answer_pattern` and
`max_new_tokens`. Fields in your config override it. `fedspan data KEY` prints all of this for one data set, with the
names of the publisher's files.

Licenses are as stated by the publisher: *other* means that the hub's card names no standard license, *unknown* that no
statement was found. Read the source, to which each key links, before you use a data set.
`python docs/generate_data.py` writes this page.
"""


def format_row(entry: DatasetEntry) -> str:
    """The row of a data set."""
    rows = f"{entry.rows.train}" + ("" if entry.rows.test is None else f" + {entry.rows.test}")
    hub = "local files only" if entry.hub is None else f"`{entry.hub.id}`"
    key = f"[`{entry.key}`]({entry.source})" if entry.source.startswith("http") else f"`{entry.key}`"
    return f"| {key} | {entry.summary} | {entry.task} | {entry.metric} | {rows} | {entry.license} | {hub} |"


def page() -> str:
    """The page."""
    head = ["| key | content | task | metric | rows | license | hub |", "|---|---|---|---|---|---|---|"]
    return "\n".join([INTRO, *head, *map(format_row, list_datasets())]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
