"""FeDeRA against dense weights: the beginning, both ways of aggregating."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from fedspan.methods.federa import FeDeRA
from helpers.dense_rounds import Pairs, Weights, factor_mean, federation, follow, given, product_mean
from helpers.toys.problem import LAYERS, Problem
from helpers.toys.rounds import close
from helpers.watched_rounds import RunMethod


class _Oracle:
    """Dense weights without the principal part, and pairs on top."""

    def __init__(self, W: Weights, pairs: Pairs, aggregation: str) -> None:
        self.W = {one: W[one] - 2.0 * pairs[one]["B"] @ pairs[one]["A"] for one in LAYERS}
        self.pairs, self.aggregation = pairs, aggregation

    def start(self, id: str) -> tuple[Weights, Pairs]:
        return self.W, self.pairs

    def finish(self, trained: Mapping[str, Pairs], shares: Mapping[str, float]) -> None:
        self.pairs = factor_mean(trained, shares)
        if self.aggregation == "factors":
            return
        for one, D in product_mean(trained, shares, None).items():
            U, S, Vt = torch.linalg.svd(D, full_matrices=False)
            signs = torch.sign(U.gather(0, U.abs().argmax(0)[None]))
            root = (S[:2] / 2.0).sqrt()
            self.pairs[one] = {"A": root[:, None] * (Vt * signs.T)[:2], "B": (U * signs)[:, :2] * root}

    def model(self) -> Weights:
        return {one: self.W[one] + 2.0 * self.pairs[one]["B"] @ self.pairs[one]["A"] for one in LAYERS}


@pytest.mark.parametrize("singular", ["full", "randomized"])
@pytest.mark.parametrize("aggregation", ["factors", "product_svd"])
def test_rounds_match_dense_weights(aggregation: str, singular: str) -> None:
    problem = Problem()
    method = FeDeRA(spec=problem.adapted().spec, r=2, lora_alpha=4, aggregation=aggregation, singular=singular)
    made = federation(method)
    follow(made, _Oracle(problem.to_dense(*LAYERS), given(made), aggregation))
    claims = method.declare_claims()
    assert (claims.reduction, claims.reinitializes) == (("sum", False) if aggregation == "factors" else ("stack", True))
    assert made.state.generation == (0 if aggregation == "factors" else 4)


def test_it_begins_as_the_pretrained_model_with_the_principal_part_in_the_factors() -> None:
    """s B A is the best approximation of rank 2 of W0, shared evenly, and the base is what is left."""
    problem = Problem()
    made = federation(FeDeRA(spec=problem.adapted().spec, r=2, lora_alpha=4))
    W, pairs = problem.to_dense(*LAYERS), given(made)
    for one in LAYERS:
        assert close(made.get_weight(one), W[one])
        U, S, Vt = torch.linalg.svd(W[one])
        A, B = pairs[one]["A"], pairs[one]["B"]
        assert close(2.0 * B @ A, U[:, :2] * S[:2] @ Vt[:2], 1e-6)  # factors are sent in float32
        assert close(A @ A.T, torch.diag(S[:2] / 2.0), 1e-6)
        assert close(B.T @ B, torch.diag(S[:2] / 2.0), 1e-6)


def test_everybody_begins_with_the_same_factors_whenever_a_client_joins(run_method: RunMethod) -> None:
    """Bit for bit: one SVD, broadcast."""
    run = run_method("federa")
    for round in run.rounds:
        bits = {tuple(local.job.tensors[f"{run.layers[0].name}/A"].flatten().tolist()) for local in round.trained}
        assert len(bits) == 1
