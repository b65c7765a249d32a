"""Weights that FSDP2 shards, in a group of one process: two are compared with one in test_processes.py."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from fedspan.core.base import BaseUpdate, materialize
from fedspan.core.lowrank import LowRank
from fedspan.models.adapted import AdaptedModel, hash_frozen
from fedspan.models.direct_uses import forbid_direct_uses
from fedspan.models.sharded import cut_shard, gather, get_shard, is_sharded, reshard, shard
from fedspan.training.trainers.install import FrozenBase, checksum_frozen
from helpers.refusals import refused


class Block(nn.Module):
    """Two layers, of which the second is called or its weight used directly."""

    def __init__(self, direct: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.direct = nn.Linear(4, 6), nn.Linear(6, 4, bias=False), direct

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return F.linear(h, self.second.weight) if self.direct else self.second(h)


class Tied(nn.Module):
    """An embedding in a block, whose weight is the output layer's too."""

    def __init__(self) -> None:
        super().__init__()
        embedding = nn.Embedding(5, 3)
        self.block, self.head = nn.Sequential(embedding), nn.Linear(3, 5, bias=False)
        self.head.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))


def build(direct: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(direct), Block(), nn.Linear(4, 2))


def adapt(model: nn.Sequential) -> AdaptedModel:
    targets = {f"0.{name}": model.get_submodule(f"0.{name}") for name in ("first", "second")}
    extras = {f"2.{name}": value for name, value in model[2].named_parameters()}
    return AdaptedModel(model, targets, extras)


def adapt_sharded(direct: bool = False) -> AdaptedModel:
    adapted = adapt(build(direct))
    shard(adapted.model, adapted.extras.values(), lambda module: isinstance(module, Block), torch.device("cpu"))
    adapted.begin_sharded()
    return adapted


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def test_only_frozen_weights_are_sharded_and_their_digest_is_that_of_the_whole_model() -> None:
    whole, adapted = adapt(build()), adapt_sharded()
    assert not whole.is_sharded
    assert adapted.is_sharded
    assert {name for name, value in adapted.model.named_parameters() if not is_sharded(value)} == set(adapted.extras)
    for name, value in adapted.model.named_parameters():
        assert torch.equal(gather(value), whole.model.get_parameter(name))
    expected = hash_frozen(whole.model, whole.get_values()).hexdigest()
    assert adapted.hash_frozen().hexdigest() == adapted.hash_frozen().hexdigest() == expected
    x = torch.randn(3, 4)
    assert torch.equal(adapted.model(x), whole.model(x))
    reshard(adapted.model)
    assert adapted.is_sharded


def test_the_base_of_a_server_state_is_added_to_a_sharded_weight_and_removed() -> None:
    adapted, whole = adapt_sharded(), adapt(build())
    frozen, x = FrozenBase(adapted.model, adapted), torch.randn(3, 4)
    total = {"0.first": LowRank(torch.randn(6, 2), torch.randn(2, 4), 0.5), "0.second": torch.randn(4, 6)}
    base = BaseUpdate(1, 0.5, total)
    for one in (adapted, whole):
        one.set_base(base)
    for name, layer in adapted.layers.items():
        assert torch.allclose(gather(layer.stored_weight), materialize(adapt(build()).get_weight(name), base, name))
    assert torch.allclose(adapted.model(x), whole.model(x))
    reshard(adapted.model)
    assert not frozen.list_changed(checksum_frozen(adapted.model, adapted.get_values()))
    get_shard(adapted.layers["0.first"].stored_weight)[0] += 1
    assert frozen.list_changed(checksum_frozen(adapted.model, adapted.get_values())) == ["0.first.weight"]
    adapted.set_base(BaseUpdate(2))
    assert hash_frozen(adapted.model, adapted.get_values()).hexdigest() == adapted.hash_frozen().hexdigest()


def test_a_shard_is_cut_as_fsdp_cuts_it_and_is_no_whole_weight() -> None:
    weight = adapt_sharded().layers["0.first"].stored_weight
    assert torch.equal(cut_shard(gather(weight), weight), get_shard(weight))
    with refused("trainer", r"whole weight of 0\.first is needed, of which each process has"):
        adapt_sharded().get_weight("0.first")


def test_a_direct_use_of_a_gathered_weight_is_found() -> None:
    x = torch.randn(3, 4)
    adapted = adapt_sharded()
    with forbid_direct_uses(adapted):
        adapted.model(x)
    adapted = adapt_sharded(direct=True)
    with refused("model.target_modules"), forbid_direct_uses(adapted):
        adapted.model(x)


def test_a_weight_that_is_tied_to_one_outside_of_its_block_is_gathered_with_the_whole_model() -> None:
    model = Tied().requires_grad_(False)
    x = torch.tensor([0, 3])
    expected = model(x)
    shard(model, (), lambda module: isinstance(module, nn.Sequential), torch.device("cpu"))
    assert torch.equal(model(x), expected)
