"""Preferences among answers for the tiny language models: the better answer has the words that follow the prompt's."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import tiny, tiny_decoders

ROWS = [
    {"prompt": "Q: a1 b2 A:", "chosen": " b1 c2", "rejected": " a5"},
    {"prompt": "Q: c0 A:", "chosen": " d0", "rejected": " a1 a2 a3 d4"},
    {"prompt": "Q: d3 d4 d5 A:", "chosen": " a3 a4 a5", "rejected": " a3 a4"},
    {"prompt": "Q: b5 A:", "chosen": " c5", "rejected": " b5"},
    {"prompt": "Q: a0 a1 A:", "chosen": " b0 b1", "rejected": " d2 d2"},
]
"""A few pairs in TRL's format."""
USER, GOOD, BAD = (
    {"role": "user", "content": "a1"},
    {"role": "assistant", "content": "b1"},
    {"role": "assistant", "content": "c4 c5"},
)
"""Messages: a user's, and a better and a worse answer to it."""

_SITES = {"east": 21, "north": 28, "west": 37}
_AFTER = dict(zip("abcd", "bcda", strict=True))


def make_rows() -> list[dict[str, str]]:
    """Make pairs of answers to prompts of three sites; prompts and answers differ in length."""
    rng, rows = random.Random(9), list[dict[str, str]]()
    for site, size in _SITES.items():
        for _ in range(size):
            words = [f"{rng.choice('abcd')}{rng.randrange(6)}" for _ in range(rng.randint(1, 5))]
            right = " ".join(_AFTER[word[0]] + word[1] for word in words)
            wrong = " ".join(f"{rng.choice('abcd')}{rng.randrange(6)}" for _ in range(rng.randint(1, 4)))
            if wrong != right:
                rows.append({"prompt": f"Q: {' '.join(words)} A:", "chosen": right, "rejected": wrong, "site": site})
    return rows


def save_preferences(path: Path) -> Path:
    """Write the pairs."""
    path.write_text("".join(json.dumps(row) + "\n" for row in make_rows()), encoding="utf-8")
    return path


def settings(models: Path, own: Path, **changes: Mapping[str, Any]) -> dict[str, Any]:
    """A run of preference tuning as plain values; ``changes`` go into its sections."""
    values = tiny_decoders.settings(models) | {
        "task": "preference",
        "task_options": {"beta": 0.5},
        "data": {"train": str(save_preferences(own / "pairs.jsonl")), "test_fraction": 0.2},
        "evaluation": {"batch_size": 7},
    }
    return tiny.change_sections(values, changes)
