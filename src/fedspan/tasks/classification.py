"""Sequence classification: encoding, batches, cross-entropy, accuracy and macro-F1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import datasets
import numpy as np
import torch
from sklearn.metrics import f1_score
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

__all__ = ["EncodedText", "SequenceClassification"]


@dataclass(frozen=True)
class EncodedText:
    """Tokenised texts with their labels.

    Args:
        encodings: by tokenizer output (``input_ids``, ``token_type_ids``), one list of ids an example.
        labels: index into the label list, int64, (examples,).
        lengths: tokens of each example, int64, (examples,).
    """

    encodings: Mapping[str, list[list[int]]]
    labels: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


class SequenceClassification:
    """One label for a text or a pair of texts, with any Hugging Face model that has a sequence classification head.

    Args:
        tokenizer: the model's.
        labels: names by index.
        max_length: tokens beyond are cut.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, labels: Sequence[str], max_length: int) -> None:
        self.tokenizer = tokenizer
        self.labels = tuple(labels)
        self.max_length = max_length

    def encode(self, dataset: datasets.Dataset) -> EncodedText:
        """Tokenise a data set with columns ``text``, maybe ``text_pair``, and ``label`` (indices), once."""
        texts = list(dataset["text"])
        pairs = list(dataset["text_pair"]) if "text_pair" in dataset.column_names else None
        encoded = self.tokenizer(texts, pairs, truncation=True, max_length=self.max_length)
        encodings = {key: list(value) for key, value in encoded.items() if key != "attention_mask"}
        lengths = np.array([len(ids) for ids in encodings["input_ids"]], dtype=np.int64)
        return EncodedText(encodings, np.array(dataset["label"], dtype=np.int64), lengths)

    def batch(self, examples: EncodedText, indices: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Examples padded to the longest of them, with ``attention_mask`` and ``labels``."""
        chosen = {key: [values[index] for index in indices] for key, values in examples.encodings.items()}
        padded = self.tokenizer.pad(chosen, padding="longest", return_attention_mask=True, return_tensors="pt")
        batch = {key: value.to(device) for key, value in padded.items()}
        batch["labels"] = torch.from_numpy(examples.labels[list(indices)]).to(device)
        return batch

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy, in float32."""
        return F.cross_entropy(self.predict(model, batch).float(), batch["labels"])

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits, (examples, labels)."""
        return model(**{key: value for key, value in batch.items() if key != "labels"}).logits

    def metrics(self, predictions: Tensor, examples: EncodedText, indices: Sequence[int]) -> dict[str, float]:
        """``loss``, ``accuracy`` and ``macro_f1`` (over the labels that occur, as predicted or as true)."""
        truth = examples.labels[np.asarray(indices, dtype=np.int64)]
        guess = predictions.argmax(1).numpy()
        return {
            "loss": float(F.cross_entropy(predictions.float(), torch.from_numpy(truth))),
            "accuracy": float((guess == truth).mean()),
            "macro_f1": float(f1_score(truth, guess, average="macro", zero_division=0)),  # pyright: ignore
        }
