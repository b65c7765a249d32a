"""The one class of errors that a user can correct: sentences that name the field, the problem and what is expected."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from difflib import get_close_matches


class FedspanError(Exception):
    """A mistake that the user can correct.

    The message reads ``"`data.label`: no column named 'lable'. The columns are text, label. Did you mean 'label'?"``.
    The command line prints it on one line and exits with code 2; Python callers catch this one class.

    Args:
        field: The place of the wrong value, as the user wrote it (``method.name``, ``data.train``).
        value: The wrong value; None if none was given.
        expected: What would be right, as a noun phrase that can follow "Expected". Empty if ``problem`` is complete.
        problem: The problem, as one or more sentences that can follow ``field:``. None: that no value is given, or
            that this one is not accepted.

    Examples:
        >>> try:
        ...     fedspan.load_config("config.yaml", ["method.name=fedot"])
        ... except fedspan.FedspanError as error:
        ...     print(error.field, error.value, error)
    """

    def __init__(self, field: str, value: object, expected: str = "", *, problem: str | None = None) -> None:
        self.field = field
        self.value = value
        self.expected = expected
        self.problem = problem
        sentences = [_build_default_problem(value) if problem is None else problem]
        if expected:
            sentences.append(f"Expected {expected}")
        line = " ".join(f"`{field}`: {' '.join(_end_sentence(sentence) for sentence in sentences)}".split())
        super().__init__(escape_controls(line))  # fields and values may be another machine's

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (type(self), self.field, self.value, self.expected, self.problem)

    def relocate(self, field: str | None = None, value: object = None, note: str = "") -> FedspanError:
        """Return the same error at another place.

        Args:
            field: The new field; None: this error's.
            value: The new value; None: this error's.
            note: Sentences that are appended to the message: to `expected`, or to the problem if that is empty.
        """
        value = self.value if value is None else value
        problem, expected = self.problem, self.expected
        if note and expected:
            expected = f"{_end_sentence(expected)} {note}"
        elif note:
            problem = f"{_end_sentence(_build_default_problem(value) if problem is None else problem)} {note}"
        return FedspanError(self.field if field is None else field, value, expected, problem=problem)


def _restore(kind: type[FedspanError], field: str, value: object, expected: str, problem: str | None) -> FedspanError:
    """Create an error of a class whose own arguments may be others."""
    error = kind.__new__(kind)
    FedspanError.__init__(error, field, value, expected, problem=problem)
    return error


def _build_default_problem(value: object) -> str:
    if value is None:
        return "no value is given"
    shown = _represent(value)
    if len(shown) > 200:
        shown = shown[:197] + "..."
    return f"{shown} is not accepted"


def _end_sentence(sentence: str) -> str:
    """Return the sentence with a full stop, unless it ends in a mark of its own."""
    sentence = sentence.rstrip()
    return sentence if sentence.endswith((".", "?", "!")) else f"{sentence}."


def _represent(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, lists inside lists without end
        return f"<{type(value).__name__}>"


def escape_controls(text: str) -> str:
    """Escape a text from another machine, so that a terminal shows it and executes nothing in it.

    Control, format and unassigned characters (Unicode category C: escape sequences, line breaks, changes of direction)
    become backslash escapes.
    """
    return "".join(
        char if unicodedata.category(char)[0] != "C" else char.encode("unicode_escape").decode() for char in text
    )


def require_printable(name: str) -> str:
    """Return a name, if a terminal shows every character of it.

    Raises:
        ValueError: If it has a control, format or unassigned character, in which two names could differ invisibly.
    """
    escaped = escape_controls(name)
    if escaped != name:
        raise ValueError(f"a name without invisible characters, not {escaped}")
    return name


def build_install_command(extra: str | None = None) -> str:
    """Return the command that installs missing packages beside the installed fedspan.

    pip accepts the installed fedspan as this requirement, be it from a checkout, a wheel or an index, and installs only
    what it lacks. ``--upgrade`` would look for another fedspan on the index.

    Args:
        extra: The extra that needs the packages; None: fedspan itself needs them.
    """
    return "pip install fedspan" if extra is None else f"pip install 'fedspan[{extra}]'"


def find_similar(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """Return the known names that are closest to a misspelt one, the closest first; empty if none is close.

    A known name that consists of the initials counts as close (``lr`` for ``learning_rate``), and so does one that
    begins with the name (``fedsa-lora`` for ``fedsa``).
    """
    candidates = sorted(set(candidates))
    initials = "".join(word[0] for word in re.findall(r"[a-z]+", name.lower()))
    close = [candidate for candidate in candidates if candidate == initials != name]
    longer = [candidate for candidate in candidates if len(name) > 2 and candidate.startswith(name)]
    return list(dict.fromkeys([*close, *longer, *get_close_matches(name, candidates, n=count, cutoff=0.4)]))[:count]


def suggest_nearest(name: str, candidates: Iterable[str], count: int = 3) -> str:
    """Return a sentence that suggests the known names closest to a misspelt one, for an error's ``problem``.

    Where none is close, the sentence lists the first known names; it is empty if none is known.
    """
    candidates = sorted(set(candidates))
    if close := [repr(candidate) for candidate in find_similar(name, candidates, count)]:
        return f"Did you mean {' or '.join([', '.join(close[:-1]), close[-1]] if close[1:] else close)}?"
    if not candidates:
        return ""
    more = ", ..." if len(candidates) > 2 * count else ""
    return f"Possible values: {', '.join(map(repr, candidates[: 2 * count]))}{more or '.'}"
