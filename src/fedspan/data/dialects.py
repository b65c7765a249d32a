"""Dialects of delimited files: delimiter, quoting and header, named by the user or detected from a sample.

A dialect is detected by parsing: with the right delimiter and quoting, all rows have the same number of fields. The
rows are parsed by Python's ``csv``. Its ``Sniffer`` is not used: it counts characters by line, also inside quoted
fields, and takes a comma in a text for structure.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

Quoting = Literal["double", "single", "none"]
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "pipes"}
_CHARACTERS: dict[Quoting, str] = {"double": '"', "single": "'"}
_ROWS = 1000
_LONGEST = 65536
"""Maximum length of a row in characters; beyond it the sample ends, because a quote is not closed."""
_EXCEL_LINE = re.compile(r"sep=(.)\r?\n")


@dataclass(frozen=True)
class Dialect:
    """The form of a delimited file."""

    delimiter: str
    """The character between fields."""
    quoting: Quoting
    """The character that encloses fields with delimiters or line ends in them."""
    header: bool
    """Whether the first row names the columns."""
    names: tuple[str, ...]
    skip: int = 0
    """Number of bytes in UTF-8 before the first row (Excel's line ``sep=;``, title rows)."""
    titles: tuple[str, ...] = ()
    """Title rows above the header, which are left out."""

    @property
    def quote(self) -> str | None:
        """The quote character; None without quoting."""
        return _CHARACTERS.get(self.quoting)


def detect_dialect(
    sample: str,
    *,
    tabs: bool,
    delimiter: str | None = None,
    quoting: Quoting | None = None,
    header: bool | None = None,
    names: Sequence[str] | None = None,
    requested: Collection[str] = (),
) -> Dialect:
    """Detect the options of a file's dialect that the user did not set.

    Args:
        sample: The beginning of the file, cut at a line's end.
        tabs: Whether the file's suffix implies tabs without quoting (``.tsv``) rather than commas.
        header: Whether the first row names the columns; None: detected.
        names: Names of the columns of a file without a header; None: names by position.
        requested: Names of columns that the user requested; a first row with one of them is a header.
    """
    excel_line = _EXCEL_LINE.match(sample)
    skip = 0
    if excel_line is not None and delimiter in (None, excel_line[1]):
        delimiter, skip = excel_line[1], len(excel_line[0].encode())
        sample = sample[excel_line.end() :]
    default = "\t" if tabs else ","
    candidates: list[tuple[str, Quoting]] = []
    for character in [delimiter] if delimiter else sorted(DELIMITERS, key=lambda separator: separator != default):
        for kind in _list_quotings(quoting, tabs and character == "\t"):
            candidates.append((character, kind))
    parsed = {candidate: _split_rows(sample, *candidate) for candidate in candidates}
    # The first of equally good ones.
    best = candidates[0]
    for candidate in candidates[1:]:
        if _measure_fit(parsed[candidate].rows) > _measure_fit(parsed[best].rows):
            best = candidate
    if quoting is None and best[1] != "single":  # quotes around fields without delimiters fit as well as none
        enclosing: list[Quoting] = ["double", "single"] if best[1] == "none" else ["single"]
        enclosed: list[Quoting] = [kind for kind in enclosing if _is_enclosed(parsed[best].rows, _CHARACTERS[kind])]
        if enclosed:
            best = (best[0], enclosed[0])
    rows = parsed[best].rows
    if names is not None:
        return Dialect(*best, False, tuple(names), skip)
    titles = count_title_rows(rows, requested) if header is None else 0
    if titles:
        skip += len(sample[: parsed[best].ends[titles - 1]].encode())
        names = tuple(rows[titles])
        return Dialect(*best, True, names, skip, tuple(row[0].strip() for row in rows[:titles]))
    first = tuple(rows[0]) if rows else ()
    header = has_header(rows, requested) if header is None else header
    return Dialect(*best, header, first if header else make_positional_names(len(first)), skip)


def _list_quotings(named: Quoting | None, plain: bool) -> list[Quoting]:
    """List the candidate quotings, the likelier first: tsv files often have literal quotes, csv files quote fields."""
    if named is not None:
        return [named]
    return ["none", "double", "single"] if plain else ["double", "none", "single"]


@dataclass(frozen=True)
class _ParsedRows:
    """The rows of a sample that are not blank, and the position in the sample after each of them."""

    rows: list[list[str]]
    ends: list[int]


def _split_rows(sample: str, delimiter: str, quoting: Quoting) -> _ParsedRows:
    quote = _CHARACTERS.get(quoting)
    style: dict[str, Any] = {"quotechar": quote} if quote else {"quoting": csv.QUOTE_NONE}
    # Not splitlines: texts may contain other line separators than the file's.
    lines = re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+$", sample)
    line_ends = [*accumulate(map(len, lines))]
    rows: list[list[str]] = []
    ends: list[int] = []
    reader = csv.reader(lines, delimiter=delimiter, **style)
    try:
        for row in reader:
            if row:
                rows.append(row)
                ends.append(line_ends[reader.line_num - 1])
            if len(rows) == _ROWS or sum(map(len, row)) > _LONGEST:
                break
    except csv.Error:  # a field beyond the limit of the csv module
        pass
    return _ParsedRows(rows, ends)


def _measure_fit(rows: Sequence[Sequence[str]]) -> tuple[float, int]:
    """Return the share of rows with the most frequent number of fields, at least two, and the number of rows."""
    counts = Counter(len(row) for row in rows)
    fields, frequency = max(counts.items(), key=lambda item: (item[1], item[0]), default=(0, 0))
    if fields < 2:
        return 0.0, 0
    # A quote that is never closed merges many rows into one, so the remaining rows agree trivially.
    return frequency / len(rows), min(1, len(rows) - 1)


def _is_enclosed(rows: Sequence[Sequence[str]], quote: str) -> bool:
    """Check whether quotes enclose all fields of a column (with its header or without)."""
    body = rows[1:]
    width = min((len(row) for row in body), default=0)
    columns = zip(*(row[:width] for row in body), strict=True)
    return any(all(_is_quoted(field, quote) for field in column) for column in columns)


def _is_quoted(field: str, quote: str) -> bool:
    return len(field) > 1 and field[0] == field[-1] == quote and quote not in field[1:-1].replace(2 * quote, "")


def describe_missing_header(names: Sequence[str]) -> str:
    """Return the note on a file whose first line is read as an example."""
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"the first line looks like an example: the columns are named {shown} (data.header: true if it names them)"


def count_title_rows(rows: Sequence[Sequence[str]], requested: Collection[str] = ()) -> int:
    """Count the rows above the header that hold a title in their first cell and nothing else; 0 if there is no header.

    Args:
        requested: Names of columns that the user requested; a row with one of them is no title.
    """
    count = 0
    while count < len(rows) and not any(map(str.strip, rows[count][1:])):
        count += 1
    titles, table = rows[:count], rows[count:]
    if not titles or len(table) < 2 or any(is_usual_name(row[0]) or row[0].strip() in requested for row in titles):
        return 0
    width = Counter(map(len, table)).most_common(1)[0][0]
    names = [name.strip() for name in table[0]]
    is_full = len(names) == width > 1 and all(names)
    return count if is_full and (set(names) & set(requested) or _weigh_names(names, table[1:]) > 0) else 0


def describe_titles(titles: Sequence[str]) -> str:
    """Return the note on title rows that are left out."""
    shown = ", ".join(map(repr, filter(None, titles)))
    return f"left out above the column names: {shown} (data.header: true if the first line names the columns)"


def make_positional_names(count: int) -> tuple[str, ...]:
    """Return the names of columns without a header: ``column_1`` and so on."""
    return tuple(f"column_{number}" for number in range(1, count + 1))


def has_header(rows: Sequence[Sequence[str]], requested: Collection[str] = ()) -> bool:
    """Decide whether the first row names the columns or is an example itself.

    A value of the first row that recurs in a column of few values, or a number in a column of numbers, is evidence of
    an example; a word above numbers, or one that such a column does not repeat, is evidence of a name. A common name
    (``text``, ``label``) that its column does not repeat decides. In case of a tie, a sentence indicates an example.
    """
    first, body = (rows[0], rows[1:]) if rows else ((), ())
    if not body or {name.strip() for name in first} & set(requested):
        return True
    if list(first) == [str(number) for number in range(len(first))]:  # the names that pandas assigns to unnamed columns
        return True
    evidence = _weigh_names(first, body)
    has_sentence = any(len(text) > 25 and len(text.split()) >= 5 for text in first)
    return evidence > 0 or (evidence == 0 and not has_sentence)


def _weigh_names(first: Sequence[str], body: Sequence[Sequence[str]]) -> int:
    """Return a positive number if a first row looks like names, a negative one if it looks like an example, else 0."""
    columns = [[row[index].strip() for row in body if index < len(row)] for index in range(len(first))]
    # A label column may be named as one of its values: spam, with the values spam and ham.
    if any(is_usual_name(name) and name.strip() not in column for name, column in zip(first, columns, strict=True)):
        return 1
    return sum(_vote(name.strip(), column) for name, column in zip(first, columns, strict=True))


def is_usual_name(name: str) -> bool:
    """Check whether a text is a usual name of a column, such as ``text`` or ``label``."""
    return name.strip().lower() in _COMMON_NAMES


_COMMON_NAMES = {
    *(
        "text",
        "label",
        "labels",
        "id",
        "sentence",
        "sentence1",
        "sentence2",
        "question",
        "answer",
        "prompt",
        "category",
    ),
    *("class", "target", "score", "rating", "title", "message", "review", "comment", "description", "intent"),
    *("email", "sms", "tweet", "post", "utterance", "content", "body", "subject", "query", "comment_text"),
    *("topic", "category", "sentiment", "image", "path", "file", "filename", "name", "date", "user"),
}


def _vote(name: str, values: Sequence[str]) -> int:
    """Return 1 if a first value looks like the name of a column's values, -1 if it looks like one of them, else 0."""
    present = [value for value in values if value]
    if not name or not present:
        return 0
    if sum(map(_is_number, present)) >= 0.9 * len(present):
        return -1 if _is_number(name) else 1
    counts = Counter(present)
    if len(counts) <= max(1, len(present) // 2):
        return -1 if name in counts else 1
    return 0


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", "."))
    except ValueError:
        return False
    return True
