"""What every method of the registry declares of itself, measured on real transformers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedspan.core.parametrization import LoRA
from fedspan.core.tensors import Tensors, is_extra, join_tensor_name, select_slots, split_extras
from fedspan.core.values import Client, Contribution, Reduced
from fedspan.errors import FedspanError
from fedspan.federation.aggregation.reduction import Reducer
from fedspan.methods.registry import METHODS
from fedspan.runs.setup import Prepared, prepare
from helpers.claim_measures import errors, relative
from helpers.families import FAMILIES, UNLIKE, methods_by_family
from helpers.watched_rounds import MethodRun, Round, RunMethod, differences, method_config

GLOBAL = [key for key, cls in METHODS.items() if not cls.claims.personal]
PERSONAL = [key for key, cls in METHODS.items() if cls.claims.personal]
SUMS = [key for key, cls in METHODS.items() if cls.claims.reduction == "sum"]
HETEROGENEOUS = [key for key, cls in METHODS.items() if cls.claims.heterogeneous_ranks]
BUDGETS = [key for key, cls in METHODS.items() if cls.claims.budgets]
RANKS = {"east": 1, "north": 2, "south": 3, "west": 5}
SGD = {"optimizer": "sgd", "momentum": 0.9, "lr": 0.1}


@pytest.mark.parametrize("key", methods_by_family(GLOBAL))
def test_aggregation_is_exact_where_claimed_and_measurably_not_elsewhere(key: str, run_method: RunMethod) -> None:
    """1e-6 is a few roundings of float32 (6e-8 each): of the average, of the products folded into the base."""
    run = run_method(key)
    stepped = [round for round in run.rounds if any(local.trained.steps for local in round.trained)]  # no mere probe
    found = [errors(run, round) for round in stepped]
    if METHODS[key].claims.exact:
        assert max(max(layers.values()) for layers in found) < 1e-6
    else:
        assert max(min(layers.values()) for layers in found) > 1e-3


@pytest.mark.parametrize("key", methods_by_family(PERSONAL))
def test_what_a_personal_method_shares_is_the_mean_and_the_rest_stays_on_the_client(
    key: str, run_method: RunMethod
) -> None:
    """Where the shared tensors begin again, the mean has gone into the base: the shared weight is its weight."""
    run = run_method(key)
    for round in run.rounds:
        shares, state = run.weights(round.result.cohort), split_extras(round.after.state.tensors)[0]
        last = {local.client: local for local in round.trained}.values()  # of a client's phases
        means = {
            name: torch.stack([shares[one.client] * one.trained.tensors[name].double() for one in last]).sum(0)
            for name in state
        }
        if anew := round.after.state.generation != round.before.state.generation:
            job = run.prepared.evaluator.build_job(round.after, None)
            for layer, parametrization in job.parametrization.items():
                averaged = run.change(layer, round.before.state.base, parametrization, {**job.tensors, **means})
                assert relative(run.global_change(layer, round.after), averaged) < 1e-6
        else:
            for name, value in state.items():
                assert torch.allclose(value.double(), means[name], rtol=1e-7, atol=1e-8)
        assert (round.after.state.base.round > round.before.state.base.round) == anew
        for local in last:
            shared, kept = round.after.state.tensors.keys(), round.after.memories[local.client]
            own = {name: value for name, value in local.trained.tensors.items() if name in kept or name not in shared}
            assert own
            assert differences(own, {name: kept[name] for name in own}) == []


def sends(run: MethodRun) -> str:
    """What wrappers may make of the replies: the claim's own words."""
    values, something = True, False
    for round in run.rounds:
        method, everything = run.federation.method, run.prepared.evaluator.build_job(round.before, None).tensors
        replies = split_messages(round)
        something |= any(replies.values())
        for contribution, reply in ((call.result, dict(call.args[0].tensors)) for call in round.of("contribute")):
            identity = contribution.weight is None and differences(contribution.sum, reply) == []
            values &= method.declare_claims().reduction == "stack" or identity
        for local in round.trained:
            start = local.job.tensors
            values &= all(
                name in start and name in everything and torch.equal(start[name], everything[name])
                for name in replies[local.client]
            )
    return "nothing" if not something else "values" if values else "other"


def split_messages(round: Round) -> dict[str, Tensors]:
    """The target layers' tensors in every client's reply."""
    pairs = zip(round.result.transfers, round.messages(), strict=True)
    return {one.client: split_extras(message.tensors)[0] for one, message in pairs if one.direction == "up"}


@pytest.mark.parametrize("key", methods_by_family())
def test_replies_hold_what_is_claimed_of_them(key: str, run_method: RunMethod) -> None:
    """Wrappers rely on it: new values of tensors that all start from alike, under their names, or something else."""
    assert sends(run_method(key)) == METHODS[key].claims.sends


