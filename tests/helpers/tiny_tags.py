"""A corpus of tagged sentences over the tiny models' vocabulary: words of a label are entities of its type."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import tiny

_SITES = {"east": 17, "north": 26, "west": 41}


def save_sentences(path: Path) -> Path:
    """Write sentences of three sites as records with lists of words and of tags."""

    def draw(rng: random.Random) -> dict[str, Any]:
        tokens, tags = list[str](), list[str]()
        for _ in range(rng.randint(1, 4)):
            if rng.random() < 0.5:
                kind, count = rng.choice(tiny.LABELS[:2]), rng.randint(1, 2)
                tokens += [f"{kind}{rng.randrange(8)}" for _ in range(count)]
                tags += [f"B-{kind}", *[f"I-{kind}"] * (count - 1)]
            else:
                tokens.append(f"word{rng.randrange(12)}")
                tags.append("O")
        return {"tokens": tokens, "tags": tags}

    return tiny.save_rows(path, _SITES, 4, draw)


def settings(models: Path, own: Path, **changes: Mapping[str, Any]) -> dict[str, Any]:
    """A run of token classification as plain values; ``changes`` go into its sections."""
    values = tiny.settings(models) | {
        "task": "token-classification",
        "data": {"train": str(save_sentences(own / "sentences.jsonl")), "test_fraction": 0.2},
    }
    return tiny.change_sections(values, changes)
