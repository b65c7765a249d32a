"""A first config for the user's own data, derived from the file and from the user's options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import datasets
import yaml

from fedspan.config import RunConfig, parse_config
from fedspan.config.rates import training_defaults
from fedspan.data.columns import TaskName
from fedspan.data.config import DataConfig
from fedspan.data.files import read_source
from fedspan.data.loading import load
from fedspan.data.names import columns_by_likeness, names_of
from fedspan.data.path_patterns import has_places, places_of
from fedspan.errors import FedspanError
from fedspan.files import disk_errors, write_atomic

__all__ = ["Start", "start"]

_TASKS = ("sequence-classification", "regression", "causal-lm", "image-classification")
_LABELS = ("label", "labels", "intent", "category", "class", "sentiment", "target", "topic", "diagnosis")
_ANSWERS = ("output", "answer", "response", "completion", "target")
_PROMPTS = ("instruction", "question", "prompt", "query", "input")
_PAIRS = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question", "sentence"), ("question", "context"))
_PLACES = (
    *("client", "site", "hospital", "clinic", "bank", "branch", "user", "user_id", "client_id", "speaker", "author"),
    *("domain", "source", "center", "centre", "institution", "region", "department"),
)
_MODELS: Mapping[TaskName, tuple[str, str]] = {
    "sequence-classification": ("builtin:all-minilm-l6-v2", "[query, value]"),
    "regression": ("builtin:all-minilm-l6-v2", "[query, value]"),
    "causal-lm": ("Qwen/Qwen2.5-0.5B", "all-linear"),
    "image-classification": ("google/vit-base-patch16-224-in21k", "[q_proj, v_proj]"),
}
_TARGETS: Mapping[str, str] = {
    "mobilenet_v2": r"'.*layer\.1[3-5]\.(expand|reduce)_1x1\.convolution|.*\.conv_1x1\.convolution'",
}
"""Target modules by ``model_type``, for architectures for which PEFT has no default."""
_MOST_LABELS = 500
_SAMPLE = 2000
"""Number of rows that are examined."""


@dataclass(frozen=True)
class Start:
    """The config that was written, and the reasons for its values.

    Args:
        path: Path of the config.
        config: The parsed config.
        found: Descriptions of what the file holds.
    """

    path: Path
    config: RunConfig
    found: tuple[str, ...]


def start(
    data: str | Path,
    out: str | Path = "fedspan.yaml",
    *,
    task: str | None = None,
    text: str | None = None,
    label: str | None = None,
    answer: str | None = None,
    by: str | None = None,
    clients: int = 10,
    model: str | None = None,
    method: str = "fedit",
    force: bool = False,
) -> Start:
    """Write a commented config for a file, check it, and read the data once with it.

    Args:
        data: Any value that ``data.train`` accepts.
        out: The config's file.
        task: The learning task; None: guessed from the columns.
        text: The column of texts (of prompts); None: guessed.
        label: The column of labels or numbers; None: guessed.
        answer: The column of answers; None: guessed.
        by: The column that assigns each row to a client; None: guessed, or the rows are partitioned.
        clients: Number of clients if the rows are partitioned.
        model: Hub id or folder of the model; None: a small one for the task.
        method: The method's registry key.
        force: Replace an existing file.

    Raises:
        FedspanError: If the data can't be read, columns are missing or can't be guessed, or the config's file exists.
    """
    path = Path(out)
    if path.exists() and not force:
        raise FedspanError("--out", str(path), "a name that is not taken, or --force")
    if task is not None and task not in _TASKS:
        raise FedspanError("--task", task, f"one of {', '.join(_TASKS)}")
    given = {"text": text, "label": label, "answer": answer, "by": by}
    facts = _looked_at(str(data), cast("TaskName | None", task), given)
    section = {"train": str(data), **facts.data}
    content = _written(facts, section, clients, model, method)
    config = parse_config(yaml.safe_load(content))
    loaded = load(config.data, seed=config.data_seed, task=config.task)
    held_out = "no test set" if loaded.test is None else f"{len(loaded.test):,} of them set aside to test on"
    found = [*facts.found, f"{len(loaded.train) + len(loaded.test or ()):,} examples, {held_out}"]
    if loaded.labels:
        shown = ", ".join(loaded.labels[:6]) + (", ..." if len(loaded.labels) > 6 else "")
        found.append(f"{len(loaded.labels)} labels: {shown}")
    with disk_errors(path.parent, "choose another file"):
        write_atomic(path, content.encode())
    return Start(path, config, tuple(found))


@dataclass(frozen=True)
class _Facts:
    """The facts found in a file: the task, the fields of ``data``, the column of clients, and a description."""

    task: TaskName
    data: Mapping[str, Any]
    by: str | None
    found: tuple[str, ...]


def _looked_at(where: str, task: TaskName | None, given: Mapping[str, str | None]) -> _Facts:
    if task == "image-classification" or (task is None and _of_images(where)):
        return _Facts("image-classification", {}, given["by"], ("images, by their folders or labels",))
    rows = read_source(DataConfig(train=where, test_split=None), "train", "DATA").dataset
    for option, column in given.items():
        if column is not None and column not in rows.column_names:
            expected = f"a column of the file: {columns_by_likeness(column, rows.column_names)}"
            raise FedspanError(f"--{option}", column, expected)
    head = rows.select(range(min(len(rows), _SAMPLE)))
    found = _first(head, _PLACES, lambda name: 2 <= len(set(names_of(head, name))) < len(head) / 2)
    by = given["by"] or (places_of(where)[0] if has_places(where) else found)
    told = () if by is None else (f"clients: the column {by}",)
    if task in (None, "causal-lm") and (facts := _language(head, task, given)) is not None:
        return _Facts("causal-lm", facts, by, (f"prompts and answers: {', '.join(map(str, facts.values()))}", *told))
    return _labelled(head, task, given, by, told)


def _of_images(where: str) -> bool:
    path = Path(where)
    return path.is_dir() or path.name.removesuffix(".gz").endswith("ubyte")


def _first(head: datasets.Dataset, names: Sequence[str], fits: Any = lambda name: True) -> str | None:
    known = {column.lower(): column for column in head.column_names}
    return next((known[name] for name in names if name in known and fits(known[name])), None)


def _language(head: datasets.Dataset, task: TaskName | None, given: Mapping[str, str | None]) -> dict[str, Any] | None:
    """Find the fields of a language model's data; None if the file holds none."""
    if "messages" in head.column_names and given["answer"] is None:
        return {"messages": "messages", "chat": True}
    answer = given["answer"] or (
        None if given["label"] else _first(head, _ANSWERS, lambda name: _length(head, name) > 0)
    )
    if answer is None:
        if task is None:
            return None
        raise FedspanError("--answer", None, f"the column of answers: {', '.join(head.column_names)}")
    prompt = given["text"] or _first(head, [name for name in _PROMPTS if name != answer])
    if prompt is None:
        if task is None:
            return None
        raise FedspanError("--text", None, f"the column of prompts: {', '.join(head.column_names)}")
    if {"instruction", "input"} <= set(head.column_names) and given["text"] is None:
        return {"prompt": "alpaca", "answer": answer}
    return {"prompt": f"{{{prompt}}}\n", "answer": answer}


