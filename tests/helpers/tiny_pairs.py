"""Pairs, triplets and scored pairs of texts over the tiny models' vocabulary: texts of one label are similar."""

import csv
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import tiny

_SITES = {"east": 13, "north": 22, "west": 35}


def _make_text(rng: random.Random, label: str) -> str:
    words = [f"{label}{rng.randrange(8)}" for _ in range(rng.randint(1, 3))]
    words += [f"word{rng.randrange(12)}" for _ in range(rng.randint(1, 4))]
    rng.shuffle(words)
    return " ".join(words)


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def save_pairs(path: Path) -> Path:
    """Write triplets of three sites: an anchor, a positive of its label, and a negative of another label.

    Some positives belong to two anchors.
    """
    rng, rows = random.Random(7), list[dict[str, Any]]()
    for site, size in _SITES.items():
        for number in range(size):
            label, other = rng.sample(tiny.LABELS, 2)
            positive = rows[-1]["found"] if number % 5 == 4 else _make_text(rng, label)
            rows.append(
                {"query": _make_text(rng, label), "found": positive, "wrong": _make_text(rng, other), "site": site}
            )
    return _write(path, rows)


def save_scored_pairs(path: Path) -> Path:
    """Write pairs of three sites with scores from 0 to 5, more for texts of one label."""
    rng, rows = random.Random(8), list[dict[str, Any]]()
    for site, size in _SITES.items():
        for _ in range(size):
            first, second = rng.choice(tiny.LABELS), rng.choice(tiny.LABELS)
            score = round((3 if first == second else 0) + 2 * rng.random(), 2)
            rows.append({"a": _make_text(rng, first), "b": _make_text(rng, second), "score": score, "site": site})
    return _write(path, rows)


def settings(models: Path, own: Path, *, scored: bool = False, **changes: Mapping[str, Any]) -> dict[str, Any]:
    """A run of text embedding on triplets, or on scored pairs, as plain values; ``changes`` go into its sections."""
    if scored:
        path = save_scored_pairs(own / "scored.csv")
        data: dict[str, Any] = {"train": str(path), "text": "a", "text_pair": "b", "label": "score"}
    else:
        path = save_pairs(own / "pairs.csv")
        data = {"train": str(path), "text": "query", "text_pair": "found", "roles": {"negative": "wrong"}}
    values = tiny.settings(models) | {"task": "text-embedding", "data": {**data, "test_fraction": 0.2}}
    del values["model"]["head_init"]
    return tiny.change_sections(values, changes)
