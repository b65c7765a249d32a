"""Losses: of offset logits, bounded by example, and of embeddings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedspan.runs.setup import Prepared
from fedspan.tasks.bounded_losses import LOSS_BOUND, bound_loss, compute_guess_bound, get_loss_bound
from fedspan.tasks.classification import SequenceClassification
from fedspan.tasks.embedding_losses import (
    compute_contrastive,
    compute_cosent,
    compute_cosine_error,
    compute_multiple_negatives,
)
from fedspan.tasks.losses import OFFSETS
from fedspan.tasks.multi_label import MultiLabelClassification
from fedspan.tasks.preference import PreferenceOptions, PreferenceTuning
from fedspan.tasks.single_label import compute_class_offsets
from fedspan.tasks.task import Examples
from fedspan.tasks.trainer import TrainerExamples, TrainerTask
from helpers.fixed_logits import Fixed


@pytest.fixture
def task(prepared: Prepared) -> SequenceClassification:
    return SequenceClassification(prepared.task.tokenizer, prepared.labels, 5)


def test_a_batch_s_offsets_enter_the_loss_but_no_prediction(prepared: Prepared, task: SequenceClassification) -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    offsets = compute_class_offsets(np.array([2, 1, 1]), 4, 1.0)
    model, labels = Fixed(logits), torch.tensor([2, 1, 1])
    batch = {"input_ids": torch.ones(3, 2), "labels": labels, OFFSETS: offsets.expand(3, -1)}
    expected = -(logits + offsets).log_softmax(1)[range(3), labels]
    loss = task.compute_loss(model, batch)
    assert torch.equal(task.compute_client_losses(model, batch, torch.eye(3)), expected)
    assert float(loss.detach()) == pytest.approx(float(expected.mean().detach()))
    assert torch.equal(task.predict(model, batch), logits)
    loss.backward()
    assert logits.grad is not None
    assert (logits.grad[:, [0, 3]] == 0).all()  # classes that the client lacks
    assert (logits.grad[:, [1, 2]] != 0).all()


class Labeled:
    """Examples of which only the labels are known."""

    def __init__(self, labels: list[int]) -> None:
        self.labels = np.array(labels, np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> np.ndarray:
        return np.ones(len(self), np.int64)


TASK = SequenceClassification(None, ("a", "b", "c"), 16)  # type: ignore[arg-type]
BOUND = 2 * math.log(3)


def measure(logits_BK: Tensor, examples: Examples) -> float:
    rows = range(len(examples))
    metrics = {"loss": TASK.compute_metrics(logits_BK, examples, rows)["loss"], "accuracy": 0.5}
    bounded = bound_loss(TASK, metrics, logits_BK, examples, rows)
    assert bounded["accuracy"] == 0.5
    return bounded["loss"]


def test_each_example_counts_up_to_twice_the_loss_of_a_guess() -> None:
    logits_BK = torch.tensor([[0.0, 0.0, 0.0], [1e30, 0.0, 0.0], [3.0, 1.0, 0.0], [float("nan"), 0.0, 0.0]])
    examples = Labeled([0, 1, 0, 2])
    third = float(-logits_BK[2].double().log_softmax(0)[0])
    assert get_loss_bound(TASK) == compute_guess_bound(3) == pytest.approx(BOUND)
    assert measure(logits_BK, examples) == pytest.approx((math.log(3) + BOUND + third + BOUND) / 4)


def test_a_loss_within_the_bound_stays() -> None:
    logits_BK = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)) / 4
    examples = Labeled([row % 3 for row in range(20)])
    assert measure(logits_BK, examples) == pytest.approx(TASK.compute_metrics(logits_BK, examples, range(20))["loss"])


def test_biases_of_different_sizes_write_no_counts_into_a_loss() -> None:
    """Each label's bias is so much larger than the last one's that the unbounded loss is a number of three digits."""
    count, values = 12, set[float]()
    biases = -torch.tensor([0.0, 10.0, 10.0 * (count + 1)])
    splits = [split for split in itertools.product(range(count + 1), repeat=3) if sum(split) == count]
    for split in splits:
        examples = Labeled([label for label, times in enumerate(split) for _ in range(times)])
        values.add(round(measure(biases.expand(count, 3), examples), 6))
    assert len(splits) == 91
    assert len(values) == count + 1  # the number of examples with the first label, which loses nothing


def test_a_mean_is_bounded_where_single_losses_are_unknown() -> None:
    task = TrainerTask("loss")
    for loss, expected in ((1.5, 1.5), (1e30, LOSS_BOUND), (float("inf"), LOSS_BOUND), (-3.0, 0.0)):
        assert bound_loss(task, {"loss": loss}, None, TrainerExamples(20), range(20)) == {"loss": expected}
    assert bound_loss(task, {"accuracy": 0.5}, None, TrainerExamples(20), range(20)) == {"accuracy": 0.5}


@pytest.mark.parametrize(("loss", "bound"), [("sigmoid", 2 * math.log(2)), ("hinge", 2.0), ("ipo", 50.0)])
def test_preferences_count_up_to_twice_the_loss_of_the_reference(loss: str, bound: float) -> None:
    options = PreferenceOptions(loss=loss)  # type: ignore[arg-type]
    task = PreferenceTuning(None, options)  # type: ignore[arg-type]
    assert get_loss_bound(task) == pytest.approx(bound)


def test_several_labels_count_up_to_twice_a_guess_of_each() -> None:
    assert get_loss_bound(MultiLabelClassification.__new__(MultiLabelClassification)) == pytest.approx(2 * math.log(2))


LOSSES = pytest.importorskip("sentence_transformers.losses", reason="needs fedspan[sentence-transformers]")
EXAMPLES, FEATURES = 9, 5
OWNERS = ([0, 3, 4], [7], [1, 2, 5, 8])
"""Examples of each client; the one at 6 belongs to none."""


def draw_vectors() -> list[Tensor]:
    rng = torch.Generator().manual_seed(2)
    return [torch.randn(EXAMPLES, FEATURES, generator=rng) for _ in range(3)]


SCORES = torch.tensor([0.1, 0.9, 0.4, 0.4, 1.0, 0.0, 0.6, 0.3, 0.4])
LABELS = (SCORES > 0.35).float()
Ours = Callable[[list[Tensor], Tensor], Tensor]
CASES: dict[str, tuple[Callable[[], Any], Ours, Tensor | None]] = {
    "pairs": (
        lambda: LOSSES.MultipleNegativesRankingLoss(None),
        lambda vectors, mask: compute_multiple_negatives(vectors[0], vectors[1:2], mask, 20.0),
        None,
    ),
    "triplets": (
        lambda: LOSSES.MultipleNegativesRankingLoss(None, scale=7.0),
        lambda vectors, mask: compute_multiple_negatives(vectors[0], vectors[1:], mask, 7.0),
        None,
    ),
    "cosent": (
        lambda: LOSSES.CoSENTLoss(None),
        lambda vectors, mask: compute_cosent(F.cosine_similarity(*vectors[:2]), SCORES, mask, 20.0),
        SCORES,
    ),
    "cosine": (
        lambda: LOSSES.CosineSimilarityLoss(None),
        lambda vectors, mask: compute_cosine_error(F.cosine_similarity(*vectors[:2]), SCORES, mask),
        SCORES,
    ),
    "contrastive": (
        lambda: LOSSES.ContrastiveLoss(None, margin=0.7),
        lambda vectors, mask: compute_contrastive(F.cosine_similarity(*vectors[:2]), LABELS, mask, 0.7),
        LABELS,
    ),
}


def mask_of(*owners: list[int]) -> Tensor:
    mask_CB = torch.zeros(len(owners), EXAMPLES)
    for client, own in enumerate(owners):
        mask_CB[client, own] = 1
    return mask_CB


@pytest.mark.parametrize("name", CASES)
def test_each_clients_loss_and_gradient_are_the_librarys_on_its_own_vectors(name: str) -> None:
    make, compute, targets = CASES[name]
    vectors = [vectors.requires_grad_() for vectors in draw_vectors()]
    count = 3 if name == "triplets" else 2
    losses_C = compute(vectors, mask_of(*OWNERS))
    ours = torch.autograd.grad(losses_C.sum(), vectors[:count])
    expected = [
        make().compute_loss_from_embeddings(
            [one[own] for one in vectors[:count]], None if targets is None else targets[own]
        )
        for own in OWNERS
    ]
    torch.testing.assert_close(losses_C, torch.stack(expected), rtol=1e-5, atol=1e-6)
    theirs = torch.autograd.grad(torch.stack(expected).sum(), vectors[:count])
    for gradient, own in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, own, rtol=1e-4, atol=1e-6)
    assert not ours[0][6].any()  # the example of no client


@pytest.mark.parametrize("name", CASES)
def test_other_clients_vectors_change_nothing(name: str) -> None:
    compute, vectors = CASES[name][1], draw_vectors()
    before = compute(vectors, mask_of(*OWNERS))
    changed = [one.clone() for one in vectors]
    for one in changed:
        one[OWNERS[2]] += 1
    after = compute(changed, mask_of(*OWNERS))
    torch.testing.assert_close(after[:2], before[:2], rtol=0, atol=0)
    assert float(after[2]) != float(before[2])
