"""Regression: one number for a text or a pair of texts; squared error; Pearson and Spearman correlation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedspan.data.columns import ColumnReader, ReadColumns, TaskColumns, read_text_columns
from fedspan.data.config import DataConfig
from fedspan.tasks.definition import TaskDefinition
from fedspan.tasks.encoding import EncodedText, TextTask
from fedspan.tasks.losses import (
    average_by_client,
    upcast,
)
from fedspan.tasks.metrics import correlate, drop_undefined

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from fedspan.tasks.settings import TaskSettings


class Regression(TextTask):
    """Prediction of one number for a text or a pair of texts, with any sequence classifier of one output.

    The loss is on the unscaled numbers (STS-B: 0 to 5), as in Transformers' and GLUE's own recipes.
    """

    def encode(self, dataset: datasets.Dataset) -> EncodedText:
        """Tokenize a data set once; its columns are ``text``, optionally ``text_pair``, and ``target`` (numbers)."""
        targets = np.array(dataset["target"], dtype=np.float32)
        return self.encode_texts(dataset, targets)

    def compute_loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the mean squared error, in float32 or better."""
        values_B = upcast(self.predict(model, batch))[:, 0]
        return F.mse_loss(values_B, batch["labels"].to(values_B))

    def compute_client_losses(self, model: nn.Module, batch: Mapping[str, Tensor], mask_CB: Tensor) -> Tensor:
        """Compute the mean squared error of each client's examples, (C,)."""
        values_B = upcast(self.predict(model, batch))[:, 0]
        return average_by_client((values_B - batch["labels"].to(values_B)).square(), mask_CB)

    def compute_metrics(self, predictions: Tensor, examples: EncodedText, indices: Sequence[int]) -> dict[str, float]:
        """Compute ``loss`` (mean squared error), ``pearson``, ``spearman``.

        The correlations are left out where undefined: with one example, or if all numbers are equal.
        """
        targets = examples.labels[np.asarray(indices, dtype=np.int64)].astype(np.float64)
        predicted = predictions[:, 0].double().numpy()
        loss = float(np.mean((predicted - targets) ** 2))
        pearson, spearman = (correlate(kind, predicted, targets) for kind in ("pearson", "spearman"))
        return drop_undefined({"loss": loss, "pearson": pearson, "spearman": spearman})

    def compute_example_losses(
        self, predictions: Tensor, examples: EncodedText, indices: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """``BoundsExamples.compute_example_losses``: the squared errors, with equal weights."""
        errors_B = predictions[:, 0].double() - torch.from_numpy(examples.labels[np.asarray(indices, np.int64)])
        return errors_B.square(), torch.ones(len(errors_B))

    def decode_predictions(self, predictions: Tensor) -> list[str]:
        """Format each predicted number with three decimal places."""
        return [f"{value:.3f}" for value in predictions[:, 0].tolist()]

    def decode_targets(self, examples: EncodedText, indices: Sequence[int]) -> list[str]:
        """Return the true number of each example."""
        return [f"{value:.3f}" for value in examples.labels[list(indices)].tolist()]


def _read(reader: ColumnReader, config: DataConfig) -> ReadColumns:
    columns, used = read_text_columns(reader, config)
    return ReadColumns({**columns, "target": reader.read_numbers(config.label or "label")}, used)


def _build(tokenizer: PreTrainedTokenizerBase, settings: TaskSettings, data: DataConfig | None) -> Regression:
    return Regression(tokenizer, settings.max_length, settings.metric, pairs=settings.has_pairs_apart)


REGRESSION = TaskDefinition(
    name="regression",
    title="a number for a text or a pair",
    head="regression",
    build=_build,
    target_type="number",
    metrics=("pearson", "spearman", "loss"),
    columns=TaskColumns(read=_read, has_numeric_labels=True),
    can_pool=True,
    peft_task_type="SEQ_CLS",
    default_model=("builtin:all-minilm-l6-v2", "[query, key, value, dense]"),
    lr=1e-3,
    summary_metrics=("pearson", "spearman"),
    pipeline_tag="text-classification",
    make_examples=lambda ids, classes: EncodedText({"input_ids": ids}, classes.astype(np.float32), ids.lengths),
)
