"""Files of data, and the config that is written for them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fedspan.config import RunConfig
from fedspan.config.starter import write_starter_config
from fedspan.errors import FedspanError
from fedspan.runs.setup import prepare


def refused(field: str, words: str, path: Path, **options: Any) -> None:
    """Check that no config can be written for a file, and why."""
    with pytest.raises(FedspanError) as caught:
        config_of(path, **options)
    assert caught.value.field == field
    assert words in str(caught.value)


TEXTS = [f"a longer text number {number} about something" for number in range(60)]


def table(path: Path, columns: Mapping[str, Sequence[object]], **style: Any) -> Path:
    """Write a table with these columns as CSV."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file, **style)
        rows.writerow(columns)
        rows.writerows(zip(*columns.values(), strict=True))
    return path


def config_of(path: Path, **options: Any) -> tuple[RunConfig, str]:
    """The config that is written for a file, and what was found in it."""
    starter = write_starter_config(path, path.parent / "c.yaml", force=True, **options)
    return starter.config, "\n".join(starter.findings)


def sizes(config: RunConfig) -> dict[str, tuple[int, int, int]]:
    """Return the numbers of examples in the parts of each client that a run of the config has."""
    prepared = prepare(config).partition
    assert prepared is not None
    return {part.id: (len(part.train), len(part.validation), len(part.test)) for part in prepared.clients}


def pictures(folder: Path) -> Path:
    """Write twelve images of two kinds, and the table that names them."""
    folder.mkdir()
    for number in range(12):
        Image.new("RGB", (32, 32), (20 * number, 0, 0)).save(folder / f"{number}.png")
    names = [f"{number}.png" for number in range(12)]
    return table(folder / "train.csv", {"id": range(12), "file": names, "kind": ["cat", "dog"] * 6})
