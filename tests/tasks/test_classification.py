"""Sequence classification: what is encoded, padded, lost and measured."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedspan.errors import FedspanError
from fedspan.runs.setup import Prepared, prepare
from fedspan.tasks.classification import SequenceClassification
from fedspan.tasks.encoding import EncodedText
from fedspan.tasks.single_label import compute_class_offsets
from helpers import tiny
from helpers.fixed_logits import Fixed

CPU = torch.device("cpu")
TEXTS = ["lab1 word2", "billing3 word1 unheard word5 word6", "symptom2"]


@pytest.fixture
def task(prepared: Prepared) -> SequenceClassification:
    return SequenceClassification(prepared.task.tokenizer, prepared.labels, 5)


@pytest.fixture
def encoded(task: SequenceClassification) -> EncodedText:
    return task.encode(datasets.Dataset.from_dict({"text": TEXTS, "label": [2, 1, 3]}))


@pytest.mark.parametrize("pairs", [False, True])
def test_batches_are_those_of_the_tokenizer_s_own_padding(task: SequenceClassification, pairs: bool) -> None:
    columns = {"text": TEXTS, "label": [2, 1, 3], **({"text_pair": TEXTS[::-1]} if pairs else {})}
    encoded, rows = task.encode(datasets.Dataset.from_dict(columns)), [2, 0, 0, 1]
    made = dict(task.collate(encoded, rows, CPU))
    chosen = {key: [values[row] for row in rows] for key, values in encoded.encodings.items()}
    wanted = task.tokenizer.pad(chosen, padding_side="right", return_attention_mask=True, return_tensors="pt")
    assert torch.equal(made.pop("labels"), torch.tensor([3, 2, 2, 1]))
    assert made.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(made[key], value)
        assert made[key].dtype == value.dtype


def test_texts_are_encoded_once_and_cut(task: SequenceClassification, encoded: EncodedText) -> None:
    """<s>, words, </s>, at most 5 tokens; an unheard word becomes <unk> (1)."""
    vocabulary = task.tokenizer.get_vocab()
    assert list(encoded.encodings["input_ids"]) == [
        [2, vocabulary["lab1"], vocabulary["word2"], 3],
        [2, vocabulary["billing3"], vocabulary["word1"], 1, 3],
        [2, vocabulary["symptom2"], 3],
    ]
    assert "attention_mask" not in encoded.encodings
    assert encoded.lengths.tolist() == [4, 5, 3]
    assert encoded.labels.tolist() == [2, 1, 3]
    assert len(encoded) == 3


def test_pairs_are_encoded_together(task: SequenceClassification) -> None:
    data = {"text": ["lab1", "lab2"], "text_pair": ["word1", "word2 word3"], "label": [0, 1]}
    vocabulary = task.tokenizer.get_vocab()
    ids = task.encode(datasets.Dataset.from_dict(data)).encodings["input_ids"]
    assert ids[0] == [2, vocabulary["lab1"], 3, vocabulary["word1"], 3]
    assert len(ids[1]) == 5


def test_a_batch_is_padded_to_its_longest_text(task: SequenceClassification, encoded: EncodedText) -> None:
    batch = task.collate(encoded, [2, 0, 2], CPU)
    assert batch["input_ids"].shape == (3, 4)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch["input_ids"][0, 3] == task.tokenizer.pad_token_id
    assert torch.equal(batch["input_ids"][0], batch["input_ids"][2])
    assert batch["labels"].tolist() == [3, 2, 3]
    assert batch["labels"].dtype == torch.int64


def test_the_loss_is_the_mean_cross_entropy_in_float32(task: SequenceClassification, encoded: EncodedText) -> None:
    logits = torch.tensor([[0.1, 0.2, 3.0, -1.0], [2.0, 0.0, 0.5, 0.25]], dtype=torch.bfloat16)
    model = Fixed(logits)
    loss = task.compute_loss(model, task.collate(encoded, [0, 1], CPU))
    wide = logits.double()
    expected = -(wide.log_softmax(1)[0, 2] + wide.log_softmax(1)[1, 1]) / 2
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert set(model.asked) == {"input_ids", "attention_mask"}  # the model is not shown the labels


def test_metrics_are_those_of_the_given_examples(task: SequenceClassification) -> None:
    """Labels 0 1 1 3, predicted 0 1 0 0: F1 of 0 is 2/4, of 1 is 2/3, of 3 is 0; label 2 does not occur."""
    labels = np.array([3, 9, 0, 1, 1])
    examples = EncodedText({}, labels, np.ones(5, dtype=np.int64))
    logits = torch.tensor([[4.0, 1, 0, 0], [0, 5, 0, 1], [2, 1, 0, 0], [3, 0, 1, 0]])
    found = task.compute_metrics(logits, examples, [2, 3, 4, 0])
    assert found["accuracy"] == 0.5
    assert found["macro_f1"] == pytest.approx((2 / 4 + 2 / 3 + 0) / 3)
    assert found["loss"] == pytest.approx(float(F.cross_entropy(logits, torch.tensor([0, 1, 1, 3]))))


def test_glue_s_metrics(prepared: Prepared) -> None:
    """Matthews correlation and F1 of the second of two labels, from the counts by hand."""
    task = SequenceClassification(prepared.task.tokenizer, ("no", "yes"), 5)
    truth, guess = [1, 1, 1, 1, 0, 0, 0, 1], [1, 1, 0, 1, 0, 1, 0, 0]
    examples = task.encode(datasets.Dataset.from_dict({"text": ["lab1"] * 8, "label": truth}))
    logits = torch.eye(2)[torch.tensor(guess)]
    metrics = task.compute_metrics(logits, examples, list(range(8)))
    tp, fp, fn, tn = 3, 1, 2, 2
    assert metrics["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))
    matthews = (tp * tn - fp * fn) / ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5
    assert metrics["matthews"] == pytest.approx(matthews)
    assert task.compute_metrics(torch.eye(2)[[1] * 8], examples, list(range(8)))["matthews"] == 0.0
    assert task.decode_predictions(logits)[:3] == ["yes", "yes", "no"]
    assert task.decode_targets(examples, [0, 4]) == ["yes", "no"]


def test_f1_is_of_two_labels(tiny_folder: Path) -> None:
    with pytest.raises(FedspanError, match="Expected macro_f1, because there are 4 labels") as caught:
        prepare(tiny.config(tiny_folder, evaluation={"metric": "f1"}))
    assert (caught.value.field, caught.value.value) == ("evaluation.metric", "f1")


def test_logits_are_adjusted_to_the_classes_of_a_client() -> None:
    offsets = compute_class_offsets(np.array([2, 0, 2, 2]), 4, 0.5)
    assert offsets.tolist() == pytest.approx([0.5 * np.log(0.25), -np.inf, 0.5 * np.log(0.75), -np.inf])
    assert offsets.dtype == torch.float32
    assert compute_class_offsets(np.array([1, 1]), 2, 1.0).tolist() == [-np.inf, 0.0]
