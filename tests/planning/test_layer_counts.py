"""Tensors of a target layer that methods train, hold and store, counted by formula on a wide and a tall layer."""

from __future__ import annotations

import pytest
import torch

from fedspan.core.lowrank import LowRank
from fedspan.core.values import LayerSpec, Spec
from fedspan.methods.registry import METHODS
from fedspan.planning.layer_counts import Computation, StandIn, count_layer

WIDE, TALL = LayerSpec("wide", 4, 9), LayerSpec("tall", 9, 6)


@pytest.mark.parametrize("layer", [WIDE, TALL], ids=["wide", "tall"])
@pytest.mark.parametrize("rank", [1, 3])
def test_lora_trains_and_holds_its_factors(layer: LayerSpec, rank: int) -> None:
    factors = rank * (layer.out_features + layer.in_features)
    counts = count_layer(METHODS["fedit"](spec=Spec((layer,), clients=5), r=rank), layer, rank)
    assert counts.trained == (factors, factors)  # in the first two rounds
    assert (counts.held, counts.stored) == (factors, factors)
    assert counts.computation == Computation(rank=rank, moves=frozenset("AB"))


def test_frozen_factors_are_held_and_do_not_move() -> None:
    """FFA-LoRA trains B alone, and RoLoRA one factor after the other."""
    counts = count_layer(METHODS["ffa-lora"](spec=Spec((WIDE,), clients=5), r=2), WIDE, 2)
    assert set(counts.trained) == {2 * 4}
    assert counts.held == 2 * (4 + 9)
    assert counts.computation.moves == frozenset("B")
    turns = count_layer(METHODS["rolora"](spec=Spec((WIDE,), clients=5), r=2), WIDE, 2)
    assert turns.trained == (2 * 4, 2 * 9)


def test_full_fine_tuning_trains_a_whole_weight() -> None:
    counts = count_layer(METHODS["fedavg"](spec=Spec((TALL,), clients=5)), TALL, 1)
    assert set(counts.trained) == {9 * 6}
    assert counts.computation.rank == 0
    assert counts.computation.moves


@pytest.mark.parametrize(
    ("computation", "shapes"),
    [
        (Computation(), {}),
        (Computation(rank=2), {"A": (2, 9), "B": (4, 2)}),
        (Computation(matrix="held"), {"D": (4, 9)}),
        (Computation(base=False, weight="made", rank=3), {"A": (3, 9), "B": (4, 3), "W": (4, 9)}),
    ],
)
def test_a_stand_in_computes_with_what_the_computation_says(
    computation: Computation, shapes: dict[str, tuple[int, int]]
) -> None:
    stand_in = StandIn(computation)
    assert stand_in.shapes(4, 9) == shapes
    slots = {name: torch.randn(shape) for name, shape in shapes.items()}
    effective = stand_in.compute_effective(slots)
    assert effective.base is computation.base
    assert (effective.weight is None) is (computation.weight is None)
    if computation.weight is not None:
        assert effective.weight is not slots["W"]
        assert torch.equal(effective.weight, slots["W"])
    if computation.rank:
        assert isinstance(effective.pair, LowRank)
        assert (slots["B"], slots["A"]) == (effective.pair.B, effective.pair.A)
    else:
        assert effective.pair is slots.get("D")
