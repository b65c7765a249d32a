"""Sequence classification: one label for a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from fedspan.tasks.encoding import EncodedText, collate, encode_texts, full_length
from fedspan.tasks.labelling import OFFSETS, Labelling

if TYPE_CHECKING:
    import datasets

__all__ = ["SequenceClassification"]


class SequenceClassification(Labelling):
    """Prediction of one label for a text or a pair of texts, with any Hugging Face sequence classifier.

    Args:
        tokenizer: The model's tokenizer.
        labels: Label names by index.
        max_length: Maximal number of tokens; further ones are cut.
        metric: Metric by which rounds are compared.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, labels: Sequence[str], max_length: int, metric: str = "accuracy"
    ) -> None:
        super().__init__(labels, metric)
        self.tokenizer = tokenizer
        self.max_length = max_length

    def encode(self, dataset: datasets.Dataset) -> EncodedText:
        """Tokenise a data set once; its columns are ``text``, optionally ``text_pair``, and ``label`` (indices)."""
        labels = np.array(dataset.with_format("numpy")["label"][:], dtype=np.int64)
        return encode_texts(self.tokenizer, dataset, self.max_length, labels)

    def batch(self, examples: EncodedText, indices: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Collate examples, padded to the longest of them, with ``attention_mask`` and ``labels``."""
        return collate(self.tokenizer, examples, indices, device)

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor], *, generate: bool = False) -> Tensor:
        """Compute the logits, (examples, labels)."""
        return model(**{key: value for key, value in batch.items() if key not in ("labels", OFFSETS)}).logits

    def remarks(self, examples: EncodedText) -> tuple[str, ...]:
        """Report how many texts fill the maximal length, and so may have been cut."""
        return full_length(examples, self.max_length)
