"""Losses: with offsets of the logits, and bounded by example."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedspan.assembly.run import Prepared
from fedspan.tasks.classification import SequenceClassification
from fedspan.tasks.losses import OFFSETS, bound_loss, compute_guess_bound, get_loss_bound
from fedspan.tasks.multi_label import MultiLabelClassification
from fedspan.tasks.preference import PreferenceOptions, PreferenceTuning
from fedspan.tasks.single_label import compute_class_offsets
from fedspan.tasks.task import Examples
from fedspan.tasks.trainer import TrainerExamples, TrainerTask
from helpers.fixed_logits import Fixed


@pytest.fixture
def task(prepared: Prepared) -> SequenceClassification:
    return SequenceClassification(prepared.task.tokenizer, prepared.labels, 5)


def test_a_batch_s_offsets_enter_the_loss_but_no_prediction(task: SequenceClassification) -> None:
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


TASK = SequenceClassification(None, ("a", "b", "c"), 16)
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


def test_a_mean_is_left_out_where_single_losses_are_unknown() -> None:
    """One example may change it by as much as the whole range, which no noise would hide."""
    metrics = {"loss": 1.5, "accuracy": 0.5}
    assert bound_loss(TrainerTask("loss"), metrics, None, TrainerExamples(20), range(20)) == {"accuracy": 0.5}


@pytest.mark.parametrize(("loss", "bound"), [("sigmoid", 2 * math.log(2)), ("hinge", 2.0), ("ipo", 50.0)])
def test_preferences_count_up_to_twice_the_loss_of_the_reference(loss: str, bound: float) -> None:
    options = PreferenceOptions(loss=loss)
    task = PreferenceTuning(None, options)
    assert get_loss_bound(task) == pytest.approx(bound)


def test_several_labels_count_up_to_twice_a_guess_of_each() -> None:
    assert get_loss_bound(MultiLabelClassification.__new__(MultiLabelClassification)) == pytest.approx(2 * math.log(2))