def _labelled(
    head: datasets.Dataset,
    task: TaskName | None,
    given: Mapping[str, str | None],
    by: str | None,
    told: tuple[str, ...],
) -> _Facts:
    label = given["label"] or _first(head, [name for name in _LABELS if name != by])
    rest = [name for name in head.column_names if name not in (label, by)]
    if label is None:
        few = {name: len(set(names_of(head, name))) for name in rest if _length(head, name) or _numbers(head, name)}
        fitting = {name: count for name, count in few.items() if 2 <= count <= min(_MOST_LABELS, len(head) / 3)}
        label = min(fitting, key=lambda name: fitting[name]) if fitting else None
    if label is None:
        raise FedspanError("--label", None, f"the column of labels: {', '.join(head.column_names)}")
    rest = [name for name in rest if name != label]
    pair = next((each for each in _PAIRS if set(each) <= set(rest)), None) if given["text"] is None else None
    texts = {name: length for name in rest if (length := _length(head, name))}
    text = given["text"] or (pair[0] if pair else max(texts, key=lambda name: texts[name], default=None))
    if text is None:
        raise FedspanError("--text", None, f"the column of texts: {', '.join(head.column_names)}")
    if task is None:
        values = len(set(names_of(head, label)))
        task = "regression" if _numbers(head, label) == "float" and values > 20 else "sequence-classification"
    fields = {"text": text, **({"text_pair": pair[1]} if pair else {}), "label": label}
    return _Facts(task, fields, by, (f"{task}: text {text!r}, label {label!r}", *told))


