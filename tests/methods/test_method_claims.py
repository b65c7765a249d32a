"""What every method of the registry declares of itself, measured on real transformers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from watching import Play, Played, Round, differences, method_config

from fedspan.core.tensors import layer_of, split_extras, tensor_name
from fedspan.engines.reduction import Reducer
from fedspan.errors import FedspanError
from fedspan.methods.registry import METHODS
from fedspan.runs.build import Prepared, prepare

GLOBAL = [key for key, cls in METHODS.items() if not cls.claims.personal]
PERSONAL = [key for key, cls in METHODS.items() if cls.claims.personal]
HETEROGENEOUS = [key for key, cls in METHODS.items() if cls.claims.heterogeneous_ranks]
RANKS = {"east": 1, "north": 2, "south": 3, "west": 5}
SGD = {"optimizer": "sgd", "momentum": 0.9, "lr": 0.1}


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def errors(played: Played, round: Round) -> dict[str, float]:
    """By layer: how far the aggregated change of weight is from the mean of the clients' changes."""
    names = [layer.name for layer in played.layers]
    return {name: relative(played.global_change(name, round.after), played.mean_change(name, round)) for name in names}


@pytest.mark.parametrize("key", GLOBAL)
def test_aggregation_is_exact_where_claimed_and_measurably_not_elsewhere(key: str, played: Play) -> None:
    """1e-6 is a few roundings of float32 (6e-8 each): of the average, of the products folded into the base."""
    run = played(key)
    for round in run.rounds:
        found = errors(run, round)
        if METHODS[key].claims.exact:
            assert max(found.values()) < 1e-6
        else:
            assert min(found.values()) > 1e-3


@pytest.mark.parametrize("key", PERSONAL)
def test_what_a_personal_method_shares_is_the_mean_and_the_rest_stays_on_the_client(key: str, played: Play) -> None:
    run = played(key)
    for round in run.rounds:
        shares, state = run.weights(round.result.cohort), split_extras(round.after.state.tensors)[0]
        for name, value in state.items():
            mean = sum(shares[local.client] * local.trained.tensors[name].double() for local in round.trained)
            assert torch.allclose(value.double(), mean, rtol=1e-7, atol=1e-8)
        assert not round.after.state.base.moved
        for local in round.trained:
            kept = {**state, **round.after.memories[local.client]}
            own = {name: value for name, value in local.trained.tensors.items() if name not in state}
            assert own
            assert differences(own, {name: kept[name] for name in own}) == []


@pytest.mark.parametrize("training", [{}, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("key", METHODS)
def test_frozen_tensors_never_move(key: str, training: dict[str, object], played: Play) -> None:
    """Bit for bit, under momentum, weight decay and moments kept from rounds in which they did train."""
    run = played(key, **({"training": training, "federation": {"rounds": 3}} if training else {}))
    moved: set[str] = set()
    for local in (local for round in run.rounds for local in round.trained):
        before, after = local.job.tensors, local.trained.tensors
        assert before.keys() == after.keys()
        renewed = {tensor_name(layer, "P") for layer in local.job.parametrization} if local.job.refresh else set[str]()
        changed = {name for name in before if not torch.equal(before[name], after[name])} - renewed
        assert changed <= set(local.job.trainable_names)
        moved |= changed
    assert moved == {name for round in run.rounds for local in round.trained for name in local.job.trainable_names}


@pytest.mark.parametrize("key", METHODS)
def test_the_order_of_replies_does_not_matter(key: str, played: Play) -> None:
    run = played(key)
    for round in run.rounds[:3]:
        replies = [(call.args[1], call.result) for call in round.of("contribute")]
        for order in itertools.permutations(replies):
            reducer = Reducer([client for client, _ in order])
            for client, contribution in order:
                reducer.add(client.id, contribution)
            after = run.federation.method.update(round.before.state, reducer.result())
            assert differences(after, round.after.state) == []


@pytest.mark.parametrize("key", METHODS)
def test_nobody_writes_to_what_it_is_given(key: str, played: Play) -> None:
    """Neither the six functions nor training, a round or an evaluation."""
    run = played(key)
    assert {call.function for round in run.rounds for call in round.calls} == {
        *("sync", "start", "finish", "contribute", "update")
    }
    assert run.written == ()


@pytest.mark.parametrize("key", HETEROGENEOUS)
def test_clients_of_different_ranks_train_together(key: str, played: Play) -> None:
    """Each its own rank and so its own scaling; exact where the method is."""
    run = played(key, federation={"ranks": RANKS, "clients_per_round": 4, "rounds": 3})
    name = tensor_name(run.layers[0].name, "A")
    for round in run.rounds:
        assert {local.client: len(local.trained.tensors[name]) for local in round.trained} == RANKS
        scalings = {local.job.parametrization[layer_of(name)].scaling for local in round.trained}
        assert scalings == {6.0, 3.0, 2.0, 1.2}
        if METHODS[key].claims.exact:
            assert max(errors(run, round).values()) < 1e-6
    for ids, job in run.prepared.evaluator.models(run.rounds[-1].after):
        own = run.federation.members[ids[0]].client.scaling if len(ids) == 1 else 2.0
        assert job.parametrization[layer_of(name)].scaling == own


@pytest.mark.parametrize("key", [key for key in METHODS if key not in HETEROGENEOUS])
def test_different_ranks_are_refused_elsewhere(key: str, tiny_folder: Path, prepared: Prepared) -> None:
    with pytest.raises(FedspanError) as caught:
        prepare(method_config(tiny_folder, key, federation={"ranks": {"south": 5}}), prepared.partition)
    assert (caught.value.field, caught.value.value) == ("federation.ranks.south", 5)
    assert key in caught.value.expected
