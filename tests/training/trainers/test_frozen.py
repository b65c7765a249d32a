"""The reference of frozen weights: what counts as a change, and what a server state's base may change."""

from __future__ import annotations

import torch
from torch import nn

from fedspan.core.base import BaseUpdate
from fedspan.core.lowrank import LowRank
from fedspan.models.adapted import AdaptedModel
from fedspan.training.trainers.frozen import FrozenBase, checksum_frozen


def model() -> tuple[nn.Sequential, AdaptedModel]:
    torch.manual_seed(0)
    root = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    return root, AdaptedModel(root, {"0": root[0]}, {})


def moved(seed: int) -> BaseUpdate:
    generator = torch.Generator().manual_seed(seed)
    pair = LowRank(torch.randn(3, 1, generator=generator), torch.randn(1, 4, generator=generator))
    return BaseUpdate(total={"0": pair})


def test_the_order_of_values_counts() -> None:
    first = nn.ParameterDict({"weight": nn.Parameter(torch.arange(6.0))})
    other = nn.ParameterDict({"weight": nn.Parameter(torch.arange(6.0).flip(0))})
    assert checksum_frozen(first, {}) != checksum_frozen(other, {})


def test_long_tensors_are_compared_across_chunks() -> None:
    value = torch.arange(2**21 + 8, dtype=torch.int32)
    found = checksum_frozen(nn.ParameterDict({"a": nn.Parameter(value, requires_grad=False)}), {})
    swapped = torch.cat([value[2**20 : 2**21], value[: 2**20], value[2**21 :]])
    assert found != checksum_frozen(nn.ParameterDict({"a": nn.Parameter(swapped, requires_grad=False)}), {})


def test_a_new_base_is_no_change_and_a_change_under_it_is() -> None:
    root, adapted = model()
    frozen = FrozenBase(root, adapted)
    for base in (moved(1), moved(2), BaseUpdate()):
        adapted.set_base(base)
        assert frozen.list_changed(checksum_frozen(root, {})) == []
    adapted.set_base(moved(3))
    assert frozen.list_changed(checksum_frozen(root, {})) == []
    with torch.no_grad():
        root[0].weight[0, 0] += 1  # pyright: ignore
    assert frozen.list_changed(checksum_frozen(root, {})) == ["0.weight"]


def test_a_change_outside_of_the_target_layers_is_found_under_every_base() -> None:
    root, adapted = model()
    frozen = FrozenBase(root, adapted)
    with torch.no_grad():
        root[1].bias[0] += 1  # pyright: ignore
    adapted.set_base(moved(1))
    assert frozen.list_changed(checksum_frozen(root, {})) == ["1.bias"]


def test_a_target_layer_that_changed_before_the_first_base_is_found() -> None:
    root, adapted = model()
    frozen = FrozenBase(root, adapted)
    with torch.no_grad():
        root[0].weight[0, 0] += 1  # pyright: ignore
    adapted.set_base(moved(1))
    assert "0.weight" in frozen.list_changed(checksum_frozen(root, {}))
