"""What every method of the registry declares, measured on real transformers, and the messages that carry it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedspan.assembly.run import Prepared, prepare
from fedspan.core.parametrization import LoRA
from fedspan.core.tensors import join_tensor_name, select_slots, split_extras
from fedspan.errors import FedspanError
from fedspan.methods.registry import METHODS
from helpers import method_checks, tiny
from helpers.claim_measures import errors, relative, require_declared_traffic
from helpers.families import FAMILIES, UNLIKE, methods_by_family
from helpers.watched_rounds import MethodRun, RunMethod, differences, method_config

GLOBAL = [key for key, cls in METHODS.items() if not cls.claims.personal]
PERSONAL = [key for key, cls in METHODS.items() if cls.claims.personal]
SUMS = [key for key, cls in METHODS.items() if cls.claims.reduction == "sum"]
HETEROGENEOUS = [key for key, cls in METHODS.items() if cls.claims.heterogeneous_ranks]
BUDGETS = [key for key, cls in METHODS.items() if cls.claims.budgets]
RANKS = {"east": 1, "north": 2, "south": 3, "west": 5}
SGD = {"optimizer": "sgd", "momentum": 0.9, "lr": 0.1}


@pytest.mark.parametrize("key", methods_by_family(GLOBAL))
def test_aggregation_is_exact_where_claimed_and_measurably_not_elsewhere(key: str, run_method: RunMethod) -> None:
    method_checks.require_exactness(key, run_method)


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
            shared, kept = round.after.state.tensors.keys(), round.after.states[local.client].memory
            own = {name: value for name, value in local.trained.tensors.items() if name in kept or name not in shared}
            assert own
            assert differences(own, {name: kept[name] for name in own}) == []


@pytest.mark.parametrize("key", methods_by_family())
def test_replies_hold_what_is_claimed_of_them(key: str, run_method: RunMethod) -> None:
    """Wrappers rely on it: new values of tensors that all start from alike, under their names, or something else."""
    assert method_checks.sends(run_method(key)) == METHODS[key].claims.sends


@pytest.mark.parametrize("key", methods_by_family(SUMS))
def test_tensors_with_the_names_of_a_job_are_new_values_from_a_common_start(key: str, run_method: RunMethod) -> None:
    method_checks.require_new_values(key, run_method)


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
    method_checks.require_frozen_tensors(key, training, run_method)


@pytest.mark.parametrize(
    "key", methods_by_family((key for key, cls in METHODS.items() if cls.claims.reinitializes), ["flora", "fr-lora"])
)
def test_moments_do_not_outlive_the_factors_that_they_belong_to(key: str, run_method: RunMethod) -> None:
    method_checks.require_short_moments(key, run_method)


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
    method_checks.require_any_order(key, run_method)


@pytest.mark.parametrize("key", methods_by_family())
def test_nobody_writes_to_what_it_is_given(key: str, run_method: RunMethod) -> None:
    method_checks.require_no_writes(key, run_method)


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


both = pytest.mark.parametrize(
    ("key", "policy"),
    [
        pytest.param(
            key,
            policy,
            marks=()
            if key == "fedsa-lora" or (key in FAMILIES and policy == METHODS[key].claims.extras)
            else pytest.mark.slow,
        )
        for key in METHODS
        for policy in method_checks.POLICIES
    ],
)
"""One method of each family under the policy that it prefers, and FedSA-LoRA under all; the others are slow."""


@both
def test_bytes_counted_are_bytes_sent_and_bytes_declared(key: str, policy: str, run_method: RunMethod) -> None:
    method_checks.require_declared_bytes(key, policy, run_method)


@pytest.mark.parametrize(
    "key", methods_by_family((key for key in HETEROGENEOUS if not METHODS[key].claims.budgets), ["flora", "flexlora"])
)
def test_declared_for_unequal_ranks_too(key: str, run_method: RunMethod) -> None:
    """What comes down may be made of all ranks of the round before; cohorts of three of four change them."""
    run = run_method(key, federation={"ranks": RANKS})
    ranks = {tuple(RANKS[id] for id in round.result.cohort) for round in run.rounds}
    assert len({sum(cohort) for cohort in ranks}) > 1
    require_declared_traffic(run, METHODS[key].claims.extras)


@both
def test_extras_follow_their_policy(key: str, policy: str, run_method: RunMethod) -> None:
    method_checks.require_extras_policy(key, policy, run_method)


@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_a_local_head_makes_every_client_s_model_its_own(key: str, run_method: RunMethod) -> None:
    """There is no one model to evaluate then, whatever the method does with its factors."""
    run = method_checks.with_policy(run_method, key, "local")
    progress = run.rounds[-1].after
    models = {ids: job for ids, job in run.prepared.evaluator.iterate_models(progress)}
    assert set(models) == {(id,) for id in run.federation.clients}
    heads = {id: method_checks.extras_of(progress.load_memory(id)) for id in progress.last_rounds}
    assert len(heads) > 1
    for id, head in heads.items():
        assert method_checks.equal(method_checks.extras_of(models[id,].tensors), head)


@pytest.mark.parametrize("key", methods_by_family(GLOBAL, UNLIKE))
def test_a_client_that_was_away_catches_up_exactly(key: str, run_method: RunMethod) -> None:
    method_checks.require_catching_up(key, run_method)


def test_the_extras_learning_rate_is_a_multiple(tiny_folder: Path, prepared: Prepared) -> None:
    """One step of SGD without clipping: the head moves three times as far, the factors as far as before."""
    training = {"optimizer": "sgd", "local_steps": 1, "max_grad_norm": 0, "weight_decay": 0}
    moved: list[dict[str, Tensor]] = []
    for scale in (1.0, 3.0):
        config = method_config(tiny_folder, "fedit", training=training, model={"extras_lr_scale": scale})
        federation = tiny.variant(prepared, config).federation
        before = federation.begin()
        after = federation.run_round(before).progress.state.tensors
        moved.append({name: after[name] - value for name, value in before.state.tensors.items()})
    for name, once in moved[0].items():
        factor = 3.0 if name.startswith("extras/") else 1.0
        assert torch.allclose(moved[1][name], factor * once, rtol=1e-4, atol=1e-7)
    assert moved[0]["extras/classifier.weight"].abs().max() > 1e-4