def _length(head: datasets.Dataset, column: str) -> float:
    """Compute the mean number of characters; 0 for a column that is not text."""
    if str(getattr(head.features[column], "dtype", "")) not in ("string", "large_string"):
        return 0.0
    values = [value for value in head[column] if isinstance(value, str)]
    return sum(map(len, values)) / max(1, len(values))


def _numbers(head: datasets.Dataset, column: str) -> Literal["int", "float"] | None:
    kind = str(getattr(head.features[column], "dtype", ""))
    if kind in ("string", "large_string"):  # a csv file stores numbers as text
        try:
            values = [float(value) for value in head[column] if value is not None]
        except ValueError:
            return None
        return "int" if all(value.is_integer() for value in values) else "float"
    return "float" if kind.startswith("float") else "int" if kind.startswith(("int", "uint", "bool")) else None


def _written(facts: _Facts, section: Mapping[str, Any], clients: int, model: str | None, method: str) -> str:
    """Render the config's text."""
    name, targets = _MODELS[facts.task] if model is None else (model, _TARGETS.get(_model_type(model)))
    defaults, small = training_defaults(facts.task, method), name == "builtin:all-minilm-l6-v2"
    data = yaml.safe_dump(dict(section), sort_keys=False, allow_unicode=True).rstrip().replace("\n", "\n  ")
    divided = f"partitioner: iid # or dirichlet with alpha: 0.5, for clients that differ\n  clients: {clients}"
    if facts.by is not None:
        divided = f"partitioner: natural # a client for each value of a column\n  column: {_scalar(facts.by)}"
    lines = (
        "# Written by fedspan init; every field is explained in docs/config.md. Next:",
        "#   fedspan partition FILE      who holds what",
        "#   fedspan plan FILE           what it takes",
        "#   fedspan run FILE --out runs/first",
        f"task: {facts.task}",
        "seed: 0",
        "",
        "model:",
        f"  name: {_scalar(name)} # a hub id or a folder",
        *((f"  target_modules: {targets} # where the adapters go",) if targets else ()),
        *(
            ("  layers_to_transform: [4, 5] # the last of six: faster, as the others' output is cached",)
            if small
            else ()
        ),
        "",
        "data:",
        f"  {data}",
        "",
        "partition:",
        f"  {divided}",
        "  validation: 0.1 # of every client's examples, to choose the best round and settings by",
        "  test: 0.1 # of every client's examples, to see who is left behind",
        "",
        f"method: # fedspan methods lists them\n  name: {_scalar(method)}",
        "  r: 8",
        "  lora_alpha: 16",
        "",
        "federation:",
        f"  rounds: {defaults.rounds} # at most",
        f"  early_stopping: {defaults.early_stopping} # rounds without a better validation score",
        "",
        "training:",
        f"  lr: {defaults.lr:.1e} # or auto: a range test before the first round",
        f"  batch_size: {defaults.batch_size}",
        f"  local_epochs: {defaults.local_epochs}",
        *(
            (f"  logit_adjustment: {defaults.logit_adjustment:g} # clients differ in their classes",)
            if defaults.logit_adjustment
            else ()
        ),
    )
    return "\n".join(lines) + "\n"


def _model_type(model: str) -> str:
    """Return the ``model_type`` in the config.json of a model's folder; empty for a hub id, or if there is none."""
    try:
        found = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(found.get("model_type", "")) if isinstance(found, dict) else ""


def _scalar(value: str) -> str:
    return yaml.safe_dump(value, default_flow_style=True, allow_unicode=True).removesuffix("\n...\n").strip()
