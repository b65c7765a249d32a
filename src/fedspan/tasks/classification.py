"""Sequence classification: one label for a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from fedspan.data.columns import LABELED_TEXTS
from fedspan.data.config import DataConfig
from fedspan.tasks.definition import TaskDefinition
from fedspan.tasks.encoding import EncodedText, Ragged, collate_texts, describe_truncation, encode_texts
from fedspan.tasks.losses import (
    get_logits,
    select_inputs,
)
from fedspan.tasks.single_label import SingleLabelClassification

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from fedspan.tasks.settings import TaskSettings


class SequenceClassification(SingleLabelClassification):
    """Prediction of one label for a text or a pair of texts, with any Hugging Face sequence classifier.

    Args:
        max_length: Maximal number of tokens; further ones are cut.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, labels: Sequence[str], max_length: int, metric: str = "accuracy"
    ) -> None:
        super().__init__(labels, metric)
        self.tokenizer = tokenizer
        self.max_length = max_length

    def encode(self, dataset: datasets.Dataset) -> EncodedText:
        """Tokenize a data set once; its columns are ``text``, optionally ``text_pair``, and ``label`` (indices)."""
        labels = np.array(dataset.with_format("numpy")["label"][:], dtype=np.int64)
        return encode_texts(self.tokenizer, dataset, self.max_length, labels)

    def collate(self, examples: EncodedText, indices: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Collate examples, padded to the longest of them, with ``attention_mask`` and ``labels``."""
        return collate_texts(self.tokenizer, examples, indices, device)

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor], *, generate: bool = False) -> Tensor:
        """Compute the logits, (examples, labels)."""
        return get_logits(model(**select_inputs(batch)))

    def describe_examples(self, examples: EncodedText) -> tuple[str, ...]:
        """Report how many texts fill the maximal length, and so may have been cut."""
        return describe_truncation(examples, self.max_length)


def _build(
    tokenizer: PreTrainedTokenizerBase, settings: TaskSettings, data: DataConfig | None
) -> SequenceClassification:
    return SequenceClassification(tokenizer, settings.labels, settings.max_length, settings.metric)


def _make_examples(ids: Ragged, classes: np.ndarray) -> EncodedText:
    return EncodedText({"input_ids": ids}, classes, ids.lengths)


SEQUENCE_CLASSIFICATION = TaskDefinition(
    name="sequence-classification",
    title="a label for a text or a pair",
    head="classification",
    build=_build,
    target_type="label",
    metrics=("accuracy", "macro_f1", "f1", "matthews", "loss"),
    columns=LABELED_TEXTS,
    can_pool=True,
    loss_options=SequenceClassification.loss_options,
    peft_task_type="SEQ_CLS",
    default_model=("builtin:all-minilm-l6-v2", "[query, value]"),
    lr=3e-3,
    summary_metrics=("macro_f1",),
    pipeline_tag="text-classification",
    make_examples=_make_examples,
)
