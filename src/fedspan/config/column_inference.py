"""Inference of the task, the columns and the clients from a sample of the user's data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from fedspan.data.dialects import describe_missing_header
from fedspan.data.images import PICTURES
from fedspan.data.multiple_files import has_placeholders, list_placeholders
from fedspan.data.names import describe_missing_column, find_combined_labels, get_arrow_column, is_list, read_names
from fedspan.data.numbers import parse_numbers
from fedspan.data.source import Source
from fedspan.errors import FedspanError
from fedspan.tasks.registry import TASKS, get_task

if TYPE_CHECKING:
    import datasets

_LABEL_COLUMNS = (
    *("label", "labels", "intent", "category", "class", "sentiment", "target", "topic", "diagnosis", "kind", "type"),
    *("tag", "kategorie", "klasse", "bewertung", "catégorie", "classe", "categoría", "clase", "etiqueta"),
)
_SCORE_COLUMNS = ("score", "rating", "stars", "value", "target", "label", "similarity", "grade", "points", "price")
_IMAGE_COLUMNS = ("image", "img", "picture", "photo", "path", "file", "filename", "file_name", "image_path", "filepath")
_ANSWER_COLUMNS = ("output", "answer", "response", "completion", "target")
_PROMPT_COLUMNS = ("instruction", "question", "prompt", "query", "input")
_TEXT_PAIRS = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question", "sentence"), ("question", "context"))
_CLIENT_COLUMNS = (
    *("client", "site", "hospital", "clinic", "bank", "branch", "user", "user_id", "client_id", "speaker", "author"),
    *("domain", "source", "center", "centre", "institution", "region", "department", "store", "shop", "filiale"),
    *("standort", "klinik", "agence", "sucursal"),
)
_EXCLUDED_COLUMNS = (
    "id",
    "nr",
    "no",
    "index",
    "patient",
    "patient_id",
    "customer",
    "customer_id",
    "thread",
    "date",
    "time",
)
"""Names of columns that are not labels, even with few values."""
_MAX_LABELS = 500
_FEW_NUMBERS = 20
"""Number of different numbers up to which they are classes."""
_PAIRS_ADVICE = {
    "text-embedding": "The cosine of two texts learns their score; --task regression has a linear layer instead.",
    "regression": "--task text-embedding learns the score as a cosine, which a sentence encoder was trained for.",
}
"""Sentences on pairs of texts with a score, by task."""
_SHOWN = 4
"""Number of columns of a kind that a finding names."""
_SAMPLE_ROWS = 2000
"""Number of rows that are inspected."""


@dataclass(frozen=True)
class InferredData:
    """The task and the fields that were inferred from a file."""

    task: str
    data: Mapping[str, Any]
    """Fields of the section ``data``."""
    by: str | None
    """Column that assigns each row to a client; None: there is none."""
    findings: tuple[str, ...]
    advice: str = ""
    """Sentence on another reading of the labels; empty if there is none."""


def infer_data(rows: Source, location: str, task: str | None, options: Mapping[str, str | None]) -> InferredData:
    """Infer the task, the columns and the clients from the first rows of a file.

    Args:
        location: The file, folder or data set, as in ``data.train``.
        options: Columns requested by the user, by option (text, label, answer, by); None: inferred.
    """
    dataset = rows.dataset
    for option, column in options.items():
        if column is not None and column not in dataset.column_names:
            raise FedspanError(f"--{option}", column, problem=describe_missing_column(column, dataset.column_names))
    sample = dataset.select(range(min(len(dataset), _SAMPLE_ROWS)))
    by = options["by"] or (
        list_placeholders(location)[0] if has_placeholders(location) else _find_client_column(sample, options)
    )
    images = _find_image_column(sample, options["text"])
    header = {"header": False} if describe_missing_header(dataset.column_names) in rows.notes else {}
    inferred_data, alternatives = _infer_by_task(sample, task, options, by)
    definition = None if task is None else get_task(task, "--task")
    is_generative = definition is None or definition.is_generative
    if inferred_data is not None:
        inferred = inferred_data
    elif images is not None if definition is None else definition.has_image_inputs:
        if images is None:
            raise FedspanError("--text", options["text"], f"the column of images: {', '.join(dataset.column_names)}")
        inferred = _infer_labeled_fields(sample, task or "image-classification", {**options, "text": images}, by)
    elif is_generative and (language := _infer_language_fields(sample, task, options)) is not None:
        described = ", ".join(str(value) for field, value in language.items() if field != "chat")
        noun = "chats" if "messages" in language else "prompts and answers"
        inferred = InferredData(task or "causal-lm", language, by, (f"{noun}: {described}",))
    else:
        inferred = _infer_labeled_fields(sample, task, options, by)
    return replace(inferred, data={**header, **inferred.data}, findings=(*inferred.findings, *alternatives))


def _infer_by_task(
    sample: datasets.Dataset,
    task: str | None,
    options: Mapping[str, str | None],
    by: str | None,
) -> tuple[InferredData | None, list[str]]:
    """Ask the tasks that infer their columns themselves: the requested one, or each of them.

    Lists of labels give way to a plain column of labels or answers, unless the user named the task or the label.

    Returns:
        What the first task inferred, None if no task did, and findings about tasks that gave way.
    """
    alternatives: list[str] = []
    for name, definition in TASKS.items():
        if definition.infer_columns is None or (task != name and (task is not None or not definition.is_inferred)):
            continue
        inferred = definition.infer_columns(sample, {**options, "by": by, "task": task})
        is_multi_label = definition.columns is not None and definition.columns.is_multi_label
        gives_way = task is None and is_multi_label and options["label"] is None
        if inferred is not None and gives_way and _has_plain_answers(sample, options, {by, inferred.data["label"]}):
            label = inferred.data["label"]
            alternatives.append(f"{label} may hold several labels a row (--task {name} --label {label})")
            continue
        if inferred is not None:
            return InferredData(name, inferred.data, by, (f"{name}: {inferred.finding}",)), alternatives
        if task is not None:
            problem = f"the columns do not fit {name}: {', '.join(sample.column_names)}"
            raise FedspanError("--task", task, problem=problem)
    return None, alternatives


def _has_plain_answers(
    sample: datasets.Dataset, options: Mapping[str, str | None], others: Collection[str | None]
) -> bool:
    """Check for prompts and answers, or for a column, not among `others`, that is named as one label a row."""
    columns = [
        name
        for name in sample.column_names
        if name not in {*others, options["text"]} and not pa.types.is_nested(get_arrow_column(sample, name).type)
    ]
    candidates = _list_label_candidates(sample, columns)
    label = _find_column(sample, _LABEL_COLUMNS, lambda name: name in candidates)
    return label is not None or _infer_language_fields(sample, None, options) is not None


def _find_client_column(sample: datasets.Dataset, options: Mapping[str, str | None]) -> str | None:
    """Find the column that assigns rows to clients, by its name and its number of values."""
    names = [name for name in _CLIENT_COLUMNS if name not in options.values()]
    return _find_column(sample, names, lambda name: 2 <= len({*read_names(sample, name)} - {None}) < len(sample) / 2)


def _find_image_column(sample: datasets.Dataset, requested: str | None) -> str | None:
    import datasets

    likely = [name for name in _IMAGE_COLUMNS if name in sample.column_names]
    for name in [requested] if requested else likely + sample.column_names:
        values = [value for value in get_arrow_column(sample, name).to_pylist() if value]
        if isinstance(sample.features[name], datasets.Image):
            return name
        if values and all(isinstance(value, str) and PurePath(value).suffix.lower() in PICTURES for value in values):
            return name
    return None


def _find_column(
    sample: datasets.Dataset, names: Sequence[str], predicate: Callable[[str], bool] = lambda name: True
) -> str | None:
    """Find the column with the first matching name (``Label``, ``meta.label`` and ``Label (1-5)`` match ``label``)."""
    column_by_name: dict[str, str] = {}
    for column in sample.column_names:
        for name in (column.lower(), column.lower().rpartition(".")[2], column.lower().partition(" ")[0]):
            column_by_name.setdefault(name, column)
    return next(
        (column_by_name[name] for name in names if name in column_by_name and predicate(column_by_name[name])), None
    )


def _infer_language_fields(
    sample: datasets.Dataset, task: str | None, options: Mapping[str, str | None]
) -> dict[str, Any] | None:
    """Infer the fields of a language model's data; None if the columns do not fit."""
    if "messages" in sample.column_names and options["answer"] is None:
        return {"messages": "messages", "chat": True}
    answer = options["answer"] or (
        None
        if options["label"]
        else _find_column(sample, _ANSWER_COLUMNS, lambda name: _compute_mean_text_length(sample, name) > 0)
    )
    if answer is None:
        if task is None:
            return None
        raise FedspanError("--answer", None, f"the column of answers: {', '.join(sample.column_names)}")
    prompt = options["text"] or _find_column(sample, [name for name in _PROMPT_COLUMNS if name != answer])
    if prompt is None:
        if task is None:
            return None
        raise FedspanError("--text", None, f"the column of prompts: {', '.join(sample.column_names)}")
    if {"instruction", "input"} <= set(sample.column_names) and options["text"] is None:
        return {"prompt": "alpaca", "answer": answer}
    return {"prompt": f"{{{prompt}}}\n", "answer": answer}


