"""FlexLoRA against the SVD of dense averages, cut by hand for every client's rank."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from fedspan.core.factors import draw_initial_A
from fedspan.core.tensors import create_generator, join_tensor_name
from fedspan.methods.flexlora import FlexLoRA
from helpers.dense_rounds import ALPHA, EVERYBODY, RANKS, Pairs, Weights, federation, follow, product_mean, scaling
from helpers.toys.problem import LAYERS, Problem


class _Oracle:
    """Keeps the dense average D; a client starts from the top of its SVD in its own scaling."""

    def __init__(self, method: FlexLoRA, W: Weights, ranks: Mapping[str, int]) -> None:
        self.method, self.W, self.ranks = method, W, ranks
        self.D: Weights | None = None
        self.largest = 2

    def start(self, id: str) -> tuple[Weights, Pairs]:
        return self.W, {one: self.cut(one, self.ranks[id], scaling(id, self.ranks)) for one in LAYERS}

    def cut(self, one: str, rank: int, s: float) -> dict[str, torch.Tensor]:
        layer = next(layer for layer in self.method.spec.layers if layer.name == one)
        A = draw_initial_A(layer, rank, create_generator(self.method.seed, "A", one)).double()
        B = torch.zeros(layer.out_features, rank, dtype=torch.float64)
        if self.D is not None:
            U, S, Vt = torch.linalg.svd(self.D[one], full_matrices=False)
            signs = torch.sign(U.gather(0, U.abs().argmax(0)[None]))
            have = min(rank, self.largest)
            S, U, Vt = S[:have], (U * signs)[:, :have], (Vt * signs.T)[:have]
            if self.method.split == "B":
                A[:have], B[:, :have] = Vt, U * S / s
            else:
                A[:have], B[:, :have] = (S / s).sqrt()[:, None] * Vt, U * (S / s).sqrt()
        return {"A": A, "B": B}

    def finish(self, trained: Mapping[str, Pairs], shares: Mapping[str, float]) -> None:
        self.D = product_mean(trained, shares, self.ranks)
        self.largest = max(self.largest, *(self.ranks[id] for id in shares))

    def model(self) -> Weights:
        pairs = {one: self.cut(one, 2, ALPHA / 2) for one in LAYERS}
        return {one: self.W[one] + ALPHA / 2 * pairs[one]["B"] @ pairs[one]["A"] for one in LAYERS}


@pytest.mark.parametrize("split", ["B", "balanced"])
@pytest.mark.parametrize("ranks", [None, RANKS], ids=["one rank", "ranks 1 to 4"])
def test_rounds_match_dense_averages(ranks: dict[str, int] | None, split: str) -> None:
    """The client of rank 4 joins in the second round, when the server has kept rank 3."""
    problem = Problem()
    method = FlexLoRA(spec=problem.adapted().spec, r=2, lora_alpha=4, split=split)
    oracle = _Oracle(method, problem.to_dense(*LAYERS), ranks or dict.fromkeys(problem.client_ids, 2))
    cohorts = [EVERYBODY, EVERYBODY, (1, 3)] if ranks is None else [(0, 1, 2), (1, 2, 3), EVERYBODY, (0, 2), EVERYBODY]
    follow(federation(method, ranks), oracle, cohorts=cohorts, ranks=ranks)


def test_a_client_s_model_is_the_best_of_its_rank() -> None:
    """Eckart-Young for every client; ranks 1 to 4 and so scalings 4 to 1."""
    problem = Problem()
    method = FlexLoRA(spec=problem.adapted().spec, r=2, lora_alpha=4)
    made, oracle = federation(method, RANKS), _Oracle(method, problem.to_dense(*LAYERS), RANKS)
    follow(made, oracle, cohorts=[EVERYBODY] * 2, ranks=RANKS)
    assert oracle.D is not None
    for id, rank in RANKS.items():
        for one in LAYERS:
            lost = made.get_weight(one, id) - oracle.W[one] - oracle.D[one]
            cut = torch.linalg.svdvals(oracle.D[one])[rank:]
            assert torch.isclose(lost.norm(), cut.norm(), atol=1e-9)


def test_directions_that_the_average_lacks_can_still_be_trained() -> None:
    """One client of rank 1, then everybody: what is beyond rank 1 has B = 0 and A not."""
    made = federation(FlexLoRA(spec=Problem().adapted().spec, r=2, lora_alpha=4), RANKS)
    made.round(["client-0"])
    for id, rank in RANKS.items():
        job = made.job(id)
        for one in LAYERS:
            A, B = job.tensors[join_tensor_name(one, "A")], job.tensors[join_tensor_name(one, "B")]
            assert len(A) == rank
            assert not B[:, 1:].any()
            assert (A.norm(dim=1) > 0.1).all()
