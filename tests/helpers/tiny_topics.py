"""A corpus of texts with any number of labels over the tiny models' vocabulary: the labels are those of its words."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import tiny

LABELS = tiny.LABELS[:3]
_SITES = {"east": 17, "north": 26, "west": 41}


def save_topics(path: Path) -> Path:
    """Write texts of three sites as records with a list of none to three labels."""

    def draw(rng: random.Random) -> dict[str, Any]:
        labels = rng.sample(LABELS, rng.choice([0, 1, 1, 2, 2, 3]))
        words = [f"{label}{rng.randrange(8)}" for label in labels for _ in range(rng.randint(1, 2))]
        words += [f"word{rng.randrange(12)}" for _ in range(rng.randint(1, 3))]
        rng.shuffle(words)
        return {"text": " ".join(words), "labels": labels}

    return tiny.save_rows(path, _SITES, 6, draw)


def settings(models: Path, own: Path, **changes: Mapping[str, Any]) -> dict[str, Any]:
    """A run of multi-label classification as plain values; ``changes`` go into its sections."""
    values = tiny.settings(models) | {
        "task": "multi-label-classification",
        "data": {"train": str(save_topics(own / "topics.jsonl")), "test_fraction": 0.2},
    }
    return tiny.change_sections(values, changes)
