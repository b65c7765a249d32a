"""A first config for the user's own data, derived from the file and from the user's options."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Literal, cast

import datasets
import pyarrow as pa
import yaml

from fedspan.config import RunConfig, parse_config
from fedspan.config.rates import get_training_defaults
from fedspan.data.columns import TaskName
from fedspan.data.config import DataConfig
from fedspan.data.dialects import headerless
from fedspan.data.files import read_source
from fedspan.data.images import PICTURES
from fedspan.data.loading import LoadedData, load
from fedspan.data.names import arrow_column, names_of, no_column
from fedspan.data.path_patterns import has_places, places_of
from fedspan.data.source import Source
from fedspan.errors import FedspanError
from fedspan.files import disk_errors, write_atomic
from fedspan.models.empty import load_empty
from fedspan.models.loading import Head
from fedspan.models.targets import suggest_targets

__all__ = ["Start", "start"]

_TASKS = ("sequence-classification", "regression", "causal-lm", "image-classification")
_LABELS = (
    *("label", "labels", "intent", "category", "class", "sentiment", "target", "topic", "diagnosis", "kind", "type"),
    *("tag", "kategorie", "klasse", "bewertung", "catégorie", "classe", "categoría", "clase", "etiqueta"),
)
_SCORES = ("score", "rating", "stars", "value", "target", "label", "similarity", "grade", "points", "price")
_IMAGES = ("image", "img", "picture", "photo", "path", "file", "filename", "file_name", "image_path", "filepath")
_ANSWERS = ("output", "answer", "response", "completion", "target")
_PROMPTS = ("instruction", "question", "prompt", "query", "input")
_PAIRS = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question", "sentence"), ("question", "context"))
_PLACES = (
    *("client", "site", "hospital", "clinic", "bank", "branch", "user", "user_id", "client_id", "speaker", "author"),
    *("domain", "source", "center", "centre", "institution", "region", "department", "store", "shop", "filiale"),
    *("standort", "klinik", "agence", "sucursal"),
)
_OTHERS = ("id", "nr", "no", "index", "patient", "patient_id", "customer", "customer_id", "thread", "date", "time")
"""Names of columns that are no labels, though they may have few values."""
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
_HEADS: Mapping[TaskName, Head] = {
    "sequence-classification": "classification",
    "regression": "regression",
    "causal-lm": "language-model",
    "image-classification": "image-classification",
}
_OUTPUTS = 7919
"""Number of outputs by which the head of a model is recognised: a prime that is no layer's size."""
_MOST_LABELS = 500
_SAMPLE = 2000
"""Number of rows that are examined."""
_FEW = 5000
"""Number of examples below which a tenth of them is too small a validation part: losses on it are noisy."""
_BYTES = 8 << 20
"""Number of bytes at the beginning of each file that are read."""


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
) -> Start:
    """Write a commented config for a file, and check it on the beginning of the file.

    Args:
        data: Any value that ``data.train`` accepts.
        out: The config's file.
        test: Any value that ``data.test`` accepts; None: a part of `data` is set aside to test on.
        task: The learning task; None: guessed from the columns.
        text: The column of texts (of prompts, of images); None: guessed.
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
    rows = _read(str(data), "DATA")
    facts = _facts(rows, str(data), cast("TaskName | None", task), given)
    section = {"train": str(data), **({} if test is None else {"test": str(test)}), **facts.data}
    targets = _targets(facts.task, model)
    name = model or _MODELS[facts.task][0]
    few = rows.whole and len(rows.dataset) < _FEW
    content = _written(facts, section, clients, name, targets, method, few=few)
    config = parse_config(yaml.safe_load(content))
    sample = config.data.model_copy(update={"invalid": "skip"})
    loaded = load(sample, seed=config.data_seed, task=config.task, limit=_BYTES)
    if loaded.dropped:
        content = _written(facts, {**section, "invalid": "skip"}, clients, name, targets, method, few=few)
        config = parse_config(yaml.safe_load(content))
    found = [*facts.found, *_counted(loaded, rows, str(data), test)]
    if loaded.labels:
        shown = ", ".join(loaded.labels[:6]) + (", ..." if len(loaded.labels) > 6 else "")
        seen = "" if loaded.whole else " in the rows that were read"
        found.append(f"{len(loaded.labels)} labels{seen}: {shown}")
    found += loaded.remarks
    with disk_errors(path.parent, "choose another file", "--out"):
        write_atomic(path, content.encode())
    return Start(path, config, tuple(found))


def _read(where: str, option: str) -> Source:
    config = DataConfig(train=where, test_split=None, invalid="skip")
    try:
        return read_source(config, "train", "data", _BYTES)
    except FedspanError as error:
        if error.field != "data.train":
            raise
        raise error.at(option) from error


def _counted(loaded: LoadedData, rows: Source, where: str, test: str | Path | None) -> list[str]:
    """Describe the number of examples; of a file that was read in part, an estimate from its size."""
    held_out = "no test set"
    if test is not None:
        held_out = f"{len(loaded.test or ()):,} to test on"
    elif loaded.test is not None:
        held_out = f"{len(loaded.test):,} of them set aside to test on"
    count = len(loaded.train) + (0 if test is not None else len(loaded.test or ()))
    if loaded.whole:
        return [f"{count:,} examples, {held_out}"]
    size = os.path.getsize(os.path.expanduser(where)) if os.path.isfile(os.path.expanduser(where)) else 0
    about = ""
    if size > _BYTES and not where.endswith((".gz", ".parquet")):
        about = f"about {round(len(rows.dataset) * size / _BYTES, -2):,.0f} examples, "
    return [f"{about}of which the first {len(rows.dataset):,} were read; a run reads and checks all"]


@dataclass(frozen=True)
class _Facts:
    """The facts found in a file: the task, the fields of ``data``, the column of clients, and a description."""

    task: TaskName
    data: Mapping[str, Any]
    by: str | None
    found: tuple[str, ...]


def _facts(rows: Source, where: str, task: TaskName | None, given: Mapping[str, str | None]) -> _Facts:
    dataset = rows.dataset
    for option, column in given.items():
        if column is not None and column not in dataset.column_names:
            raise FedspanError(f"--{option}", column, problem=no_column(column, dataset.column_names))
    head = dataset.select(range(min(len(dataset), _SAMPLE)))
    by = given["by"] or (places_of(where)[0] if has_places(where) else _clients(head, given))
    client_notes = () if by is None else (f"clients: the column {by}",)
    images = _image_column(rows, head, given["text"])
    read = {"header": False} if headerless(dataset.column_names) in rows.notes else {}
    if task == "image-classification" or (task is None and images is not None):
        if images is None:
            raise FedspanError("--text", given["text"], f"the column of images: {', '.join(dataset.column_names)}")
        facts = _labelled(head, "image-classification", {**given, "text": images}, by, client_notes)
    elif task in (None, "causal-lm") and (language := _language(head, task, given)) is not None:
        shown = ", ".join(map(str, language.values()))
        facts = _Facts("causal-lm", language, by, (f"prompts and answers: {shown}", *client_notes))
    else:
        facts = _labelled(head, task, given, by, client_notes)
    return replace(facts, data={**read, **facts.data})


def _clients(head: datasets.Dataset, given: Mapping[str, str | None]) -> str | None:
    """Find the column that says whose each row is, by its name and its number of values."""
    places = [name for name in _PLACES if name not in given.values()]
    return _first(head, places, lambda name: 2 <= len(set(names_of(head, name))) < len(head) / 2)


def _image_column(rows: Source, head: datasets.Dataset, named: str | None) -> str | None:
    """Find the column of images or of paths of image files."""
    for name in [named] if named else [name for name in _IMAGES if name in head.column_names] + head.column_names:
        values = [value for value in arrow_column(head, name).to_pylist() if value]
        if isinstance(head.features[name], datasets.Image):
            return name
        if values and all(isinstance(value, str) and PurePath(value).suffix.lower() in PICTURES for value in values):
            return name
    return None


def _first(head: datasets.Dataset, names: Sequence[str], fits: Any = lambda name: True) -> str | None:
    """Find the first of the names among the columns (``Label``, ``meta.label`` and ``Label (1-5)`` are ``label``)."""
    known: dict[str, str] = {}
    for column in head.column_names:
        for name in (column.lower(), column.lower().rpartition(".")[2], column.lower().partition(" ")[0]):
            known.setdefault(name, column)
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
    client_notes: tuple[str, ...],
) -> _Facts:
    rest = [name for name in head.column_names if name not in (by, given["text"])]
    label = given["label"] or (_score(head, rest) if task == "regression" else _label(head, rest))
    if label is None:
        what = "numbers" if task == "regression" else "labels"
        raise FedspanError("--label", None, f"the column of {what}: {', '.join(head.column_names)}")
    more = [name for name in _candidates(head, rest) if name != label] if given["label"] is None else []
    if task == "image-classification":
        fields = {"image": given["text"], "label": label}
        found = [f"{task}: image {given['text']!r}, label {label!r}", *client_notes]
        return _Facts(task, fields, by, (*found, *_others(more)))
    rest = [name for name in rest if name != label]
    texts = {name: length for name in rest if (length := _length(head, name))}
    words = [name for name in texts if _numbers(head, name) is None and not name.startswith("column_")]
    pair = _pair(rest, words) if given["text"] is None else None
    text = given["text"] or (pair[0] if pair else max(texts, key=lambda name: texts[name], default=None))
    if text is None:
        raise FedspanError("--text", None, f"the column of texts: {', '.join(head.column_names)}")
    if task is None:
        values = len(set(names_of(head, label)))
        task = "regression" if _numbers(head, label) == "float" and values > 20 else "sequence-classification"
    fields = {"text": text, **({"text_pair": pair[1]} if pair else {}), "label": label}
    shown = " and ".join(map(repr, pair)) if pair else repr(text)
    found = [f"{task}: text {shown}, label {label!r}", *client_notes]
    found += _others([name for name in more if name not in fields.values()])
    return _Facts(task, fields, by, tuple(found))


def _others(columns: Sequence[str]) -> list[str]:
    return [f"other columns that may be labels: {', '.join(columns[:4])} (--label)"] if columns else []


def _pair(columns: Sequence[str], texts: Sequence[str]) -> tuple[str, str] | None:
    """Find two columns of texts to be compared, by known names or those like ``question1`` and ``question2``."""
    named = next((each for each in _PAIRS if set(each) <= set(columns)), None)
    ends = (("1", "2"), ("_a", "_b"), ("_A", "_B"))
    twins = (
        (name, name.removesuffix(first) + second)
        for first, second in ends
        for name in texts
        if name.endswith(first) and name != first
    )
    return named or next(((one, other) for one, other in twins if other in texts), None)


def _label(head: datasets.Dataset, columns: Sequence[str]) -> str | None:
    """Find the column of labels: by its name, else one of scores, else the one with the fewest values."""
    if (named := _first(head, _LABELS, lambda name: name in columns)) is not None:
        return named
    scores = _first(head, _SCORES, lambda name: name in columns and _numbers(head, name) is not None)
    if scores is not None:
        return scores
    fitting = _candidates(head, columns)
    return min(reversed(fitting), key=lambda name: fitting[name]) if fitting else None


def _candidates(head: datasets.Dataset, columns: Sequence[str]) -> dict[str, int]:
    """Return the columns that may be labels, with their numbers of values."""
    others = {_first(head, [name]) for name in (*_OTHERS, *_PLACES)}
    counts = {
        name: len(set(names_of(head, name)) - {None})
        for name in columns
        if name not in others and (_length(head, name) or _numbers(head, name) or _is_list_of_one(head, name))
    }
    return {name: count for name, count in counts.items() if 2 <= count <= min(_MOST_LABELS, len(head) / 3)}


def _is_list_of_one(head: datasets.Dataset, column: str) -> bool:
    values = arrow_column(head, column)
    if not pa.types.is_list(values.type) or pa.types.is_nested(values.type.value_type):
        return False
    return all(value is not None and len(value) == 1 for value in values.to_pylist())


def _score(head: datasets.Dataset, columns: Sequence[str]) -> str | None:
    """Find the column of numbers to predict: by its name, else the last one with fractions, else the last one."""
    numbers = {name: kind for name in columns if (kind := _numbers(head, name)) is not None and name.lower() != "id"}
    if (named := _first(head, _SCORES, lambda name: name in numbers)) is not None:
        return named
    fractions = [name for name, kind in numbers.items() if kind == "float"]
    return next(reversed(fractions or list(numbers)), None)


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
            values = [float(value) for value in head[column] if value]
        except ValueError:
            return None
        if not values:
            return None
        return "int" if all(value.is_integer() for value in values) else "float"
    return "float" if kind.startswith("float") else "int" if kind.startswith(("int", "uint", "bool")) else None


def _targets(task: TaskName, model: str | None) -> str | None:
    """Return the names of a model's target layers; None if PEFT has a default or the model can't be read here."""
    if model is None:
        return _MODELS[task][1]
    if (known := _TARGETS.get(_model_type(model))) is not None:
        return known
    try:
        labels = [str(number) for number in range(_OUTPUTS)]
        names = suggest_targets(load_empty(model, _HEADS[task], labels), _OUTPUTS)
    except FedspanError:  # reported by plan and run, which may have another network
        return None
    return None if names is None else _scalar(names)


def _written(
    facts: _Facts,
    section: Mapping[str, Any],
    clients: int,
    model: str,
    targets: str | None,
    method: str,
    *,
    few: bool,
) -> str:
    """Render the config's text; of few examples, a larger share is set aside to choose the best round by."""
    defaults, small = get_training_defaults(facts.task, method), model == "builtin:all-minilm-l6-v2"
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
        f"  name: {_scalar(model)} # a hub id or a folder",
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
        f"  validation: {0.2 if few else 0.1} # of every client's examples, to choose the best round and settings by",
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
        "evaluation:",
        "  best_by: loss # chooses the best round; validation parts are small here, and accuracies on them are noisy",
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


def _scalar(value: str | list[str]) -> str:
    return yaml.safe_dump(value, default_flow_style=True, allow_unicode=True).removesuffix("\n...\n").strip()
