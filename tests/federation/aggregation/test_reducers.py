"""The reducer that settings select, told by what it makes of the same replies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedspan.core.values import Client, Contribution
from fedspan.federation.aggregation.reducers import create_reducer
from fedspan.federation.aggregation.reduction import PrivateReducer, Reducer
from fedspan.federation.aggregation.robust import (
    CoordinateReducer,
    FlameReducer,
    GeometricMedianReducer,
    MultiKrumReducer,
)
from fedspan.federation.settings import RoundSettings
from fedspan.training.jobs import Privacy

CLIENTS = [Client(f"c{number}", 2, 1.0, 5, 1.0 + (number == 0)) for number in range(5)]
VALUES = (0.0, 1.0, 2.0, 5.0, 100.0)


def reduce(*, round: int = 0, **settings: Any) -> torch.Tensor:
    reducer = create_reducer(
        RoundSettings(1, **settings), CLIENTS, len(CLIENTS), round, lambda: {"fc/A": torch.zeros(1, 2)}
    )
    for client, value in zip(CLIENTS, VALUES, strict=True):
        reducer.add(client.id, Contribution(sum={"fc/A": torch.tensor([[value, -value]])}))
    return reducer.compute_result().mean["fc/A"]


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, Reducer),
        ({"reduction": "median"}, CoordinateReducer),
        ({"reduction": "trimmed-mean"}, CoordinateReducer),
        ({"reduction": "multi-krum"}, MultiKrumReducer),
        ({"reduction": "geometric-median"}, GeometricMedianReducer),
        ({"reduction": "flame"}, FlameReducer),
    ],
)
def test_every_rule_has_a_reducer(settings: dict[str, Any], kind: type[Reducer]) -> None:
    reducer = create_reducer(RoundSettings(1, **settings), CLIENTS, 5, 0, lambda: {"fc/A": torch.zeros(1, 2)})
    assert type(reducer) is kind


def test_rules_and_their_trim_decide_the_result() -> None:
    assert reduce() == pytest.approx(torch.tensor([[108 / 6, -108 / 6]]))  # the first client counts twice
    assert reduce(reduction="median").tolist() == [[2.0, -2.0]]
    assert reduce(reduction="trimmed-mean", trim=0.2) == pytest.approx(torch.tensor([[8 / 3, -8 / 3]]))
    assert reduce(reduction="trimmed-mean", trim=0.4).tolist() == [[2.0, -2.0]]
    assert float(reduce(reduction="multi-krum", trim=0.2)[0, 0]) < 5


def test_the_noise_of_flame_is_of_the_seed_and_the_round() -> None:
    first = reduce(reduction="flame", seed=1)
    assert torch.equal(reduce(reduction="flame", seed=1), first)
    assert not torch.equal(reduce(reduction="flame", seed=2), first)
    assert not torch.equal(reduce(reduction="flame", seed=1, round=1), first)


def test_central_privacy_surrounds_the_mean() -> None:
    """Clipped to 1 about an untrained reply of zeros, the last reply moves the sum by 1 and not by 141."""
    privacy = Privacy("central", clip=1.0, noise=1e-6)
    settings = RoundSettings(1, privacy=privacy)
    reducer = create_reducer(settings, CLIENTS, 5, 0, lambda: {"fc/A": torch.zeros(1, 2)})
    assert isinstance(reducer, PrivateReducer)
    half = 0.5**0.5
    assert reduce(privacy=privacy) == pytest.approx(torch.tensor([[4 * half / 5, -4 * half / 5]]), abs=1e-4)
