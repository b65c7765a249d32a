"""FedSVD against dense products, and as FFA-LoRA under an orthonormal A."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import Reduced, ServerState
from fedspan.methods.fedsvd import FedSVD
from helpers.dense_rounds import COHORTS, LR, STEPS, Pairs, Weights, factor_mean, federation, follow, given
from helpers.toys.oracle import average, descend
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import close


class _Oracle:
    """Renews A by an SVD of the dense product."""

    def __init__(self, W: Weights, pairs: Pairs) -> None:
        self.W, self.pairs = W, pairs

    def start(self, id: str) -> tuple[Weights, Pairs]:
        return self.W, self.pairs

    def finish(self, trained: Mapping[str, Pairs], shares: Mapping[str, float]) -> None:
        for one, mean in factor_mean(trained, shares).items():
            U, S, Vt = torch.linalg.svd(mean["B"] @ self.pairs[one]["A"], full_matrices=False)
            self.pairs[one] = {"A": Vt[:2], "B": U[:, :2] * S[:2]}

    def model(self) -> Weights:
        return {one: self.W[one] + 2.0 * self.pairs[one]["B"] @ self.pairs[one]["A"] for one in LAYERS}


@pytest.mark.parametrize("init_A", ["kaiming", "gaussian", "orthonormal"])
def test_rounds_match_dense_products(init_A: str) -> None:
    problem = Problem()
    made = federation(FedSVD(spec=problem.adapted().spec, r=2, lora_alpha=4, init_A=init_A))
    follow(made, _Oracle(problem.to_dense(*LAYERS), given(made)), train="B")
    for one in LAYERS:
        A, B = made.state.tensors[join_tensor_name(one, "A")], made.state.tensors[join_tensor_name(one, "B")]
        assert close(A @ A.T, torch.eye(2, dtype=torch.float64))
        assert (B[B.abs().argmax(0), [0, 1]] > 0).all()


def test_under_sgd_it_is_ffa_lora_with_an_orthonormal_A() -> None:
    """From the first renewal on, never renewing A again gives the same weights."""
    problem = Problem()
    made = federation(FedSVD(spec=problem.adapted().spec, r=2, lora_alpha=4))
    made.round()
    W, pairs = problem.to_dense(*LAYERS), given(made)
    head = {name: made.state.tensors[f"extras/{name}"] for name in HEAD}
    for positions in COHORTS:
        ids = [problem.client_ids[position] for position in positions]
        made.round(ids)
        shares, trained, heads = problem.shares(ids), {}, {}
        for id in ids:
            trained[id], heads[id] = {one: dict(pair) for one, pair in pairs.items()}, dict(head)
            descend(problem, id, W, heads[id], trained[id], 2.0, LR, STEPS, train="B")
        pairs, head = factor_mean(trained, shares), average((shares[id], heads[id]) for id in ids)
        for one in LAYERS:
            assert close(made.get_weight(one), W[one] + 2.0 * pairs[one]["B"] @ pairs[one]["A"])
    assert not close(made.state.tensors["fc1/A"], pairs["fc1"]["A"], 0.01)  # it is the weights that agree


def test_replies_of_zeros_leave_the_row_space_of_A() -> None:
    """The product says nothing of A then; every direction can still be trained."""
    method = FedSVD(spec=Problem().adapted().spec, r=2, lora_alpha=4)
    before = given(federation(method))
    state = ServerState(tensors={join_tensor_name(one, slot): before[one][slot] for one in LAYERS for slot in "AB"})
    replies = {join_tensor_name(one, "B"): torch.zeros_like(before[one]["B"]) for one in LAYERS}
    after = method.update(state, Reduced(mean=replies, count=1)).tensors
    for one in LAYERS:
        A, A0 = after[join_tensor_name(one, "A")], before[one]["A"]
        assert not after[join_tensor_name(one, "B")].any()
        assert close(A @ A.T, torch.eye(2, dtype=torch.float64))
        assert close(A.T @ A, A0.T @ torch.linalg.solve(A0 @ A0.T, A0))
