"""A preset with some values changed."""

from __future__ import annotations

from typing import Any


def changed(**changes: Any) -> dict[str, Any]:
    """Values of a small preset, with these in place of its own."""
    values = {
        "id": "x",
        "paper": "p",
        "item": "Table 1",
        "title": "t",
        "config": {},
        "axes": {"task": {"one": {}}},
        "methods": {"LoRA": {"key": "fedit"}},
        "seeds": [0],
        "claims": [{"statement": "s", "better": "LoRA", "worse": ["LoRA"]}],
        "small": {},
        "notes": ["n"],
    }
    return {**values, **changes}
