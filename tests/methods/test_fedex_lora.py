"""FedEx-LoRA against dense residuals."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from fedspan.core.lowrank import LowRank
from fedspan.methods.fedex_lora import FedExLoRA
from helpers.dense_rounds import (
    COHORTS,
    EVERYBODY,
    Pairs,
    Weights,
    dense,
    factor_mean,
    federation,
    follow,
    given,
    product_mean,
)
from helpers.families import others_slow
from helpers.toys.problem import LAYERS, Problem
from helpers.watched_rounds import RunMethod


class _Oracle:
    """The residual is formed as an O x I matrix, and truncated by its own SVD."""

    def __init__(self, W: Weights, pairs: Pairs, rank: int | None) -> None:
        self.W, self.pairs, self.rank = W, pairs, rank

    def start(self, id: str) -> tuple[Weights, Pairs]:
        return self.W, self.pairs

    def finish(self, trained: Mapping[str, Pairs], shares: Mapping[str, float]) -> None:
        ideal, self.pairs = product_mean(trained, shares, None), factor_mean(trained, shares)
        for one in LAYERS:
            lost = ideal[one] - 2.0 * self.pairs[one]["B"] @ self.pairs[one]["A"]
            U, S, Vt = torch.linalg.svd(lost, full_matrices=False)
            self.W[one] = self.W[one] + U[:, : self.rank] * S[: self.rank] @ Vt[: self.rank]

    def model(self) -> Weights:
        return {one: self.W[one] + 2.0 * self.pairs[one]["B"] @ self.pairs[one]["A"] for one in LAYERS}


@pytest.mark.parametrize("uniform", [False, True], ids=["by examples", "uniform"])
@pytest.mark.parametrize("rank", others_slow([None, 1, 3, 6], [None, 3]))
def test_rounds_match_the_dense_residual(rank: int | None, uniform: bool) -> None:
    """Four clients of rank 2: the residual has rank 6, which one of the layers (8 x 5) cannot have."""
    problem = Problem()
    made = federation(FedExLoRA(spec=problem.adapted().spec, r=2, lora_alpha=4, residual_rank=rank), uniform=uniform)
    follow(made, _Oracle(problem.to_dense(*LAYERS), given(made), rank), uniform=uniform)
    assert made.method.declare_claims().exact == (rank is None)


def test_everybody_replays_every_residual_and_a_lone_client_leaves_none() -> None:
    problem = Problem()
    made = federation(FedExLoRA(spec=problem.adapted().spec, r=2, lora_alpha=4))
    follow(made, _Oracle(problem.to_dense(*LAYERS), given(made), None), cohorts=[*COHORTS, (2,), (2,), EVERYBODY])
    lone = made.state.base.total["fc1"]
    made.round([made.problem.client_ids[1]])
    assert torch.equal(dense(made.state.base.total["fc1"]), dense(lone))


def test_the_residual_is_transmitted_as_factors_where_they_are_smaller(run_method: RunMethod) -> None:
    """Three clients: rank 2 r; three rounds' residuals together are as large as some layers."""
    run = run_method("fedex-lora")
    for round in run.rounds:
        for layer in run.layers:
            delta = round.after.state.base.recent[-1].deltas[layer.name]
            assert isinstance(delta, LowRank)
            assert delta.rank == 6