@pytest.mark.parametrize("key", methods_by_family(SUMS))
def test_tensors_with_the_names_of_a_job_are_new_values_from_a_common_start(key: str, run_method: RunMethod) -> None:
    """So a wrapper may send their changes instead, except of the slots that are claimed to be whole."""
    run = run_method(key)
    whole = run.federation.method.declare_claims().whole
    checked: set[str] = set()
    for round in run.rounds:
        common = split_extras(run.prepared.evaluator.build_job(round.before, None).tensors)[0]
        started = {local.client: local.job.tensors for local in reversed(round.trained)}  # in the first phase
        for call in round.of("contribute"):
            reply, client = call.args
            for name in reply.tensors.keys() & started.get(client.id, {}).keys() & common.keys():
                is_new_value = torch.equal(started[client.id][name], common[name]) and (
                    call.result.sum.get(name) is reply.tensors[name]
                )
                assert is_new_value != (name.rpartition("/")[2] in whole)
                checked.add(name.rpartition("/")[2])
    assert checked >= set(whole)
    assert bool(checked) == (key not in ("fedask", "local-only", "lora-a2"))  # sketches, nothing, and changes


@pytest.mark.parametrize("key", methods_by_family())
def test_the_base_moves_every_round_where_claimed(key: str, run_method: RunMethod) -> None:
    rounds = run_method(key).rounds
    assert METHODS[key].claims.moves_base == all(one.after.state.base.round == one.after.state.round for one in rounds)


@pytest.mark.parametrize("key", methods_by_family())
def test_messages_change_the_base_where_claimed(key: str, run_method: RunMethod) -> None:
    """Clients of the other methods refuse a message that does."""
    run = run_method(key)
    states = [run.rounds[0].before.state, *(one.after.state for one in run.rounds)]
    sends_base = any(run.federation.method.sync(state, None).base is not None for state in states)
    assert METHODS[key].claims.sends_base == sends_base


@pytest.mark.parametrize(
    ("key", "training"),
    [
        pytest.param(key, training, id=f"{key}-{name}", marks=() if key in quick else pytest.mark.slow)
        for name, training, quick in (("adamw", {}, FAMILIES), ("sgd", SGD, UNLIKE))
        for key in METHODS
    ],
)
def test_frozen_tensors_never_move(key: str, training: dict[str, object], run_method: RunMethod) -> None:
    """Bit for bit, under momentum, weight decay and moments kept from rounds in which they did train."""
    run = run_method(key, **({"training": training, "federation": {"rounds": 3}} if training else {}))
    moved: set[str] = set()
    stepped = [local for round in run.rounds for local in round.trained if local.trained.steps]  # no mere probe
    for local in stepped:
        before, after = local.job.tensors, local.trained.tensors
        assert before.keys() == after.keys()
        renewed = (
            {join_tensor_name(layer, "P") for layer in local.job.parametrization} if local.job.refresh else set[str]()
        )
        changed = {name for name in before if not torch.equal(before[name], after[name])} - renewed
        assert changed <= set(local.job.trainable_names)
        moved |= changed
    assert moved == {name for local in stepped for name in local.job.trainable_names}


@pytest.mark.parametrize(
    "key", methods_by_family((key for key, cls in METHODS.items() if cls.claims.reinitializes), ["flora", "fr-lora"])
)
def test_moments_do_not_outlive_the_factors_that_they_belong_to(key: str, run_method: RunMethod) -> None:
    """Where factors start again or are turned, two steps a round are all that moments have seen, but for those that the
    job itself hands over."""
    run = run_method(key)  # with moments kept
    for round in run.rounds:
        for local in round.trained:
            steps = {name: count for name, count in local.trained.optimizer_state.steps.items() if not is_extra(name)}
            given = {} if local.job.optimizer_state is None else local.job.optimizer_state.steps
            assert steps == {name: 2 + given.get(name, 0) for name in steps}
            assert steps


def _count_added_epochs(run: MethodRun) -> int:
    """The most epochs of a client in a round that the method set itself."""
    return max(
        sum(1 if local.job.steps == 0 else local.job.epochs or 0 for local in round.trained if local.client == client)
        for round in run.rounds
        for client in round.result.cohort
    )


@pytest.mark.parametrize("key", methods_by_family())
def test_a_method_adds_the_epochs_that_it_declares(key: str, run_method: RunMethod) -> None:
    run = run_method(key)
    assert _count_added_epochs(run) == sum(run.federation.method.list_added_epochs())


