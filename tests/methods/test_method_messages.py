"""What is transmitted: how many bytes, what of the extras, and that a client that was away has all that it needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedspan.core.base import BaseUpdate, apply_patch
from fedspan.core.method import Memory
from fedspan.core.tensors import Tensors, join_extra_name, split_extras
from fedspan.core.values import Job
from fedspan.federation.serialization import decode, encode
from fedspan.methods.registry import METHODS
from fedspan.runs.setup import Prepared
from helpers import tiny
from helpers.claim_measures import require_declared_traffic
from helpers.families import FAMILIES, UNLIKE, methods_by_family
from helpers.watched_rounds import MethodRun, RunMethod, method_config

POLICIES = ("average", "local", "frozen")
HETEROGENEOUS = [key for key, cls in METHODS.items() if cls.claims.heterogeneous_ranks]
RANKS = {"east": 1, "north": 2, "south": 3, "west": 5}
GLOBAL = [key for key, cls in METHODS.items() if not cls.claims.personal]
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
        for policy in POLICIES
    ],
)
"""One method of each family under the policy that it prefers, and FedSA-LoRA under all; the others are slow."""


def with_policy(run_method: RunMethod, key: str, policy: str) -> MethodRun:
    """Three of four clients in four rounds; the same run as elsewhere under the policy that the method prefers."""
    return run_method(key) if policy == METHODS[key].claims.extras else run_method(key, model={"extras": policy})


def initial_extras(run: MethodRun) -> dict[str, Tensor]:
    adapted = run.prepared.engine.adapted
    return {join_extra_name(path): adapted.get_extra(path) for path in adapted.extras}


def extras_of(tensors: Tensors) -> dict[str, Tensor]:
    return split_extras(tensors)[1]


def equal(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def shapes(job: Job) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in job.tensors.items()}


@both
def test_bytes_counted_are_bytes_sent_and_bytes_declared(key: str, policy: str, run_method: RunMethod) -> None:
    """Declared for clients that participated in every round before: four bytes a parameter and nothing else."""
    require_declared_traffic(with_policy(run_method, key, policy), policy)


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
    """Average: the weighted mean. Local: sent once, moved by their client only. Frozen: sent once, never moved."""
    run = with_policy(run_method, key, policy)
    initial, own = initial_extras(run), dict[str, Tensors]()
    for round in run.rounds:
        cohort, sent = round.result.cohort, round.messages()
        server, jobs = extras_of(round.before.state.tensors), {local.client: local for local in round.trained}
        trained = {id: extras_of(local.trained.tensors) for id, local in jobs.items()}
        for id in cohort:
            begun = extras_of(jobs[id].job.tensors)
            assert equal(begun, server if policy == "average" else own.get(id, initial))
            for name in initial:
                rests = policy == "frozen" or not jobs[id].trained.steps  # a mere probe moves nothing
                assert torch.equal(begun[name], trained[id][name]) == rests
        own.update(trained)
        answered = [call.args[0] for call in round.of("build_second_reply")]
        answered += [call.result for call in round.of("build_second_reply")]
        for transfer, message in zip(round.result.transfers, sent, strict=True):
            if any(message is second for second in answered):  # a second exchange carries none
                assert not extras_of(message.tensors)
                continue
            first = transfer.direction == "down" and transfer.client not in round.before.last_rounds
            assert bool(extras_of(message.tensors)) == (policy == "average" or first)
        after, shares = extras_of(round.after.state.tensors), run.weights(cohort)
        for name, value in after.items():
            mean = sum(shares[id] * trained[id][name].double() for id in cohort)
            expected = mean if policy == "average" else initial[name].double()
            assert torch.allclose(value.double(), expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_a_local_head_makes_every_client_s_model_its_own(key: str, run_method: RunMethod) -> None:
    """There is no one model to evaluate then, whatever the method does with its factors."""
    run = with_policy(run_method, key, "local")
    progress = run.rounds[-1].after
    models = {ids: job for ids, job in run.prepared.evaluator.iterate_models(progress)}
    assert set(models) == {(id,) for id in run.federation.clients}
    heads = {id: extras_of(progress.memories[id]) for id in progress.last_rounds}
    assert len(heads) > 1
    for id, head in heads.items():
        assert equal(extras_of(models[id,].tensors), head)


@pytest.mark.parametrize("key", methods_by_family(GLOBAL, UNLIKE))
def test_a_client_that_was_away_catches_up_exactly(key: str, run_method: RunMethod) -> None:
    """From its messages alone: the base that it holds plus what it is sent is the server's, and so is its model."""
    # At rank 2 two rounds' increments are smaller than the layers: some clients replay them, some are sent the whole.
    run = run_method(key, method={"r": 2, "lora_alpha": 4}, federation={"clients_per_round": 2, "rounds": 6})
    bases: dict[str, BaseUpdate] = dict.fromkeys(run.federation.clients, BaseUpdate())
    away = 0
    for number, round in enumerate(run.rounds):
        state = round.before.state
        everything = run.prepared.evaluator.build_job(round.before, None)
        for id in run.federation.clients:
            client = run.federation.get_client(id, round.before)
            away += client.last_round is not None and client.last_round < number - 1
            message = decode(encode(run.federation.method.sync(state, client)))
            base = apply_patch(bases[id], message.base)
            memory: Memory = round.before.memories.get(id, {})
            job = run.federation.method.start(message, client, memory, number)
            reference = everything
            if shapes(job) != shapes(everything):  # cut to the client's rank: then as a newcomer's
                newcomer = replace(client, last_round=None)
                reference = run.federation.method.start(
                    run.federation.method.sync(state, newcomer), newcomer, {}, state.round
                )
            for layer in run.layers:
                found = run.change(layer.name, base, job.parametrization[layer.name], job.tensors)
                full = reference.parametrization[layer.name]
                expected = run.change(layer.name, state.base, full, reference.tensors)
                assert torch.equal(found, expected)
            assert equal(extras_of(job.tensors), extras_of(everything.tensors))
            if id in round.result.cohort:
                bases[id] = base
    assert away > 3


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
