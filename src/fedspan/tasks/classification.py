"""Sequence classification: cross-entropy; accuracy, F1 and Matthews correlation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import datasets
import numpy as np
import torch
from sklearn.metrics import f1_score, matthews_corrcoef
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from fedspan.tasks.encoding import EncodedText, collate, encode_texts, full_length

__all__ = ["SequenceClassification"]


class SequenceClassification:
    """One label for a text or a pair of texts, with any Hugging Face model that has a sequence classification head.

    Args:
        tokenizer: the model's.
        labels: names by index.
        max_length: tokens beyond are cut.
        metric: by which rounds are compared.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, labels: Sequence[str], max_length: int, metric: str = "accuracy"
    ) -> None:
        self.tokenizer = tokenizer
        self.labels = tuple(labels)
        self.max_length = max_length
        self.metric = metric

    def encode(self, dataset: datasets.Dataset) -> EncodedText:
        """Tokenise a data set with columns ``text``, maybe ``text_pair``, and ``label`` (indices), once."""
        labels = np.array(dataset["label"], dtype=np.int64)
        return encode_texts(self.tokenizer, dataset, self.max_length, labels)

    def batch(self, examples: EncodedText, indices: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Examples padded to the longest of them, with ``attention_mask`` and ``labels``."""
        return collate(self.tokenizer, examples, indices, device)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy, in float32."""
        return F.cross_entropy(self.predict(model, batch).float(), batch["labels"])

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor], *, thorough: bool = False) -> Tensor:
        """Logits, (examples, labels)."""
        return model(**{key: value for key, value in batch.items() if key != "labels"}).logits

    def metrics(self, predictions: Tensor, examples: EncodedText, indices: Sequence[int]) -> dict[str, float]:
        """``loss``, ``accuracy``, ``macro_f1`` (over the labels that occur, as predicted or as true), ``matthews``.

        With two labels also ``f1``, of the second one, as GLUE measures MRPC. The Matthews correlation is 0 where all
        predictions or all labels are the same, as in scikit-learn.
        """
        truth = examples.labels[np.asarray(indices, dtype=np.int64)]
        guess = predictions.argmax(1).numpy()
        scores = {
            "loss": float(F.cross_entropy(predictions.float(), torch.from_numpy(truth))),
            "accuracy": float((guess == truth).mean()),
            "macro_f1": float(f1_score(truth, guess, average="macro", zero_division=0)),  # pyright: ignore
            # scikit-learn's 0 of a single label comes with a warning
            "matthews": float(matthews_corrcoef(truth, guess)) if len({*truth, *guess}) > 1 else 0.0,
        }
        if len(self.labels) == 2:
            scores["f1"] = float(f1_score(truth, guess, average="binary", zero_division=0))  # pyright: ignore
        return scores

    def remarks(self, examples: EncodedText) -> tuple[str, ...]:
        """How many texts fill the whole length, and so may have been cut."""
        return full_length(examples, self.max_length)

    def answers(self, predictions: Tensor) -> list[str]:
        """The most probable label of each."""
        return [self.labels[index] for index in predictions.argmax(1).tolist()]

    def truths(self, examples: EncodedText, indices: Sequence[int]) -> list[str]:
        """The label of each."""
        return [self.labels[index] for index in examples.labels[list(indices)].tolist()]
