"""Files of rows as tests write them, and the config that reads them."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedspan.data import DataConfig

ROWS = [{"text": f"text {row}", "label": "ab"[row % 2]} for row in range(10)]
CSV = "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in ROWS)


def config_for(path: Path | str, **options: object) -> DataConfig:
    """The config of a file of training examples."""
    return DataConfig.model_validate({"train": str(path), **options})


def written(folder: Path, name: str, content: str | bytes) -> Path:
    """Write a file with this content."""
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_table(path: Path, columns: Mapping[str, Sequence[object]], **style: Any) -> Path:
    """Write a csv file with these columns."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file, **style)
        rows.writerow(columns)
        rows.writerows(zip(*columns.values(), strict=True))
    return path
