"""FLoRIST against dense sums truncated by their energy, over clients of different ranks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from fedspan.core.lowrank import LowRank, find_energy_rank
from fedspan.core.tensors import join_tensor_name
from fedspan.methods.flora import FLoRA
from fedspan.methods.florist import FLoRIST
from helpers.dense_rounds import RANKS, Pairs, Weights, dense, federation, follow, product_mean
from helpers.toys.oracle import copied
from helpers.toys.problem import LAYERS, Problem
from helpers.toys.rounds import Federation, close


class _Oracle:
    """Adds the truncated dense sum to the weights; a client's factors of the round are read off its job."""

    def __init__(self, made: Federation, threshold: float) -> None:
        self.made, self.threshold = made, threshold
        self.W = made.problem.to_dense(*LAYERS)
        self.ranks: list[int] = []

    def start(self, id: str) -> tuple[Weights, Pairs]:
        return self.W, copied(self.initial[id])

    def prepare(self) -> None:
        self.initial = {}
        for id in self.made.problem.client_ids:
            tensors = self.made.job(id).tensors
            self.initial[id] = {
                one: {slot: tensors[join_tensor_name(one, slot)].double() for slot in "AB"} for one in LAYERS
            }

    def finish(self, trained: Mapping[str, Pairs], shares: Mapping[str, float]) -> None:
        for one, total in product_mean(trained, shares, RANKS).items():
            U, S, Vt = np.linalg.svd(total.numpy(), full_matrices=False)
            energy = np.cumsum(S**2) / np.sum(S**2)
            rank = int(np.argmax(energy >= self.threshold)) + 1
            self.ranks.append(rank)
            self.W[one] = self.W[one] + torch.from_numpy((U[:, :rank] * S[:rank]) @ Vt[:rank])
        self.prepare()

    def model(self) -> Weights:
        return self.W


@pytest.mark.parametrize("threshold", [0.8, 0.95])
def test_rounds_match_dense_sums_truncated_by_energy(threshold: float) -> None:
    method = FLoRIST(spec=Problem().adapted().spec, r=2, lora_alpha=4, threshold=threshold)
    made = federation(method, RANKS)
    oracle = _Oracle(made, threshold)
    oracle.prepare()
    follow(made, oracle, ranks=RANKS)
    assert len(set(oracle.ranks)) > 1  # the rank follows the data
    assert max(oracle.ranks) < min(min(layer.shape) for layer in method.spec.layers)


def test_with_all_energy_it_is_flora() -> None:
    spec = Problem().adapted().spec
    runs = [federation(method) for method in (FLoRIST(spec=spec, r=2, threshold=1.0), FLoRA(spec=spec, r=2))]
    for _ in range(3):
        for run in runs:
            run.round()
    for one in LAYERS:
        assert close(runs[0].get_weight(one), runs[1].get_weight(one), 1e-9)


def test_fewer_numbers_come_down_than_of_flora() -> None:
    spec = Problem().adapted().spec
    runs = [federation(method) for method in (FLoRIST(spec=spec, r=1, threshold=0.8), FLoRA(spec=spec, r=1))]
    for run in runs:
        run.round()
    increments = [run.state.base.recent[-1].deltas for run in runs]
    for one in LAYERS:
        small, large = increments[0][one], increments[1][one]
        assert small.numel() < large.numel()
        assert isinstance(small, LowRank)
        error = dense(large) - small.to_dense()
        assert float(error.square().sum()) <= 0.2 * float(dense(large).square().sum())


@pytest.mark.parametrize(
    ("values", "share", "rank"),
    [((3.0, 2.0, 1.0), 0.9, 2), ((3.0, 2.0, 1.0), 0.95, 3), ((2.0, 1.0, 0.0), 1.0, 2), ((0.0, 0.0), 0.9, 1)],
)
def test_the_rank_of_an_energy(values: tuple[float, ...], share: float, rank: int) -> None:
    """9 + 4 of 14 are 93 %."""
    assert find_energy_rank(torch.tensor(values, dtype=torch.float64), share) == rank