def test_gradients_of_scaffolds_option_1_are_added_epochs(run_method: RunMethod) -> None:
    wrappers = [{"name": "scaffold", "variate": "option-I"}]
    run = run_method("fedit", method={"wrappers": wrappers}, training={"max_grad_norm": 0.0})
    assert _count_added_epochs(run) == sum(run.federation.method.list_added_epochs()) == 1


@pytest.mark.parametrize("key", methods_by_family())
def test_the_order_of_replies_does_not_matter(key: str, run_method: RunMethod) -> None:
    run = run_method(key)
    for round in run.rounds[:3]:
        names = {name for call in round.of("build_second_reply") for name in call.result.tensors}
        first, second = list[tuple[Client, Contribution]](), list[tuple[Client, Contribution]]()
        for call in round.of("contribute"):
            (second if names & call.args[0].tensors.keys() else first).append((call.args[1], call.result))
        for numbers in itertools.permutations(range(len(first))):
            reduced = _reduce([first[number] for number in numbers])
            if second:
                means = _reduce([second[number] for number in numbers]).mean
                reduced = replace(reduced, mean={**reduced.mean, **means})
            after = run.federation.method.update(round.before.state, reduced)
            assert differences(after, round.after.state) == []


def _reduce(replies: Sequence[tuple[Client, Contribution]]) -> Reduced:
    """The reduction of contributions that arrive in this order."""
    reducer = Reducer([client for client, _ in replies])
    for client, contribution in replies:
        reducer.add(client.id, contribution)
    return reducer.compute_result()


@pytest.mark.parametrize("key", methods_by_family())
def test_nobody_writes_to_what_it_is_given(key: str, run_method: RunMethod) -> None:
    """Neither the method's functions nor training, a round or an evaluation."""
    run = run_method(key)
    second = ("build_second_order", "build_second_reply") if METHODS[key].claims.second_exchange else ()
    assert {call.function for round in run.rounds for call in round.calls} == {
        *("sync", "start", "finish", "contribute", "update", *second)
    }
    assert run.written == ()


@pytest.mark.parametrize("key", methods_by_family((key for key in HETEROGENEOUS if key not in BUDGETS), ["flora"]))
def test_clients_of_different_ranks_train_together(key: str, run_method: RunMethod) -> None:
    """Each its own rank and, where B A is its own, its own scaling; exact where the method is."""
    largest = max(RANKS.values())
    run = run_method(key, method={"r": largest}, federation={"ranks": RANKS, "clients_per_round": 4, "rounds": 3})
    layer = run.layers[0].name
    for round in run.rounds:
        for local in round.trained:
            slots, parametrization = select_slots(local.trained.tensors, layer), local.job.parametrization[layer]
            down = next(slots[slot] for slot in ("A_u", "V", "A", "U") if slot in slots)
            assert len(down) == RANKS[local.client]
            if isinstance(parametrization, LoRA):
                assert parametrization.scaling == 6 / RANKS[local.client]
        if METHODS[key].claims.exact:
            assert max(errors(run, round).values()) < 1e-6
    for ids, job in run.prepared.evaluator.iterate_models(run.rounds[-1].after):
        own = run.federation.clients[ids[0]].client.scaling if len(ids) == 1 else 6 / largest
        if isinstance(parametrization := job.parametrization[layer], LoRA):
            assert parametrization.scaling == own


@pytest.mark.parametrize("key", BUDGETS)
def test_clients_of_different_budgets_train_one_model(key: str, run_method: RunMethod) -> None:
    """All of its slots are there, under one scaling; the more a client may, the more it sends."""
    run = run_method(key, federation={"ranks": RANKS, "clients_per_round": 4, "rounds": 3})
    name = join_tensor_name(run.layers[0].name, "A")
    for round in run.rounds:
        assert {len(local.trained.tensors[name]) for local in round.trained} == {3}
        assert {local.job.parametrization[name.partition("/")[0]].scaling for local in round.trained} == {2.0}
        sizes = {one.client: one.payload for one in round.result.transfers if one.direction == "up"}
        assert sizes["east"] < sizes["north"] < sizes["south"] == sizes["west"]
        if METHODS[key].claims.exact:
            assert max(errors(run, round).values()) < 1e-6


@pytest.mark.parametrize("key", methods_by_family(key for key in METHODS if key not in HETEROGENEOUS))
def test_different_ranks_are_refused_elsewhere(key: str, tiny_folder: Path, prepared: Prepared) -> None:
    with pytest.raises(FedspanError) as caught:
        prepare(method_config(tiny_folder, key, federation={"ranks": {"south": 5}}), prepared.partition)
    assert (caught.value.field, caught.value.value) == ("federation.ranks.south", 5)
    assert key in str(caught.value)
