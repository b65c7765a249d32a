"""Evaluation of a trained model, on the held-out set of its run or on a file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from fedspan.assembly.model import ModelObjects
from fedspan.assembly.run import require_named_data
from fedspan.assembly.task import parse_task_settings, read_notes
from fedspan.config.reading import override
from fedspan.config.validation_errors import convert_validation_error
from fedspan.data.columns import LABELED_TEXTS
from fedspan.data.config import DataConfig
from fedspan.data.files import IN_MEMORY
from fedspan.data.loading import load
from fedspan.data.objects import read_objects
from fedspan.data.source import Source
from fedspan.errors import FedspanError
from fedspan.run_folder import RunFolder
from fedspan.runs.integrity import read_resolved_config, require_intact
from fedspan.runs.report import is_run
from fedspan.serving.load import find_adapter_folder, load_served
from fedspan.tasks.metrics import order_metrics
from fedspan.tasks.registry import get_task
from fedspan.tasks.settings import TaskSettings

if TYPE_CHECKING:
    import datasets


def evaluate(
    folder: str | Path,
    client: str | None = None,
    *,
    data: Any = None,
    text: str | None = None,
    image: str | None = None,
    label: str | None = None,
    text_pair: str | None = None,
    answer: str | None = None,
    roles: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    generate: bool = True,
    run_data: Any = None,
    model: Any = None,
    tokenizer: Any = None,
) -> dict[str, float]:
    """Evaluate a trained model.

    Args:
        folder: A run folder or an exported model.
        client: The client whose model is evaluated, if every client has its own.
        data: A file of examples, any source of images that ``data.train`` accepts, or examples in memory, as in
            ``fedspan.run`` (of a ``DatasetDict``, its test split); default: the held-out test set of the run in
            ``folder``.
        text: The file's column of texts; default: that of the training data, or ``text`` after a deployment.
        image: The file's column of images; default: the same, or ``image``.
        label: The file's column of labels or numbers; default: the same, or ``label``.
        text_pair: The file's column of second texts, for a model of text pairs; default: the same.
        answer: The file's column of answers, for a language model, whose prompt template names the other columns;
            default: the same, or ``answer``.
        roles: The file's columns by role, for a task whose data have further roles (``data.roles``); default: the
            same, or columns with the names of the roles.
        overrides: Further options of the file's columns, each ``data.field=value``: ``data.label_columns=[a, b]``.
        generate: Whether answers are generated and scored, for tasks whose answers are texts; the slow part.
        run_data: The data that the run began with, if they were passed from Python; its held-out test set is used.
        model: The model that the run began with, if it was passed from Python; None: loaded by its ``name_or_path``.
        tokenizer: Tokenizer or image processor of ``model``; None: the one of the model's name.

    Returns:
        The task's metrics, the number of ``examples`` and, if ``data.invalid=skip`` left any out, of ``skipped`` rows.

    Examples:
        >>> fedspan.evaluate("runs/first", data="new.csv", label="intent")["accuracy"]
        0.93

    Raises:
        FedspanError: If `load_served` raises it, a file of the run is not what it wrote, there is no test set, the
            data do not fit the model, or an option describes data that are not given.
    """
    columns = {"text": text, "image": image, "label": label, "text_pair": text_pair, "answer": answer}
    if data is None:
        described = {**columns, "roles": roles or None, "overrides": [*overrides] or None}
        for name, value in described.items():
            if value is not None:
                problem = "it describes the columns of `data`, and no data are given"
                raise FedspanError(name, str(value), "data with this column", problem=problem)
    elif run_data is not None:
        raise FedspanError("run_data", None, problem="`data` are given, too, and only one test set is measured")
    if is_run(folder):
        require_intact(RunFolder(folder))  # the config names the test set and its columns
    served_from = find_adapter_folder(folder, client)  # cheap mistakes before slow loading
    task_settings = parse_task_settings(served_from, read_notes(served_from))
    require_packages = get_task(task_settings.task).require_packages
    if generate and require_packages is not None:
        require_packages()
    if data is not None:
        sources = {} if isinstance(data, str | Path) else read_objects(data, 0).sources
        source = sources.get("test", sources.get("train"))
        rows, skipped = _load_labeled(
            build_file_config(
                IN_MEMORY if source else data, task_settings, _change_columns(task_settings, columns, roles, overrides)
            ),
            task_settings.task,
            source,
        )
    else:
        rows, skipped = _load_held_out_examples(folder, served_from, run_data), 0
    served = load_served(folder, client, objects=ModelObjects(model, tokenizer))
    examples = served.task.encode(rows)
    metrics = served.task.compute_metrics(
        served.compute_predictions(examples, generate=generate), examples, range(len(examples))
    )
    counts = {"examples": float(len(examples)), **({"skipped": float(skipped)} if skipped else {})}
    return {**{name: metrics[name] for name in order_metrics(metrics)}, **counts}


def _change_columns(
    task_settings: TaskSettings,
    columns: Mapping[str, str | None],
    roles: Mapping[str, str] | None,
    overrides: Sequence[str],
) -> dict[str, Any]:
    """Return the options that describe a file's columns: those of the training data, with the user's changes."""
    changes = override({}, overrides)
    invalid = next((name for name, value in changes.items() if name != "data" or not isinstance(value, dict)), None)
    if invalid is not None:
        raise FedspanError("--set", invalid, "fields of the section data, such as data.label=intent")
    requested: dict[str, Any] = {option: column for option, column in columns.items() if column is not None}
    requested |= changes.get("data", {})
    stored = dict(task_settings.columns)
    forms = (
        ("label", "label_columns"),
        ("label_columns", "label"),
        ("label_columns", "label_separator"),
        ("prompt", "messages"),
        ("answer", "messages"),
    )
    for option_name, alternative in forms:
        if option_name in requested:  # the other form of the same
            stored.pop(alternative, None)
    return {**stored, **requested, "roles": {**stored.get("roles", {}), **requested.get("roles", {}), **(roles or {})}}


def build_file_config(data: str | Path, task_settings: TaskSettings, columns: Mapping[str, Any]) -> DataConfig:
    """Return the section ``data`` that reads a file for a trained model."""
    options, definition = dict(columns), get_task(task_settings.task)
    if definition.is_generative:
        options.pop("label", None)
        options |= {"chat": task_settings.chat, "system": task_settings.system}
        finds_prompts = definition.columns is not None and "prompt" in definition.columns.roles
        if "messages" not in options and (task_settings.prompt is not None or not finds_prompts):
            options.setdefault("prompt", task_settings.prompt or "{text}")
    try:
        return DataConfig(
            train=str(data), labels=list(task_settings.labels) or None, test_split=None, test_fraction=0, **options
        )  # pyright: ignore[reportArgumentType]
    except ValidationError as error:
        mistake = convert_validation_error(error)
        field = "data" if mistake.field in ("config", "train") else mistake.field
        raise mistake.relocate(field, str(data)) from None


def _load_held_out_examples(folder: str | Path, adapter: Path, data: Any) -> datasets.Dataset:
    if not is_run(folder):
        raise FedspanError(
            "data", None, "a file to measure on", problem="no data are given, and only a run folder names a test set"
        )
    config = read_resolved_config(folder)
    if data is None:
        require_named_data(config, "fedspan.evaluate", "run_data")
    sources = None if data is None else read_objects(data, config.partition.clients).sources
    loaded = config.load_examples(sources)
    if loaded.test is None:
        raise FedspanError(
            "data", None, "a file to measure on", problem="no data are given, and this run has no held-out test set"
        )
    if config.task_definition.has_labels and list(loaded.labels) != read_notes(adapter)["labels"]:
        raise FedspanError(
            "data.train",
            config.data.train,
            problem="the labels are not those that the run was trained on, because the file changed",
        )
    return loaded.test


def _load_labeled(config: DataConfig, task: str, source: Source | None) -> tuple[datasets.Dataset, int]:
    """Load rows of a file or from memory, and count those left out; errors name ``data``, ``text`` or ``label``."""
    columns = get_task(task).columns or LABELED_TEXTS
    try:
        loaded = load(config, "data", task=columns, sources=source and {"train": source})
        return loaded.train, loaded.dropped
    except FedspanError as error:
        field = error.field.removeprefix("data.")
        problem = error.problem and error.problem.replace("data.labels", "the model's labels")
        problem = problem and re.sub(r" (To leave such rows out|If the first line).*", "", problem)
        name = "data" if field == "train" else field
        raise FedspanError(name, error.value, error.expected, problem=problem) from None
