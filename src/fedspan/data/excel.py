"""Excel files as tables, with the extra ``fedspan[excel]``."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from fedspan.data.config import DataConfig
from fedspan.data.dialects import (
    count_title_rows,
    describe_missing_header,
    describe_titles,
    has_header,
    make_positional_names,
)
from fedspan.data.json_files import make_table
from fedspan.data.source import ReadTable
from fedspan.errors import FedspanError, build_install_command, suggest_nearest

SUFFIXES = (".xlsx", ".xlsm", ".xlsb", ".xls", ".ods")


def read_excel(path: Path, user_path: str, config: DataConfig, field: str, option: str) -> ReadTable:
    """Read a sheet of a workbook.

    Raises:
        FedspanError: If the extra is not installed or there is no such sheet.
        ValueError: If the file is not a workbook, or a row has more fields than the header.
    """
    try:
        import python_calamine
    except ImportError:
        command = build_install_command("excel")
        problem = f"{user_path} is an Excel file. To read it, run {command}, or save the sheet as a .csv file"
        raise FedspanError(option, user_path, problem=problem) from None
    try:
        with python_calamine.CalamineWorkbook.from_path(str(path)) as book:
            names: Sequence[str] = book.sheet_names
            if not names:
                raise ValueError("the workbook has no sheet")
            if config.sheet is not None and config.sheet not in names:
                problem = f"{user_path} has no sheet {config.sheet!r}. {suggest_nearest(config.sheet, names)}"
                raise FedspanError(f"{field}.sheet", config.sheet, problem=problem)
            sheet = config.sheet or names[0]
            rows = [[_convert_cell(value) for value in row] for row in book.get_sheet_by_name(sheet).to_python()]
    except python_calamine.CalamineError as error:
        raise ValueError(str(error)) from None
    notes: tuple[str, ...] = ()
    if config.sheet is None and len(names) > 1:
        notes = (f"sheet {sheet!r} of {', '.join(names)} (data.sheet)",)
    rows = [row for row in rows if any(value is not None for value in row)]
    return _build_table(rows, config, notes)


def _build_table(rows: list[list[Any]], config: DataConfig, notes: tuple[str, ...]) -> ReadTable:
    if not rows:
        return ReadTable(pa.table({}), notes=notes)
    texts = [["" if value is None else str(value) for value in row] for row in rows[:1000]]
    header, requested = config.header, {config.text, config.label or "label"}
    titles = count_title_rows(texts, requested) if header is None and config.columns is None else 0
    if titles:
        notes = (*notes, describe_titles([row[0].strip() for row in texts[:titles]]))
        rows, texts = rows[titles:], texts[titles:]
    if header is None:
        header = config.columns is None and has_header(texts, requested)
        if config.columns is None and not header:
            notes = (*notes, describe_missing_header(make_positional_names(len(rows[0]))))
    by_position = make_positional_names(len(rows[0]))
    if config.columns is not None:
        if len(config.columns) != len(rows[0]):
            raise ValueError(f"expected {len(config.columns)} columns, got {len(rows[0])}")
        names = list(config.columns)
    elif header:
        names = [name.strip() or default for name, default in zip(texts[0], by_position, strict=True)]
    else:
        names = list(by_position)
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the column {duplicate!r} occurs twice")
    body = rows[1:] if header else rows
    return ReadTable(make_table(dict(zip(names, row, strict=True)) for row in body), header + titles, notes)


def _convert_cell(value: Any) -> Any:
    """Convert a cell: whole numbers to int, dates to text, an empty cell to None."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta):
        return value.isoformat() if not isinstance(value, datetime.timedelta) else str(value)
    return None if value == "" else value
