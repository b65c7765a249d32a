"""Multi-label classification: any number of labels for a text or a pair of texts, each decided on its own.

The loss is the binary cross-entropy of all labels, as in Transformers' ``problem_type="multi_label_classification"``.
The head starts from statistics of each label (``core.heads``). Shapes: B examples, C clients of a pass, K labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedspan.core.tensors import to_device
from fedspan.data.columns import ColumnReader, ReadColumns, TaskColumns, read_text_columns
from fedspan.data.config import DataConfig
from fedspan.data.names import find_separator, get_arrow_column, is_list
from fedspan.tasks.definition import InferredColumns, TaskDefinition
from fedspan.tasks.encoding import EncodedText, Ragged, TextExamples, TextTask, collate_texts
from fedspan.tasks.label_scores import compute_f1
from fedspan.tasks.losses import (
    CLASS_WEIGHTS,
    LossOption,
    average_by_client,
    compute_guess_bound,
    get_smoothing,
    upcast,
)
from fedspan.tasks.metrics import Metric

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from fedspan.tasks.settings import TaskSettings

_MAX_LABELS = 500
_COLUMN = "labels"
_SEPARATED_COLUMNS = ("labels", "tags", "topics", "genres", "categories", "classes", "kinds", "themes", "subjects")
"""Names of columns of texts that ``fedspan init`` takes for separated labels; any column of lists may hold labels."""
_PROMPT_COLUMNS = {"messages", "instruction", "prompt"}
"""Columns of data for language models, whose further columns are no labels to learn."""


@dataclass(frozen=True)
class MultiLabelOptions:
    """Options of multi-label classification.

    Args:
        threshold: Probability above which a label is predicted, between 0 and 1.
    """

    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5


@dataclass(frozen=True)
class LabeledTexts(TextExamples):
    """Tokenized texts with any number of label indices each."""

    labels: Ragged


class MultiLabelClassification(TextTask):
    """Prediction of any number of labels for a text or a pair, with any Hugging Face sequence classifier.

    Args:
        max_length: Maximal number of tokens; further ones are cut.
        threshold: Probability above which a label is predicted.
        pairs: As for ``TextTask``.
    """

    loss_options: tuple[LossOption, ...] = ("label_smoothing", "class_weights")

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        labels: Sequence[str],
        max_length: int,
        metric: str = "micro_f1",
        threshold: float = 0.5,
        *,
        pairs: bool = False,
    ) -> None:
        super().__init__(tokenizer, max_length, metric, pairs=pairs)
        self.labels = tuple(labels)
        self.threshold = threshold

    def encode(self, dataset: datasets.Dataset) -> LabeledTexts:
        """Tokenize a data set once; its columns are ``text``, optionally ``text_pair``, and ``labels`` (indices)."""
        labels = Ragged(cast("list[list[int]]", dataset["labels"][:]))
        return LabeledTexts(self.encode_texts(dataset, np.arange(len(labels))), labels)

    def collate(self, examples: LabeledTexts, indices: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Collate examples, padded to the longest of them; ``labels`` are 0 or 1 in float32, (B, K)."""
        labels_BK = torch.from_numpy(self.encode_labels(examples, indices)).float()
        return {**collate_texts(self.tokenizer, examples.text, indices, device), "labels": to_device(labels_BK, device)}

    def encode_labels(self, examples: LabeledTexts, indices: Sequence[int]) -> np.ndarray:
        """Return 1 where an example has a label, else 0; uint8, (examples, K)."""
        indicators = np.zeros((len(indices), len(self.labels)), np.uint8)
        for row, index in enumerate(indices):
            indicators[row, examples.labels[index]] = 1
        return indicators

    def compute_loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the mean binary cross-entropy over examples and labels, in float32 or better."""
        return self._compute_losses(model, batch).mean()

    def compute_client_losses(self, model: nn.Module, batch: Mapping[str, Tensor], mask_CB: Tensor) -> Tensor:
        """Compute the mean binary cross-entropy of each client's examples, (C,)."""
        return average_by_client(self._compute_losses(model, batch), mask_CB)

    def _compute_losses(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the binary cross-entropy of each example, (B,): the mean over its labels.

        Class weights are those of ``torch.nn.BCEWithLogitsLoss(pos_weight=...)``; smoothing takes a share of each
        target and gives a half of it to either answer.
        """
        logits_BK, smoothing = upcast(self.predict(model, batch)), get_smoothing(batch)
        targets_BK = batch["labels"].to(logits_BK) * (1 - smoothing) + smoothing / 2
        weights_BK = batch[CLASS_WEIGHTS].to(logits_BK) if CLASS_WEIGHTS in batch else None
        losses_BK = F.binary_cross_entropy_with_logits(logits_BK, targets_BK, reduction="none", pos_weight=weights_BK)
        return losses_BK.mean(1)

    def compute_balanced_weights(self, examples: LabeledTexts, indices: np.ndarray) -> Tensor:
        """Compute how many of a client's examples lack each label for one that has it, (K,) float32; 1 if none has it.

        Args:
            indices: The client's examples, (examples,).
        """
        counts_K = self.encode_labels(examples, indices.tolist()).sum(0)
        return torch.from_numpy(
            np.where(counts_K > 0, (len(indices) - counts_K) / np.maximum(counts_K, 1), 1.0)
        ).float()

    def compute_metrics(self, predictions: Tensor, examples: LabeledTexts, indices: Sequence[int]) -> dict[str, float]:
        """Compute ``loss``, ``micro_f1``, ``macro_f1`` and ``subset_accuracy``, as scikit-learn does.

        Macro-F1 is the mean over all labels of the model; it is 0 of a label that is neither predicted nor true.
        Subset accuracy is the share of examples whose labels are all right.
        """
        targets = self.encode_labels(examples, indices)
        predicted = self._predict_labels(predictions).numpy().astype(np.uint8)
        counts_K = targets.sum(0), predicted.sum(0), (targets & predicted).sum(0)
        loss = F.binary_cross_entropy_with_logits(predictions.float(), torch.from_numpy(targets).float())
        return {
            "loss": float(loss),
            "micro_f1": float(compute_f1(*(count_K.sum() for count_K in counts_K))),
            "macro_f1": float(compute_f1(*counts_K).mean()),
            "subset_accuracy": float((predicted == targets).all(1).mean()),
        }

    @property
    def loss_bound(self) -> float:
        """Largest loss of an example that an owner reports to others."""
        return compute_guess_bound(2)

    def compute_example_losses(
        self, predictions: Tensor, examples: LabeledTexts, indices: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """``BoundsExamples.compute_example_losses``: the mean over an example's labels, with equal weights."""
        targets_BK = torch.from_numpy(self.encode_labels(examples, indices)).float()
        losses_B = F.binary_cross_entropy_with_logits(predictions.float(), targets_BK, reduction="none").mean(1)
        return losses_B, torch.ones_like(losses_B)

    def _predict_labels(self, predictions: Tensor) -> Tensor:
        """Return which labels are predicted, bool, (B, K)."""
        return predictions.float().sigmoid() > self.threshold

    def decode_predictions(self, predictions: Tensor) -> list[str]:
        """Return the predicted labels of each example, joined with commas; an empty text if there are none."""
        return [self._format_labels(row) for row in self._predict_labels(predictions).tolist()]

    def decode_targets(self, examples: LabeledTexts, indices: Sequence[int]) -> list[str]:
        """Return the true labels of each example, in the form of ``decode_predictions``."""
        return [self._format_labels(row) for row in self.encode_labels(examples, indices).tolist()]

    def _format_labels(self, decisions: Sequence[int]) -> str:
        return ", ".join(label for label, decision in zip(self.labels, decisions, strict=True) if decision)

    def postprocess(self, predictions: Tensor) -> list[list[tuple[str, float]]]:
        """Return the labels above the threshold of each example with their probabilities, the highest first."""
        rows = predictions.float().sigmoid().tolist()
        pairs = [sorted(zip(self.labels, row, strict=True), key=lambda pair: -pair[1]) for row in rows]
        return [[pair for pair in row if pair[1] > self.threshold] for row in pairs]


def _read(reader: ColumnReader, config: DataConfig) -> ReadColumns:
    columns, _ = read_text_columns(reader, config)
    texts = {config.text, config.text_pair or config.text}
    if config.label_columns is None:
        column = config.label or _COLUMN
        lists, separator = reader.read_label_lists(column, config.label_separator)
        return ReadColumns(columns, {*texts, column}, label_lists=lists, label_separator=separator)
    flags = [reader.read_flags(column, "label_columns") for column in config.label_columns]
    lists = [
        [label for label, flag in zip(config.label_columns, row, strict=True) if flag]
        for row in zip(*flags, strict=True)
    ]
    return ReadColumns(columns, {*texts, *config.label_columns}, label_lists=lists)


def _require(config: DataConfig, field: str) -> list[tuple[str, ...]]:
    labels = config.label_columns or (config.label or _COLUMN,)
    return [(column,) for column in (config.text, config.text_pair, *labels) if column is not None]


def _build(
    tokenizer: PreTrainedTokenizerBase, settings: TaskSettings, data: DataConfig | None
) -> MultiLabelClassification:
    options: MultiLabelOptions = MULTI_LABEL_CLASSIFICATION.parse_options(settings.options)
    return MultiLabelClassification(
        *(tokenizer, settings.labels, settings.max_length, settings.metric, options.threshold),
        pairs=settings.has_pairs_apart,
    )


def _infer_columns(sample: datasets.Dataset, options: Mapping[str, str | None]) -> InferredColumns | None:
    """Find a column of lists of labels, or of texts with separated labels, and a column of texts."""
    if options["label"]:
        names = [options["label"]]
    elif options["answer"] or _PROMPT_COLUMNS & set(sample.column_names):
        return None
    else:
        others = {options["text"], options["by"]}
        names = [
            name
            for name in sample.column_names
            if name not in others and (not _is_text(sample, name) or name.lower() in _SEPARATED_COLUMNS)
        ]
    is_requested = options["task"] is not None and options["label"] is not None  # in a short file, labels hardly recur
    label = next(
        (
            name
            for name in names
            if _can_hold_labels(sample, name, options) and (is_requested or _has_label_lists(sample, name))
        ),
        None,
    )
    if label is None:
        return None
    lengths = {
        name: sum(len(text or "") for text in sample[name])
        for name in sample.column_names
        if name not in (label, options["by"]) and _is_text(sample, name)
    }
    text = options["text"] or max(lengths, key=lambda name: lengths[name], default=None)
    if text not in lengths:
        return None
    return InferredColumns({"text": text, "label": label}, f"text {text!r}, labels {label!r}")


def _is_text(sample: datasets.Dataset, name: str) -> bool:
    return str(getattr(sample.features[name], "dtype", "")) in ("string", "large_string")


def _can_hold_labels(sample: datasets.Dataset, name: str, options: Mapping[str, str | None]) -> bool:
    """Check whether a column's type can hold labels: texts, lists of texts, or other lists in a named column."""
    kind = get_arrow_column(sample, name).type
    if not is_list(kind):
        return _is_text(sample, name)
    is_named = name.lower() in _SEPARATED_COLUMNS or name == options["label"]
    return is_named or pa.types.is_string(kind.value_type) or pa.types.is_large_string(kind.value_type)


def _has_label_lists(sample: datasets.Dataset, name: str) -> bool:
    """Check for few different labels that are combined, each at most once in a row and several in some rows."""
    values: list[Any] = [value for value in sample[name] if value is not None]
    if values and all(isinstance(value, str) for value in values):
        separator = find_separator(values)
        if separator is None:
            return False
        values = [[part.strip() for part in value.split(separator) if part.strip()] for value in values]
    elif not values or not all(isinstance(value, list) for value in values):
        return False
    parts = [part for row in values for part in row]
    if not all(isinstance(part, str) or type(part) is int for part in parts):
        return False
    if any(len(set(row)) < len(row) for row in values) or all(len(row) == 1 for row in values):
        return False
    combinations, labels = len({tuple(row) for row in values}), len(set(parts))
    return 2 <= labels <= min(_MAX_LABELS, len(values) / 3) and labels < combinations


def _make_examples(ids: Ragged, classes: np.ndarray) -> LabeledTexts:
    text = EncodedText({"input_ids": ids}, np.arange(len(ids)), ids.lengths)
    return LabeledTexts(text, Ragged(classes[:, None].tolist()))


MULTI_LABEL_CLASSIFICATION = TaskDefinition(
    name="multi-label-classification",
    title="any number of labels for a text or a pair",
    head="multi-label",
    build=_build,
    target_type="labels",
    metrics=("micro_f1", "macro_f1", "subset_accuracy", "loss"),
    loss_options=MultiLabelClassification.loss_options,
    custom_metrics={
        "micro_f1": Metric("micro-F1", True, is_percentage=True),
        "subset_accuracy": Metric("subset accuracy", True, is_percentage=True, is_mean=True),
    },
    columns=TaskColumns(
        read=_read, get_required_columns=_require, get_label_column=lambda config: None, is_multi_label=True
    ),
    can_pool=True,
    label_starts=("by-label",),
    peft_task_type="SEQ_CLS",
    options=MultiLabelOptions,
    default_model=("builtin:all-minilm-l6-v2", "[query, key, value, dense]"),
    lr=1e-3,
    summary_metrics=("macro_f1",),
    pipeline_tag="text-classification",
    infer_columns=_infer_columns,
    postprocess=lambda task, inputs, predictions: task.postprocess(predictions),
    make_examples=_make_examples,
)
