"""Measuring a trained model, on its run's held-out set or on a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import datasets
from pydantic import ValidationError

from fedspan.config.validation_errors import first_mistake
from fedspan.data.columns import TaskName
from fedspan.data.config import DataConfig
from fedspan.data.loading import load
from fedspan.errors import FedspanError
from fedspan.runs.load import adapter_folder, load_served
from fedspan.runs.notes import facts_of, read_notes
from fedspan.runs.results import is_run, read_config
from fedspan.runs.task_setup import PROBLEMS, Facts
from fedspan.tasks.metrics import shown

__all__ = ["evaluate"]


def evaluate(
    folder: str | Path,
    client: str | None = None,
    *,
    data: str | Path | None = None,
    text: str | None = None,
    image: str | None = None,
    label: str | None = None,
    text_pair: str | None = None,
    answer: str | None = None,
    generate: bool = True,
) -> dict[str, float]:
    """Measure a trained model.

    Args:
        folder: a run folder or an exported model.
        client: whose model, if every client has its own.
        data: a file of examples, or whatever ``data.train`` takes of images; left out, the held-out test set of the run
            in ``folder``.
        text: the file's column of texts; left out: ``text``.
        image: its column of images; left out: ``image``.
        label: its column of labels or numbers; left out: ``label``.
        text_pair: its column of second texts, for a model of pairs.
        answer: its column of answers, for a language model, whose prompt template names the others; left out:
            ``answer``.
        generate: let a language model answer, and count exact matches; the slow part.

    Returns:
        The task's metrics and the number of ``examples``.

    Raises:
        FedspanError: as `load_served`; no test set; or a file that does not fit the model.
    """
    served_from = adapter_folder(folder, client)  # cheap mistakes before slow loading
    if data is not None:
        facts = facts_of(served_from, read_notes(served_from))
        columns = {"text": text, "image": image, "label": label, "text_pair": text_pair, "answer": answer}
        rows = _labelled(_file_config(data, facts, columns), facts.task)
    else:
        rows = _held_out(folder, served_from)
    served = load_served(folder, client)
    examples = served.task.encode(rows)
    metrics = served.task.metrics(served.predictions(examples, thorough=generate), examples, range(len(examples)))
    return {**{name: metrics[name] for name in shown(metrics)}, "examples": float(len(examples))}


def _file_config(data: str | Path, facts: Facts, columns: Mapping[str, str | None]) -> DataConfig:
    named = {option: column for option, column in columns.items() if column is not None}
    if facts.task == "causal-lm":
        named = {**named, "prompt": facts.prompt or "{text}"}
        named.pop("label", None)
    try:
        return DataConfig(train=str(data), labels=list(facts.labels) or None, test_split=None, test_fraction=0, **named)  # pyright: ignore[reportArgumentType]
    except ValidationError as error:
        mistake = first_mistake(error)
        field = "data" if mistake.field in ("config", "train") else mistake.field
        raise FedspanError(field, str(data), mistake.expected) from None


def _held_out(folder: str | Path, adapter: Path) -> datasets.Dataset:
    if not is_run(folder):
        raise FedspanError("data", None, "a file to measure on: only a run folder knows a test set of its own")
    config = read_config(folder)
    loaded = load(config.data, seed=config.data_seed, task=config.task)
    if loaded.test is None:
        raise FedspanError("data", None, "a file to measure on: this run has no held-out test set")
    if PROBLEMS[config.task].classifies and list(loaded.labels) != read_notes(adapter)["labels"]:
        raise FedspanError("data.train", config.data.train, "the labels that the run was trained on; the file changed")
    return loaded.test


def _labelled(config: DataConfig, task: TaskName) -> datasets.Dataset:
    """The rows of a file; what is wrong with it is said of ``data``, ``text``, ``label``, not of a config."""
    try:
        return load(config, "data", task=task).train
    except FedspanError as error:
        field = error.field.removeprefix("data.")
        said = re.sub(r"data\.labels has (.*) \(data\.keep_only.*\)", r"the model knows \1", error.expected)
        raise FedspanError("data" if field == "train" else field, error.value, said) from None
