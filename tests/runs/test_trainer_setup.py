"""What trains a run's clients: the length of examples that all allow, and models that no privacy covers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fedspan.config import parse_config
from fedspan.config.run import RunConfig
from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.runs.trainer_setup import compute_max_length, require_private_model


def config(**changes: Any) -> RunConfig:
    return parse_config({"data": {"train": "train.csv"}, **changes})


class Positions(nn.Module):
    """Positions, as RoBERTa has them if they have a padding index."""

    def __init__(self, count: int, padding: int | None, limit: int | None = None) -> None:
        super().__init__()
        self.position_embeddings = nn.Embedding(count, 4, padding_idx=padding)
        self.word_embeddings = nn.Embedding(3, 4, padding_idx=0)
        if limit is not None:
            self.config = SimpleNamespace(max_position_embeddings=limit)


@pytest.mark.parametrize(
    ("tokenizer", "model", "expected"),
    [
        (None, Positions(600, None), 100),
        (SimpleNamespace(model_max_length=64), Positions(600, None), 64),
        (SimpleNamespace(model_max_length=10**30), Positions(600, None, 40), 40),
        (None, Positions(50, 1, 50), 48),  # positions count from after the padding index
        (None, Positions(50, None, 50), 50),
    ],
)
def test_the_shortest_of_all_limits_counts(tokenizer: Any, model: nn.Module, expected: int) -> None:
    assert compute_max_length(config(model={"max_length": 100}), tokenizer, model) == expected


def test_running_statistics_are_refused_under_privacy() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    norm = {"1.weight": model[1].weight, "1.bias": model[1].bias}
    buffers = {"1.running_mean": model[1].running_mean, "1.running_var": model[1].running_var}
    without, adapted = AdaptedModel(model, {"0": model[0]}, norm), AdaptedModel(model, {"0": model[0]}, norm, buffers)
    private = config(privacy={"mechanism": "dp-sgd", "noise": 1.0})
    require_private_model(config(), adapted)
    require_private_model(private, without)
    with pytest.raises(FedspanError, match=r"running statistics \(1\.running_mean, \.\.\.\) come from raw") as caught:
        require_private_model(private, adapted)
    assert (caught.value.field, caught.value.value) == ("privacy", "dp-sgd")
    assert torch.equal(model[1].running_mean, torch.zeros(3))
