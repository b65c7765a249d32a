"""Inputs of ``fedspan predict``: texts of a shell, lines of a file or rows of a table, and predictions beside them."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from fedspan.assembly.task import parse_task_settings, read_notes
from fedspan.data.columns import LABELED_TEXTS, ColumnReader
from fedspan.data.config import DataConfig
from fedspan.data.encodings import decode
from fedspan.data.files import SUFFIXES, read_source
from fedspan.data.images import resolve_paths
from fedspan.data.names import get_arrow_column, get_arrow_table
from fedspan.data.source import Source, read_beginning
from fedspan.data.templates import parse_template
from fedspan.data.usable_rows import unwrap_lists
from fedspan.errors import FedspanError
from fedspan.files import convert_disk_errors, neutralize_formula, write_atomic
from fedspan.serving.evaluate import build_file_config
from fedspan.serving.load import find_adapter_folder
from fedspan.tasks.registry import get_task
from fedspan.tasks.settings import TaskSettings

_LINES = (".txt", ".txt.gz")
"""Ends of the names of files with one text a line, unless the user names their columns."""
_TABLES = (".csv", ".tsv", ".jsonl")
"""Ends of the names of files that predictions are written to."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a model.

    Args:
        values: What ``fedspan.predict`` takes.
        rows: Columns of each input in its table; of a text or a line, the text itself.
    """

    values: list[Any]
    rows: list[dict[str, Any]]


def read_inputs(
    folder: Path,
    client: str | None,
    texts: Sequence[str],
    file: Path | None,
    text: str | None = None,
    text_pair: str | None = None,
) -> Inputs:
    """Collect the inputs of a model.

    Args:
        client: The client whose model is used, if every client has its own.
        texts: Texts, paths of images, or pairs of texts that are separated by a tab.
        file: File with more of them, one a line, or a table in any format that ``data.train`` accepts; ``-``: standard
            input.
        text: The table's column of texts or images; None: that of the training data.
        text_pair: The table's column of second texts; None: that of the training data, if the model takes pairs.
    """
    if str(file) == "-" and (text is not None or text_pair is not None):
        raise FedspanError(
            "--file", "-", "a table, whose columns have names", problem="standard input is read as lines"
        )
    has_lines = file is not None and not _is_table(file, text or text_pair)
    lines = [*texts, *(_read_lines(file) if has_lines and file is not None else ())]
    adapter = find_adapter_folder(folder, client)
    task_settings = parse_task_settings(adapter, read_notes(adapter))
    table = Inputs([], [])
    if file is not None and not has_lines:
        requested = {"text": text, "text_pair": text_pair}
        table = _read_table(file, task_settings, {name: column for name, column in requested.items() if column})
    values = [_split_pair(line, task_settings) for line in lines]
    return Inputs([*values, *table.values], [*({"text": line} for line in lines), *table.rows])


def _is_table(file: Path, column: str | None) -> bool:
    name = file.name.lower()
    return column is not None or (name.endswith(SUFFIXES) and not name.endswith(_LINES)) or os.path.isdir(file)


def _read_lines(file: Path) -> list[str]:
    try:
        content = sys.stdin.buffer.read() if str(file) == "-" else read_beginning(file, None)[0]
        # str.splitlines also breaks lines at characters within a text, such as U+2028.
        lines = [line for line in re.split(r"\r\n|\r|\n", decode(content)[0]) if line.strip()]
    except (OSError, ValueError) as error:
        raise FedspanError("--file", str(file), f"a readable text file ({error})") from None
    if not lines:
        raise FedspanError("--file", str(file), problem="the file is empty", expected="a file with one text a line")
    return lines


def _split_pair(line: str, task_settings: TaskSettings) -> str | tuple[str, str]:
    """Split a line at its tab, unless the model was trained on single texts."""
    first, tab, second = line.partition("\t")
    columns = task_settings.columns
    return (first, second) if tab and ("text_pair" in columns or "text" not in columns) else line


def _read_table(file: Path, task_settings: TaskSettings, requested: Mapping[str, str]) -> Inputs:
    definition = get_task(task_settings.task)
    column = "image" if definition.has_image_inputs else "text"
    columns = dict(task_settings.columns) | {column if name == "text" else name: requested[name] for name in requested}
    if "text" in requested:
        columns.pop("messages", None)
    config = build_file_config(file, task_settings, columns)
    try:
        source = unwrap_lists(read_source(config, "train", "data"), config, definition.columns or LABELED_TEXTS, "data")
        values = _select_values(source, config, task_settings, requested)
    except FedspanError as error:
        name = error.field.removeprefix("data.").replace("_", "-")
        field = "--file" if name in ("data", "train") else "--text" if name == "image" else f"--{name}"
        raise error.relocate(field) from None
    return Inputs(values, [_name_image(row) for row in get_arrow_table(source.dataset).to_pylist()])


def _select_values(
    source: Source, config: DataConfig, task_settings: TaskSettings, requested: Mapping[str, str]
) -> list[Any]:
    definition = get_task(task_settings.task)
    reader = ColumnReader(source, "data", "train", skips=True)
    if definition.has_image_inputs:
        return _read_paths(source, config.image, reader)
    if config.messages is not None:
        problem = "this model was trained on conversations, and a table holds one text a row"
        raise FedspanError("data.text", None, "the column of the users' messages", problem=problem)
    column = requested.get("text") or (definition.columns or LABELED_TEXTS).get_example_column(config)
    if task_settings.prompt is not None and "text" not in requested:
        required = parse_template(task_settings.prompt, "data.prompt").required
        if len(required) != 1:  # fedspan.predict renders prompts of one column itself
            return reader.read_prompts(task_settings.prompt).to_pylist()
        column = required[0]
    if definition.columns is not None and "tokens" in definition.columns.roles and _is_list(source, column):
        return reader.read_text_lists(column, "text").to_pylist()
    texts = reader.read_texts(column, "text").to_pylist()
    can_be_single = definition.is_embedding and "text_pair" not in requested
    if config.text_pair is None or (can_be_single and config.text_pair not in source.dataset.column_names):
        return texts
    return [*zip(texts, reader.read_texts(config.text_pair, "text_pair").to_pylist(), strict=True)]


def _is_list(source: Source, column: str) -> bool:
    return column in source.dataset.column_names and pa.types.is_nested(get_arrow_column(source.dataset, column).type)


def _read_paths(source: Source, column: str, reader: ColumnReader) -> list[str]:
    """Return the paths of the images in a column; those in a table are relative to it."""
    reader.require(column, "image")
    images = get_arrow_column(source.dataset, column)
    rows = (images if pa.types.is_struct(images.type) else resolve_paths(source, column)).to_pylist()
    paths = [None if row is None else row.get("path") for row in rows]
    missing = next((number for number, path in enumerate(paths) if path is None or not os.path.isfile(path)), None)
    if missing is not None:
        problem = f"{source.row(missing)} names no image file in column {column!r}"
        raise FedspanError("data.train", source.name, problem=problem)
    return [str(path) for path in paths]


def _name_image(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the path of an image in its place."""
    return {
        name: value.get("path") if isinstance(value, dict) and set(value) == {"bytes", "path"} else value
        for name, value in row.items()
    }


