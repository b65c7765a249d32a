"""Comparison of generated and true answers."""

from __future__ import annotations

import re


def is_exact_match(prediction: str, reference: str, pattern: str | None = None) -> bool:
    """Check whether two answers are equal: as numbers if both are (1,000 is 1000.0), else as texts without whitespace.

    Args:
        prediction: The generated answer.
        reference: The true answer.
        pattern: Regex of the part that is compared: the first group of its first match, or the whole match without
            groups; None: the whole texts. Answers without a match are not equal.
    """
    left, right = (_extract(text, pattern) for text in (prediction, reference))
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
