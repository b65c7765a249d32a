"""Columns of texts as numbers, with decimal points or decimal commas."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_SPACES = "[ \u00a0\u202f\u2009']"
_DECIMAL_COMMA = re.compile(rf"[+-]?(\d+|\d{{1,3}}(\.\d{{3}})+|\d{{1,3}}({_SPACES}\d{{3}})+)(,\d+)?")
_COMMA_BETWEEN_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?")
_WITH_DECIMAL_ZERO = re.compile(r"[+-]?\d+\.0")
_SEPARATORS = re.compile(rf"\.|{_SPACES}")


def parse_numbers(texts: Sequence[str | None]) -> list[float | None]:
    """Parse a column of numbers; None for a value that is missing, not finite or no number.

    A column has decimal commas if a value shows it (``3,5``, ``0,125``; not ``3,500``) and none has commas between
    thousands (``1,000,000``, ``3,500.0``). Points, spaces and apostrophes between thousands are then accepted, too.
    """
    with_commas = [text for text in texts if text is not None and "," in text]
    has_decimal_commas = any(_DECIMAL_COMMA.fullmatch(text) and not is_ambiguous(text) for text in with_commas)
    has_thousands = any(_COMMA_BETWEEN_THOUSANDS.fullmatch(text) and not is_ambiguous(text) for text in with_commas)
    return [_parse(text, has_decimal_commas and not has_thousands) for text in texts]


def drop_decimal_zero(text: str) -> str:
    """Return a whole number without ``.0``, which a column gets from one blank cell, and any other text as it is."""
    return text.removesuffix(".0") if _WITH_DECIMAL_ZERO.fullmatch(text) else text


def is_ambiguous(text: str) -> bool:
    """Check whether the comma of a number may be a decimal comma, or one between thousands."""
    return bool(_DECIMAL_COMMA.fullmatch(text)) and bool(_COMMA_BETWEEN_THOUSANDS.fullmatch(text))


def _parse(text: str | None, has_decimal_commas: bool) -> float | None:
    if text is None:
        return None
    if has_decimal_commas:
        if not _DECIMAL_COMMA.fullmatch(text):  # such as a decimal point beside decimal commas
            return None
        text = _SEPARATORS.sub("", text).replace(",", ".")
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
