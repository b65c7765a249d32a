"""FLoRA as its paper says."""

from __future__ import annotations

import torch
from torch import Tensor

from fedspan.core.base import to_dense
from fedspan.core.lowrank import LowRank
from fedspan.core.tensors import split_extras
from helpers.sent_factors import factors, sent
from helpers.watched_rounds import RunMethod


def test_flora_adds_the_dense_sum_of_what_the_clients_sent(run_method: RunMethod) -> None:
    """sum_i p_i s_i B_i A_i, formed densely in float64; factors where they are smaller than the layer."""
    run = run_method("flora", method={"r": 2}, federation={"rounds": 2})
    kinds = set[type]()
    for round in run.rounds:
        assert round.after.state.tensors.keys() == split_extras(round.after.state.tensors)[1].keys()
        increment, shares = round.after.state.base.recent[-1], run.weights(round.result.cohort)
        for layer in run.layers:
            expected = torch.zeros(layer.shape, dtype=torch.float64)
            for id, direction, message in sent(round):
                if direction == "up":
                    B, A = factors(run, message.tensors, layer.name)
                    expected += shares[id] * run.federation.clients[id].client.scaling * B @ A
            delta = increment.deltas[layer.name]
            assert (to_dense(delta).double() - expected).norm() < 1e-6 * expected.norm()
            kinds |= {type(delta), type(round.after.state.base.total[layer.name])}
    assert kinds == {LowRank, Tensor}


def test_flora_starts_every_round_with_fresh_factors_of_the_client_s_own(run_method: RunMethod) -> None:
    seen = set[tuple[float, ...]]()
    run = run_method("flora")
    for round in run.rounds:
        for local in round.trained:
            B, A = factors(run, local.job.tensors, run.layers[0].name)
            assert not B.any()
            seen.add(tuple(A.flatten().tolist()))
    assert len(seen) == sum(len(round.trained) for round in run.rounds)
