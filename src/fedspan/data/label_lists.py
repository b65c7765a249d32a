"""Separators of several labels in one text."""

from __future__ import annotations

from collections.abc import Iterable

_SEPARATORS = ("|", ";", ",")
_COMBINED_SHARE = 0.2
"""Share of texts with a separator from which they are likely to hold several labels."""


def find_separator(texts: Iterable[str | None]) -> str | None:
    """Return the separator of labels in a column of texts: the first of ``|``, ``;`` and ``,`` that occurs in it.

    A column without any of them has at most one label in each row, and no separator.
    """
    present = {separator for text in texts if text for separator in _SEPARATORS if separator in text}
    return next((separator for separator in _SEPARATORS if separator in present), None)


def find_combined_labels(texts: Iterable[str | None]) -> str | None:
    """Return the separator of texts of which many combine the same few labels; None if they do not seem to.

    The separator occurs in a fifth of the texts or more, and there are fewer labels than combinations of them: three in
    ``a``, ``b``, ``a|b``, ``b|c``, but four in ``Bonn, west`` and ``Ulm, south``, which are two places.
    """
    present = [text for text in texts if text]
    separator = find_separator(present)
    if separator is None or sum(separator in text for text in present) < _COMBINED_SHARE * len(present):
        return None
    combinations = {*present}
    labels = {part.strip() for text in combinations for part in text.split(separator)} - {""}
    return separator if 2 <= len(labels) < len(combinations) else None
