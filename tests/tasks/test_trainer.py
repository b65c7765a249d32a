"""The task of users' own trainers: the number of examples is known, and everything else is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedspan.errors import FedspanError
from fedspan.tasks.settings import TaskSettings
from fedspan.tasks.trainer import TRAINER, TrainerExamples, TrainerTask


def test_examples_are_a_number_and_cost_alike() -> None:
    examples = TrainerExamples(3)
    assert len(examples) == 3
    assert examples.lengths.tolist() == [1, 1, 1]
    assert examples.lengths.dtype == np.int64
    assert TrainerExamples(0).lengths.shape == (0,)


def test_the_task_has_the_metric_of_its_settings() -> None:
    settings = TaskSettings(task="trainer", labels=(), max_length=8, metric="accuracy")
    assert TRAINER.build(None, settings, None).metric == "accuracy"
    assert TrainerTask("loss").describe_examples(TrainerExamples(3)) == ()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("collate", (TrainerExamples(1), [0], torch.device("cpu"))),
        ("compute_loss", (torch.nn.Identity(), {})),
        ("compute_client_losses", (torch.nn.Identity(), {}, torch.ones(1, 1))),
        ("predict", (torch.nn.Identity(), {})),
        ("compute_metrics", (torch.zeros(1), TrainerExamples(1), [0])),
        ("encode", (None,)),
        ("decode_predictions", (torch.zeros(1),)),
        ("decode_targets", (TrainerExamples(1), [0])),
    ],
)
def test_what_needs_examples_is_refused_with_the_way_out(name: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(FedspanError, match=r"are its owners' trainers' own\. Load the adapter with PEFT"):
        getattr(TrainerTask("loss"), name)(*arguments)