def require_new_table(path: Path) -> None:
    """Check that predictions can be written to a file."""
    if not path.name.lower().endswith(_TABLES):
        raise FedspanError("--out", str(path), f"a file that ends in {', '.join(_TABLES)}")
    if path.exists():
        raise FedspanError("--out", str(path), "a file that does not exist yet")
    if not path.parent.is_dir():
        raise FedspanError("--out", str(path), "a file in a folder that exists")


def write_predictions(
    path: Path, rows: Sequence[Mapping[str, Any]], predictions: Sequence[Mapping[str, Any]], cells: Sequence[Any]
) -> None:
    """Write a table of inputs with their predictions.

    Args:
        path: A file that ``require_new_table`` accepts.
        predictions: Columns of each prediction; one that an input has already is called ``predicted_...``.
        cells: The same as texts, for csv and tsv, in which texts that a spreadsheet would run begin with an apostrophe.
    """
    is_json, taken = path.name.lower().endswith(".jsonl"), {name for row in rows for name in row}
    full: list[dict[str, Any]] = []
    for row, prediction, texts in zip(rows, predictions, cells, strict=True):
        names = [_name_column(name, taken) for name in prediction]
        full.append({**row, **dict(zip(names, prediction.values() if is_json else texts, strict=True))})
    if is_json:
        content = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in full)
    else:
        buffer = io.StringIO()
        writer = csv.writer(buffer, delimiter="," if path.name.lower().endswith(".csv") else "\t")
        header = [*dict.fromkeys(name for row in full for name in row)]
        writer.writerow([neutralize_formula(name) for name in header])
        writer.writerows([[_format(row.get(name)) for name in header] for row in full])
        content = buffer.getvalue()
    with convert_disk_errors(path.parent, "choose another file", "--out"):
        write_atomic(path, content.encode())


def _name_column(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name = f"predicted_{name}"
    return name


def _format(value: Any) -> str:
    if value is None:
        return ""
    text = json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else str(value)
    return neutralize_formula(text)
