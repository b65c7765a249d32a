"""A client's training for one order: the assignments that its jobs become, and the moments that they continue."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedspan.clients.open_training import OpenTraining
from fedspan.core.values import Client, Job, OptimizerState
from fedspan.federation.progress import ClientData, ClientState
from fedspan.federation.protocol import Order

CLIENT = Client("east", 2, 0.5, 3, 3.0)
MOMENTS = OptimizerState({"exp_avg": {"fc/A": torch.ones(2, 3)}}, {"fc/A": 4})


def opened() -> OpenTraining:
    order = Order("train", round=5, attempt=1, lr=0.25, to="east", client=CLIENT, body=b"")
    data = ClientData(CLIENT, np.array([7, 3, 8]), np.array([1]), np.array([2]))
    job = Job({}, {}, (), generation=2)
    return OpenTraining(order, CLIENT, data, ClientState(), job, 1.5, "digest", {}, {"train": (MOMENTS, 2)})


def test_an_assignment_has_the_order_s_round_rate_and_noise_and_the_training_examples() -> None:
    training = opened()
    assignment = training.make_assignment(training.job, use_moments=True)
    assert assignment.job is training.job
    assert assignment.indices.tolist() == [7, 3, 8]
    facts = (assignment.client, assignment.round, assignment.lr, assignment.noise, assignment.origin)
    assert facts == ("east", 5, 0.25, 1.5, "digest")
    assert assignment.checkpoint is None


@pytest.mark.parametrize(
    ("changes", "use", "continued"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"generation": 3}, True, False),  # in other coordinates
        ({"phase": "second"}, True, False),  # another phase has moments of its own
    ],
)
def test_moments_are_continued_within_a_generation_of_a_phase(
    changes: dict[str, object], use: bool, continued: bool
) -> None:
    training = opened()
    assignment = training.make_assignment(replace(training.job, **changes), use)  # type: ignore[arg-type]
    assert (assignment.moments is MOMENTS) is continued
    assert continued or assignment.moments is None
