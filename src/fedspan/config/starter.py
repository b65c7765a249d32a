"""A starter config for the user's own data, inferred from the file and completed by options."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import yaml

from fedspan.config import RunConfig, parse_config
from fedspan.config.column_inference import infer_data
from fedspan.config.starter_template import get_default_model, render_config, suggest_target_modules
from fedspan.data.config import DataConfig
from fedspan.data.files import read_source
from fedspan.data.loading import LoadedData, load
from fedspan.data.source import Source
from fedspan.errors import FedspanError
from fedspan.files import convert_disk_errors, write_atomic
from fedspan.tasks.registry import TASKS, get_task

__all__ = ["StarterConfig", "write_starter_config"]

_SMALL_DATASET = 5000
"""Number of examples below which a tenth of them is too small for validation, because the losses are noisy."""
_SAMPLE_BYTES = 8 << 20
"""Number of bytes at the beginning of each file that are read."""


@dataclass(frozen=True)
class StarterConfig:
    """The config that was written, with what was found in the data.

    Args:
        path: Path of the config.
        config: The parsed config.
        findings: Descriptions of the data, one line each.
    """

    path: Path
    config: RunConfig
    findings: tuple[str, ...]


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
    clients: int = 10,
    model: str | None = None,
    method: str = "fedit",
    force: bool = False,
) -> StarterConfig:
    """Write a commented config for a file, and validate it against the beginning of the file.

    Args:
        data: Any value that ``data.train`` accepts.
        out: The config's file.
        test: Any value that ``data.test`` accepts; None: a part of `data` is held out as the test set.
        task: The learning task; None: inferred from the columns.
        text: The column of texts, prompts or images; None: inferred.
        label: The column of labels or numbers; None: inferred.
        answer: The column of answers; None: inferred.
        by: The column that assigns each row to a client; None: inferred, or else the rows are partitioned at random.
        clients: Number of clients if the rows are partitioned.
        model: Hub id or folder of the model; None: a small one for the task.
        method: The method's registry key.
        force: Whether an existing file is replaced.

    Raises:
        FedspanError: If the data can't be read, columns are missing or can't be inferred, or the config's file exists.
    """
    path = Path(out)
    if path.exists() and not force:
        raise FedspanError("--out", str(path), "a file that does not exist yet, or --force")
    if task is not None and get_task(task, "--task").default_model is None and model is None:
        offered = [name for name, definition in TASKS.items() if definition.default_model is not None]
        raise FedspanError("--task", task, f"one of {', '.join(offered)}")
    options = {"text": text, "label": label, "answer": answer, "by": by}
    rows = _read_sample(str(data), "DATA")
    inferred = infer_data(rows, str(data), task, options)
    section = {"train": str(data), **({} if test is None else {"test": str(test)}), **inferred.data}
    targets = suggest_target_modules(inferred.task, model)
    name = model or get_default_model(inferred.task)[0]
    is_small = rows.is_complete and len(rows.dataset) < _SMALL_DATASET
    content = render_config(inferred, section, clients, name, targets, method, is_small=is_small)
    config = parse_config(yaml.safe_load(content))
    validated_data = config.data.model_copy(update={"invalid": "skip"})
    loaded = load(validated_data, seed=config.data_seed, task=config.task_columns, limit=_SAMPLE_BYTES)
    if loaded.dropped:
        content = render_config(
            inferred, {**section, "invalid": "skip"}, clients, name, targets, method, is_small=is_small
        )
        config = parse_config(yaml.safe_load(content))
    findings = [*inferred.findings, *_describe_counts(loaded, rows, str(data), test)]
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


def _read_sample(location: str, option: str) -> Source:
    config = DataConfig(train=location, test_split=None, invalid="skip")
    try:
        return read_source(config, "train", "data", _SAMPLE_BYTES)
    except FedspanError as error:
        if error.field != "data.train":
            raise
        if error.__cause__ is None:  # of a file without a single valid row, the first error says what is wrong
            try:
                read_source(config.model_copy(update={"invalid": "error"}), "train", "data", _SAMPLE_BYTES)
            except FedspanError as first:
                raise first.relocate(option) from first
        raise error.relocate(option) from error


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