def _infer_labeled_fields(
    sample: datasets.Dataset,
    task: str | None,
    options: Mapping[str, str | None],
    by: str | None,
) -> InferredData:
    remaining = [name for name in sample.column_names if name not in (by, options["text"])]
    predicts_numbers = task is not None and get_task(task, "--task").target_type == "number"
    label = options["label"] or (
        _find_score_column(sample, remaining) if predicts_numbers else _find_label_column(sample, remaining)
    )
    if label is None:
        noun = "numbers" if predicts_numbers else "labels"
        expected = f"the column of {noun}: {', '.join(sample.column_names)}"
        if task is None and (numbers := _find_score_column(sample, remaining)) is not None:
            expected = f"{expected}. --task regression predicts numbers, such as those of {numbers}"
        raise FedspanError("--label", None, expected)
    alternatives = (
        [name for name in _list_label_candidates(sample, remaining) if name != label]
        if options["label"] is None
        else []
    )
    if task is not None and get_task(task, "--task").has_image_inputs:
        fields = {"image": options["text"], "label": label}
        findings = [f"{task}: image {options['text']!r}, label {label!r}"]
        return InferredData(task, fields, by, (*findings, *_list_alternatives(alternatives)))
    remaining = [name for name in remaining if name != label]
    texts = {name: length for name in remaining if (length := _compute_mean_text_length(sample, name))}
    text_columns = [
        name for name in texts if _get_numeric_kind(sample, name) is None and not name.startswith("column_")
    ]
    pair = _find_text_pair(remaining, text_columns) if options["text"] is None else None
    text = options["text"] or (pair[0] if pair else max(texts, key=lambda name: texts[name], default=None))
    if text is None:
        raise FedspanError("--text", None, f"the column of texts: {', '.join(sample.column_names)}")
    if task is None:
        values = len(set(read_names(sample, label)))
        is_number = _get_numeric_kind(sample, label) == "float" and values > _FEW_NUMBERS
        task = "sequence-classification" if not is_number else "text-embedding" if pair else "regression"
    advice = _PAIRS_ADVICE[task] if pair and task in _PAIRS_ADVICE else ""
    if get_task(task).target_type == "label":
        advice = _describe_numbers(sample, label) or _describe_combined_labels(sample, label)
    fields = {"text": text, **({"text_pair": pair[1]} if pair else {}), "label": label}
    described = " and ".join(map(repr, pair)) if pair else repr(text)
    findings = [f"{task}: text {described}, label {label!r}"]
    alternatives = [name for name in alternatives if name not in fields.values()]
    findings += _list_alternatives(alternatives)
    findings += _list_unused_lists(sample, {by, *alternatives[:_SHOWN], *fields.values()})
    return InferredData(task, fields, by, tuple(findings), advice)


