"""Separators of several labels in one text."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["find_separator"]

_SEPARATORS = ("|", ";", ",")


def find_separator(texts: Iterable[str | None]) -> str | None:
    """Return the separator of labels in a column of texts: the first of ``|``, ``;`` and ``,`` that occurs in it.

    A column without any of them has at most one label in each row, and no separator.
    """
    present = {separator for text in texts if text for separator in _SEPARATORS if separator in text}
    return next((separator for separator in _SEPARATORS if separator in present), None)
