"""Losses with offsets of the logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedspan.runs.setup import Prepared
from fedspan.tasks.classification import SequenceClassification
from fedspan.tasks.losses import OFFSETS
from fedspan.tasks.single_label import compute_class_offsets
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