def _describe_numbers(sample: datasets.Dataset, label: str) -> str:
    """Return a sentence on labels that are numbers rather than classes; empty if they are few, or count from 0 or 1."""
    if _get_numeric_kind(sample, label) is None:
        return ""
    names = {name for name in read_names(sample, label) if name is not None}
    are_numbered = names in ({*map(str, range(start, start + len(names)))} for start in (0, 1))
    if len(names) <= _FEW_NUMBERS or (are_numbered and len(names) < len(sample) / 3):
        return ""
    advice = f"The column {label} has {len(names):,} different numbers, which are labels here; "
    return f"{advice}--task regression predicts numbers."


def _describe_combined_labels(sample: datasets.Dataset, label: str) -> str:
    """Return a sentence on labels that seem to be several ones, with a separator; empty if they do not."""
    is_text = _get_numeric_kind(sample, label) is None and not is_list(get_arrow_column(sample, label).type)
    separator = find_combined_labels(read_names(sample, label)) if is_text else None
    if separator is None:
        return ""
    advice = f"Values of {label!r} contain {separator!r}; for several labels an example: "
    return f"{advice}--task multi-label-classification --label {label}."


def _list_alternatives(columns: Sequence[str]) -> list[str]:
    return [f"other columns that may be labels: {', '.join(columns[:_SHOWN])} (--label)"] if columns else []


def _find_text_pair(columns: Sequence[str], texts: Sequence[str]) -> tuple[str, str] | None:
    """Find two columns of texts to compare, by well-known names or by suffixes: ``question1`` and ``question2``."""
    match = next((pair for pair in _TEXT_PAIRS if set(pair) <= set(columns)), None)
    suffixes = (("1", "2"), ("_a", "_b"), ("_A", "_B"))
    pairs = (
        (name, name.removesuffix(first) + second)
        for first, second in suffixes
        for name in texts
        if name.endswith(first) and name != first
    )
    return match or next(((left, right) for left, right in pairs if right in texts), None)


