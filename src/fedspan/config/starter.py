"""A starter config for the user's own data, inferred from the file and completed by options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedspan.config import RunConfig, load_yaml, parse_config
from fedspan.config.column_inference import infer_data
from fedspan.config.starter_template import get_default_model, render_config, suggest_target_modules
from fedspan.config.validation_errors import convert_validation_errors
from fedspan.data.config import DataConfig, PartitionConfig
from fedspan.data.files import read_source
from fedspan.data.loading import LoadedData, load
from fedspan.data.names import read_names, read_required_names
from fedspan.data.partition import partition
from fedspan.data.source import Source
from fedspan.errors import FedspanError
from fedspan.files import convert_disk_errors, write_atomic
from fedspan.methods.registry import get_method_class
from fedspan.tasks.registry import TASKS, get_task

_VALIDATION = 0.1
"""Share of the examples for validation, within these bounds."""
_VALIDATION_BOUNDS = (50, 1000)
"""Numbers of examples of all clients: with fewer the losses are noisy, and more are not needed to compare rounds."""
_LARGEST_VALIDATION = 0.2
"""Largest share for validation where the examples are few."""
_CLIENTS = 10
"""Number of clients of a random partition, unless the user requests another one."""
_MIN_EXAMPLES = 3
"""Number of examples that a client has at least, unless the user requests more clients: enough for all parts."""
_SET_NOTE = "init takes options of data as --set data.FIELD=VALUE."
_SAMPLE_BYTES = 8 << 20
"""Number of bytes at the beginning of each file that are read."""


@dataclass(frozen=True)
class StarterConfig:
    """The config that was written, with what was found in the data."""

    path: Path
    """Path of the config."""
    config: RunConfig
    """The parsed config."""
    findings: tuple[str, ...]
    """Descriptions of the data, one line each."""


def write_starter_config(
    data: str | Path,
    out: str | Path = "fedspan.yaml",
    *,
    test: str | Path | None = None,
    task: str | None = None,
    text: str | None = None,
    label: str | None = None,
    answer: str | None = None,
    by: str | None = None,
    clients: int | None = None,
    model: str | None = None,
    method: str = "fedit",
    fast: bool = False,
    force: bool = False,
    options: Mapping[str, Any] | None = None,
) -> StarterConfig:
    """Write a commented config for a file, and validate it against the beginning of the file.

    Args:
        data: Any value that ``data.train`` accepts.
        test: Any value that ``data.test`` accepts; None: a part of `data` is held out as the test set.
        task: The learning task; None: inferred from the columns.
        text: The column of texts, prompts or images; None: inferred.
        label: The column of labels or numbers; None: inferred.
        answer: The column of answers; None: inferred.
        by: The column that assigns each row to a client; None: inferred, or else the rows are partitioned at random.
        clients: Number of clients if the rows are partitioned at random; None: 10, or fewer if the examples are few.
        model: Hub id or folder of the model; None: a small one for the task.
        fast: Adapt the last layers of a small model alone, several times faster and less accurate.
        options: Further fields of the section ``data``: ``{"delimiter": ";"}``.
    """
    path = Path(out)
    if path.exists() and not force:
        raise FedspanError("--out", str(path), problem=f"{str(path)!r} exists. --force replaces it")
    if task is not None and get_task(task, "--task").default_model is None and model is None:
        offered = [name for name, definition in TASKS.items() if definition.default_model is not None]
        raise FedspanError("--task", task, f"one of {', '.join(offered)}")
    if clients is not None and clients < 1:
        raise FedspanError("--clients", clients, "a number from 1")
    columns = {"text": text, "label": label, "answer": answer, "by": by}
    settings = _check_options(options or {})
    rows = _read_sample(str(data), "DATA", settings, columns)
    try:
        inferred = infer_data(rows, str(data), task, columns)
    except FedspanError as error:
        note = f"Detected in {rows.name}: {'; '.join(rows.notes)}. {_SET_NOTE}" if rows.notes else ""
        if len(rows.dataset.column_names) == 1:
            note = f"{rows.name} has a single column: --set data.delimiter names another separator of columns. {note}"
        raise error.relocate(note=note) from error
    section = {"train": str(data), **({} if test is None else {"test": str(test)}), **inferred.data, **settings}
    if test is not None and "header" not in settings and _is_header_refused(section):
        section.pop("header")  # only the test file has one, so it is detected for each file
    targets = suggest_target_modules(inferred.task, model)
    name = model or get_default_model(inferred.task)[0]

    def render(
        section: Mapping[str, Any],
        by: str | None,
        clients: int,
        shares: tuple[float, float] = (_VALIDATION, 0.1),
        has_test: bool = False,
    ) -> tuple[str, RunConfig]:
        selected = replace(inferred, by=by)
        content = render_config(selected, section, clients, name, targets, method, shares, has_test, fast)
        return content, parse_config(load_yaml(content))

    content, config = render(section, inferred.by, clients or _CLIENTS)
    try:
        loaded = load(
            config.data.model_copy(update={"invalid": settings.get("invalid", "skip")}),
            seed=config.data_seed,
            task=config.task_columns,
            limit=_SAMPLE_BYTES,
            client_column=by,
        )
    except FedspanError as error:
        raise error.relocate(note=f"{inferred.advice} {_describe_blanks(rows, by)}".strip()) from error
    if loaded.dropped:
        section["invalid"] = "skip"
    assigned_by, count, notes = _select_partition(loaded, config, is_requested=by is not None, clients=clients)
    content, config = render(section, assigned_by, count, _compute_shares(loaded, method), loaded.test is not None)
    findings = [*inferred.findings[:1], *notes, *inferred.findings[1:], *filter(None, [inferred.advice])]
    findings += _describe_counts(loaded, rows, str(data), test)
    if loaded.labels:
        names = ", ".join(loaded.labels[:6]) + (", ..." if len(loaded.labels) > 6 else "")
        scope = "" if loaded.is_complete else " in the rows that were read"
        findings.append(f"{len(loaded.labels)} labels{scope}: {names}")
    location = f"{rows.name}: "
    findings += [f"{location}{note}" for note in rows.notes if f"{location}{note}" not in loaded.notes]
    findings += loaded.notes
    with convert_disk_errors(path.parent, "choose another file", "--out"):
        write_atomic(path, content.encode())
    return StarterConfig(path, config, tuple(findings))


def _compute_shares(loaded: LoadedData, method: str) -> tuple[float, float]:
    """Return the shares of each client's examples for validation and for its own test.

    One model for all is tested on the common test set alone, so its clients train on their own test parts, too.
    """
    count, (least, most) = len(loaded.train), _VALIDATION_BOUNDS
    validation = _VALIDATION
    if loaded.is_complete:
        validation = round(min(max(least, min(_VALIDATION * count, most)) / count, _LARGEST_VALIDATION), 3)
    is_common = loaded.test is not None and not get_method_class(method).claims.personal
    return validation, 0.0 if is_common else 0.1


def _check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of the section ``data``, none of which has an option of its own."""
    own = {"train": "DATA", "test": "--test", **dict.fromkeys(("text", "image"), "--text")}
    for field, value in options.items():
        option = {**own, "label": "--label", "answer": "--answer"}.get(field)
        if option is not None:
            raise FedspanError(f"data.{field}", value, problem=f"{option} sets it")
    return dict(options)


