"""What is transmitted: how many bytes, what of the extras, and that a client that was away has all that it needs."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedspan.assembly.run import Prepared
from fedspan.methods.registry import METHODS
from helpers import tiny
from helpers.claim_measures import require_declared_traffic
from helpers.families import FAMILIES, UNLIKE, methods_by_family
from helpers.method_checks import (
    POLICIES,
    equal,
    extras_of,
    require_catching_up,
    require_declared_bytes,
    require_extras_policy,
    with_policy,
)
from helpers.watched_rounds import RunMethod, method_config

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


@both
def test_bytes_counted_are_bytes_sent_and_bytes_declared(key: str, policy: str, run_method: RunMethod) -> None:
    require_declared_bytes(key, policy, run_method)


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
    require_extras_policy(key, policy, run_method)


@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_a_local_head_makes_every_client_s_model_its_own(key: str, run_method: RunMethod) -> None:
    """There is no one model to evaluate then, whatever the method does with its factors."""
    run = with_policy(run_method, key, "local")
    progress = run.rounds[-1].after
    models = {ids: job for ids, job in run.prepared.evaluator.iterate_models(progress)}
    assert set(models) == {(id,) for id in run.federation.clients}
    heads = {id: extras_of(progress.load_memory(id)) for id in progress.last_rounds}
    assert len(heads) > 1
    for id, head in heads.items():
        assert equal(extras_of(models[id,].tensors), head)


@pytest.mark.parametrize("key", methods_by_family(GLOBAL, UNLIKE))
def test_a_client_that_was_away_catches_up_exactly(key: str, run_method: RunMethod) -> None:
    require_catching_up(key, run_method)


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
