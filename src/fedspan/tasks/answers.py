"""Comparison of answers."""

from __future__ import annotations

import re

__all__ = ["same_answer"]


def same_answer(made: str, wanted: str, pattern: str | None = None) -> bool:
    """Check whether two answers agree: as numbers if both are (1,000 is 1000.0), else as texts, ignoring whitespace."""
    left, right = (_counted(text, pattern) for text in (made, wanted))
    if left is None or right is None:
        return False
    try:
        return float(left.replace(",", "")) == float(right.replace(",", ""))
    except ValueError:
        return left.split() == right.split()


def _counted(text: str, pattern: str | None) -> str | None:
    if pattern is None:
        return text
    found = re.search(pattern, text)
    return None if found is None else found[1 if found.re.groups else 0]
