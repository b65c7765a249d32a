"""Comparison of answers."""

from __future__ import annotations

import re

__all__ = ["answers_agree"]


def answers_agree(prediction: str, truth: str, pattern: str | None = None) -> bool:
    """Check whether two answers agree: as numbers if both are (1,000 is 1000.0), else as texts, ignoring whitespace."""
    left, right = (_extract(text, pattern) for text in (prediction, truth))
    if left is None or right is None:
        return False
    try:
        return float(left.replace(",", "")) == float(right.replace(",", ""))
    except ValueError:
        return left.split() == right.split()


def _extract(text: str, pattern: str | None) -> str | None:
    if pattern is None:
        return text
    match = re.search(pattern, text)
    return None if match is None else match[1 if match.re.groups else 0]