def _read_sample(location: str, option: str, settings: Mapping[str, Any], columns: Mapping[str, str | None]) -> Source:
    values = {"train": location, "test_split": None, "invalid": "skip", **settings}
    with convert_validation_errors("data", DataConfig):
        config = DataConfig.model_validate(values)
    # A first row with a requested column is a header; the reader knows columns by their role.
    roles = {"by": "group"}
    requested = {roles.get(option, option): name for option, name in columns.items() if name is not None}
    try:
        return read_source(config.model_copy(update=requested), "train", "data", _SAMPLE_BYTES)
    except FedspanError as error:
        note = _SET_NOTE if "data." in (error.problem or "") else ""
        field = option if error.field == "data.train" else None
        raise error.relocate(field, note=note) from error


def _is_header_refused(section: Mapping[str, Any]) -> bool:
    """Check whether ``header: false`` of a section ``data`` is refused for its test file, which has a header."""
    try:
        read_source(DataConfig.model_validate(section), "test", "data", _SAMPLE_BYTES)
    except FedspanError as error:  # another error is reported when all examples are read
        return error.field == "data.header"
    return False


def _describe_blanks(rows: Source, column: str | None) -> str:
    """Return the sentence on rows that are left out because they belong to no client; empty if there are none."""
    if column is None or column not in rows.dataset.column_names:
        return ""
    blanks = sum(name is None for name in read_names(rows.dataset, column))
    return f"{blanks:,} of {len(rows.dataset):,} rows have no value in the column {column!r} (--by)." if blanks else ""


