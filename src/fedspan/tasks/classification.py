"""Sequence classification: one label for a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedspan.data.columns import LABELED_TEXTS
from fedspan.data.config import DataConfig
from fedspan.tasks.definition import TaskDefinition
from fedspan.tasks.encoding import EncodedText, TextTask
from fedspan.tasks.single_label import SingleLabelClassification

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from fedspan.tasks.settings import TaskSettings


class SequenceClassification(TextTask, SingleLabelClassification):
    """Prediction of one label for a text or a pair of texts, with any Hugging Face sequence classifier.

    Args:
        max_length: Maximal number of tokens; further ones are cut.
        pairs: As for ``TextTask``.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        labels: Sequence[str],
        max_length: int,
        metric: str = "accuracy",
        *,
        pairs: bool = False,
    ) -> None:
        TextTask.__init__(self, tokenizer, max_length, metric, pairs=pairs)
        SingleLabelClassification.__init__(self, labels, metric)

    def encode(self, dataset: datasets.Dataset) -> EncodedText:
        """Tokenize a data set once; its columns are ``text``, optionally ``text_pair``, and ``label`` (indices)."""
        labels = np.array(dataset.with_format("numpy")["label"][:], dtype=np.int64)
        return self.encode_texts(dataset, labels)


def _build(
    tokenizer: PreTrainedTokenizerBase, settings: TaskSettings, data: DataConfig | None
) -> SequenceClassification:
    labels, pairs = settings.labels, settings.has_pairs_apart
    return SequenceClassification(tokenizer, labels, settings.max_length, settings.metric, pairs=pairs)


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
    default_model=("builtin:all-minilm-l6-v2", "[query, key, value, dense]"),
    lr=1e-3,
    summary_metrics=("macro_f1",),
    pipeline_tag="text-classification",
    make_examples=lambda ids, classes: EncodedText({"input_ids": ids}, classes, ids.lengths),
)
