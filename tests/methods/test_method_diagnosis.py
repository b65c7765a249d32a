"""A round that is inspected: of every method the numbers are those of dense float64 weights, and nothing is changed."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedspan import FedspanError
from fedspan.diagnostics.round_diagnosis import STEPS, Diagnosis, diagnose_round
from fedspan.federation.progress import Progress
from fedspan.methods.registry import METHODS
from fedspan.runs.setup import Prepared
from helpers.claim_measures import errors
from helpers.families import methods_by_family, others_slow
from helpers.watched_rounds import MethodRun, Round, RunMethod, differences, snapshot


def diagnosed(prepared: Prepared, before: Progress, *, pairs: int, examples: int = 500) -> Diagnosis:
    assert prepared.test is not None
    return diagnose_round(
        prepared.federation,
        before,
        prepared.test,
        title="one",
        seed=0,
        batch_size=64,
        pairs=pairs,
        examples=examples,
    )


def learnt(run: MethodRun, round: Round, layer: str) -> tuple[Tensor, Tensor]:
    """The mean of the clients' updates of a layer in a round, and the mean of their changes since the start."""
    whole = run.mean_change(layer, round)
    return whole - run.global_change(layer, round.before), whole


@pytest.mark.parametrize("key", methods_by_family())
def test_of_every_method_the_numbers_are_those_of_dense_weights(key: str, run_method: RunMethod) -> None:
    run = run_method(key)
    round = run.rounds[-1]
    before = snapshot(round.before)
    found = diagnosed(run.prepared, round.before, pairs=1, examples=10)
    assert not [name for name in differences(before, snapshot(round.before)) if name]
    assert found.clients == round.result.cohort
    assert (found.round, found.examples) == (len(run.rounds), 10)
    assert set(found.layers) == {layer.name for layer in run.layers}
    if METHODS[key].claims.personal:
        assert all(layer.accumulated is None for layer in found.layers.values())
        assert all(math.isnan(layer.updates.aggregation_error) for layer in found.layers.values())
        return
    oracle = errors(run, round)
    for layer, one in found.layers.items():
        step, whole = learnt(run, round, layer)
        lost = one.updates.aggregation_error * float(step.norm())
        assert lost == pytest.approx(oracle[layer] * float(whole.norm()), rel=1e-3, abs=1e-6 * float(whole.norm()))
        change = run.global_change(layer, round.after)
        assert one.accumulated is not None
        assert one.accumulated.norm == pytest.approx(float(change.norm()), rel=1e-4)
        values = torch.linalg.svdvals(change)
        wanted = float((values.norm() / values[0]) ** 2)
        assert one.accumulated.stable_rank == pytest.approx(wanted, rel=1e-3)
        assert one.updates.drift >= 0


@pytest.mark.parametrize(
    "key", others_slow(["fedit", "fedsa-lora", "fedgalore", "fedavg", "florg"], ["fedit", "fedsa-lora", "fedgalore"])
)
def test_a_barrier_ends_at_the_losses_of_the_clients_models(key: str, run_method: RunMethod) -> None:
    run = run_method(key)
    round = run.rounds[-1]
    found = diagnosed(run.prepared, round.before, pairs=2, examples=10_000)
    assert [one.clients for one in found.barriers] == [
        (round.result.cohort[0], other) for other in round.result.cohort[1:]
    ]
    engine, held = run.prepared.engine, run.prepared.test
    assert held is not None
    for one in found.barriers:
        assert len(one.losses) == len(STEPS)
        for id, loss in zip(one.clients, (one.losses[0], one.losses[-1]), strict=True):
            local = [local for local in round.trained if local.client == id][-1]
            base = round.before.state.base
            engine.adapted.set_base(base)
            if local.trained.decay != 1.0:
                continue  # its base is no state of the server's
            job = replace(local.job, tensors=local.trained.tensors)
            indices = np.arange(len(held))
            predictions = engine.predict(job, held, indices, 64)
            wanted = engine.task.compute_metrics(predictions, held, indices.tolist())["loss"]
            assert loss == pytest.approx(wanted, rel=1e-4)


def test_a_round_without_clients_is_said_to_be_one(run_method: RunMethod) -> None:
    run = run_method("fedit")
    made = replace(run.prepared, federation=copy.copy(run.prepared.federation))
    made.federation.select_clients = lambda round, extra=0: []
    with pytest.raises(FedspanError, match="no client participates"):
        diagnosed(made, run.rounds[-1].before, pairs=0)