def _select_partition(
    loaded: LoadedData, config: RunConfig, *, is_requested: bool, clients: int | None
) -> tuple[str | None, int, list[str]]:
    """Select a partition that the examples allow, as far as they were read.

    Args:
        clients: Number of clients that the user requested; None: none.

    Returns:
        The column that assigns examples to clients, None for a random partition, the number of clients of the latter,
        and findings about them.
    """
    column, notes = config.partition.column, list[str]()
    count = clients or _CLIENTS
    if column is not None:
        try:
            if loaded.is_complete:
                partition(loaded.train, config.partition, config.data_seed, groups=loaded.groups)
            else:
                read_required_names(loaded.train, column, "--by")
        except FedspanError as error:
            if is_requested:
                raise
            reason = (error.problem or str(error)).partition(". ")[0].rstrip(".")
            field = f" ({error.field})" if error.field.startswith("partition.") else ""
            notes.append(f"the column {column} is not used for clients, unless --by requests it: {reason}{field}")
        else:
            return column, count, [f"clients: the column {column}"]
    if not loaded.is_complete:
        return None, count, notes
    units = len(loaded.train) if loaded.groups is None else len(set(loaded.groups.tolist()))
    possible = max(1, min(count, units // _MIN_EXAMPLES))
    if clients is None and possible < count:
        noun, each = ("client", "it") if possible == 1 else ("clients", "each")
        notes.append(f"{possible} {noun}, so that {each} has at least {_MIN_EXAMPLES} examples (--clients)")
        count = possible
    at_random = PartitionConfig(clients=count)
    try:
        partition(loaded.train, at_random, config.data_seed, groups=loaded.groups)
    except FedspanError as error:
        if clients is None:
            raise
        raise error.relocate("--clients", clients) from error
    return None, count, notes


def _describe_counts(loaded: LoadedData, rows: Source, location: str, test: str | Path | None) -> list[str]:
    """Describe the number of examples; for a file that was read in part, estimate it from the file's size."""
    held_out = "no test set"
    if test is not None:
        held_out = f"{len(loaded.test or ()):,} test examples"
    elif loaded.test is not None:
        held_out = f"{len(loaded.test):,} of them held out for testing"
    count = len(loaded.train) + (0 if test is not None else len(loaded.test or ()))
    if loaded.is_complete:
        return [f"{count:,} examples, {held_out}"]
    size = os.path.getsize(os.path.expanduser(location)) if os.path.isfile(os.path.expanduser(location)) else 0
    estimate = ""
    if size > _SAMPLE_BYTES and not location.endswith((".gz", ".parquet")):
        estimate = f"about {round(len(rows.dataset) * size / _SAMPLE_BYTES, -2):,.0f} examples, "
    return [f"{estimate}of which the first {len(rows.dataset):,} were read; a run reads and validates all of them"]