def _find_label_column(sample: datasets.Dataset, columns: Sequence[str]) -> str | None:
    """Find the column of labels: by its name, else a column of scores, else the column with the fewest values."""
    if (match := _find_column(sample, _LABEL_COLUMNS, lambda name: name in columns)) is not None:
        return match
    scores = _find_column(
        sample, _SCORE_COLUMNS, lambda name: name in columns and _get_numeric_kind(sample, name) is not None
    )
    if scores is not None:
        return scores
    candidates = _list_label_candidates(sample, columns)
    return min(reversed(candidates), key=lambda name: candidates[name]) if candidates else None


def _list_label_candidates(sample: datasets.Dataset, columns: Sequence[str]) -> dict[str, int]:
    """Return the columns that may hold labels, with their numbers of distinct values."""
    excluded = {_find_column(sample, [name]) for name in (*_EXCLUDED_COLUMNS, *_CLIENT_COLUMNS)}
    counts = {
        name: len(set(read_names(sample, name)) - {None})
        for name in columns
        if name not in excluded
        and (
            _compute_mean_text_length(sample, name)
            or _get_numeric_kind(sample, name)
            or _has_single_element_lists(sample, name)
        )
    }
    return {name: count for name, count in counts.items() if 2 <= count <= min(_MAX_LABELS, len(sample) / 3)}


def _has_single_element_lists(sample: datasets.Dataset, column: str) -> bool:
    values = get_arrow_column(sample, column)
    if not is_list(values.type) or pa.types.is_nested(values.type.value_type):
        return False
    return all(value is not None and len(value) == 1 for value in values.to_pylist())


def _find_score_column(sample: datasets.Dataset, columns: Sequence[str]) -> str | None:
    """Find the column of numbers to predict: by its name, else the last with fractions, else the last."""
    numbers = {
        name: kind for name in columns if (kind := _get_numeric_kind(sample, name)) is not None and name.lower() != "id"
    }
    if (match := _find_column(sample, _SCORE_COLUMNS, lambda name: name in numbers)) is not None:
        return match
    float_columns = [name for name, kind in numbers.items() if kind == "float"]
    return next(reversed(float_columns or list(numbers)), None)


def _compute_mean_text_length(sample: datasets.Dataset, column: str) -> float:
    """Compute the mean number of characters of a column of texts, or of lists of texts; 0 of others."""
    kind = get_arrow_column(sample, column).type
    if _is_text_list(kind):
        if _has_single_element_lists(sample, column) and len(set(read_names(sample, column))) <= len(sample) / 3:
            return 0.0  # lists of one label; one text each would rarely recur
        lengths = [len(" ".join(filter(None, value))) for value in sample[column] if value]
        return sum(lengths) / max(1, len(lengths))
    if str(getattr(sample.features[column], "dtype", "")) not in ("string", "large_string"):
        return 0.0
    values = [value for value in sample[column] if isinstance(value, str)]
    return sum(map(len, values)) / max(1, len(values))


def _is_text_list(kind: pa.DataType) -> bool:
    return is_list(kind) and (pa.types.is_string(kind.value_type) or pa.types.is_large_string(kind.value_type))


def _list_unused_lists(sample: datasets.Dataset, used: Collection[str | None]) -> list[str]:
    kinds = {name: get_arrow_column(sample, name).type for name in sample.column_names if name not in used}
    lists = [name for name, kind in kinds.items() if is_list(kind)]
    if not lists:
        return []
    hint = " (--text joins lists of texts)" if any(_is_text_list(kinds[name]) for name in lists) else ""
    return [f"columns of lists that are not used: {', '.join(lists[:_SHOWN])}{', ...' if lists[_SHOWN:] else ''}{hint}"]


def _get_numeric_kind(sample: datasets.Dataset, column: str) -> Literal["int", "float"] | None:
    kind = str(getattr(sample.features[column], "dtype", ""))
    if kind in ("string", "large_string"):  # a csv file stores numbers as text
        values = [value.strip() for value in sample[column] if value and value.strip()]
        numbers = parse_numbers([value for value in values if value.lower() != "nan"])
        if not numbers or None in numbers:
            return None
        return "int" if all(number is not None and number.is_integer() for number in numbers) else "float"
    return (
        "float"
        if kind.startswith(("float", "decimal"))
        else "int"
        if kind.startswith(("int", "uint", "bool"))
        else None
    )
