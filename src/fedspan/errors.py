"""The one error that a user's mistake turns into: a line that names the field, the value and what would be right."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["FedspanError", "nearest"]


class FedspanError(Exception):
    """Something that the user can put right.

    The command line prints it on one line and exits with code 2; Python callers catch this one class.

    Args:
        field: where the wrong value stands, as the user wrote it (``method.name``, ``data.train``).
        value: the wrong value.
        expected: what would be right, as a clause that can follow a semicolon.
    """

    def __init__(self, field: str, value: object, expected: str) -> None:
        self.field = field
        self.value = value
        self.expected = expected
        shown = _shown(value)
        if len(shown) > 200:
            shown = shown[:197] + "..."
        line = " ".join(f"{field}: {shown}; {expected}".split())
        # File names and JSON may hold half a character, which no terminal can print.
        super().__init__(line.encode(errors="backslashreplace").decode())


def _shown(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, lists inside lists without end
        return f"<{type(value).__name__}>"


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """The known names closest to a misspelt one (the first few if none is close), for an error's ``expected``.

    A known name that holds just the initials counts as close (``lr`` for ``learning_rate``), and one that begins with
    the name, as far as that says something: ``fedsa-lora`` for ``fedsa``.
    """
    known = sorted(set(known))
    initials = "".join(word[0] for word in re.findall(r"[a-z]+", name.lower()))
    close = [candidate for candidate in known if candidate == initials != name]
    longer = [candidate for candidate in known if len(name) > 2 and candidate.startswith(name)]
    close = list(dict.fromkeys([*close, *longer, *get_close_matches(name, known, n=count, cutoff=0.4)]))[:count]
    if not close:
        close = known[: 2 * count]
    return ", ".join(close)
