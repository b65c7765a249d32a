"""FedMomentum against the SVD of dense averages."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspan.core.factors import draw_initial_A
from fedspan.core.tensors import create_generator, join_tensor_name
from fedspan.core.values import Client, LayerSpec, Reduced, ServerState, Spec, StackItem
from fedspan.methods.fedmomentum import FedMomentum
from helpers.dense_rounds import (
    ALPHA,
    COHORTS,
    EVERYBODY,
    RANKS,
    Pairs,
    Weights,
    federation,
    follow,
    product_mean,
    scaling,
)
from helpers.toys.oracle import average
from helpers.toys.problem import LAYERS, Problem

S0 = ALPHA / 2


class _Oracle:
    """The global change is a dense ``top`` (rank 2) on dense weights; what a client does not train is in its base."""

    def __init__(self, method: FedMomentum, W: Weights, ranks: Mapping[str, int]) -> None:
        self.method, self.W, self.ranks = method, W, ranks
        self.svd: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self.rode: dict[str, Weights] = {}

    def start(self, id: str) -> tuple[Weights, Pairs]:
        rank, s, held, pairs, rode = self.ranks[id], scaling(id, self.ranks), {}, {}, {}
        for one in LAYERS:
            layer = next(layer for layer in self.method.spec.layers if layer.name == one)
            rode[one] = torch.zeros_like(self.W[one])
            if one in self.svd:
                U, S, Vt = self.svd[one]
                A, B = (S / S0).sqrt()[:, None] * Vt, U * (S / S0).sqrt()
                rode[one] = S0 * B[:, rank:] @ A[rank:]
                A, B = A[:rank], B[:, :rank]
            else:
                A = draw_initial_A(layer, 2, create_generator(self.method.seed, "A", one)).double()[:rank]
                B = torch.zeros(layer.out_features, len(A), dtype=torch.float64)
            more = draw_initial_A(layer, rank, create_generator(self.method.seed, "A", one)).double()[len(A) :]
            A, B = torch.cat([A, more]), torch.cat([B, torch.zeros(len(B), len(more), dtype=torch.float64)], 1)
            held[one] = self.W[one] + rode[one]
            pairs[one] = {"A": (S0 / s) ** 0.5 * A, "B": (S0 / s) ** 0.5 * B}
        self.rode[id] = rode
        return held, pairs

    def finish(self, trained: Mapping[str, Pairs], shares: Mapping[str, float]) -> None:
        learnt = product_mean(trained, shares, self.ranks)
        rode = average((share, self.rode[id]) for id, share in shares.items())
        for one in LAYERS:
            U, S, Vt = torch.linalg.svd(learnt[one] + rode[one], full_matrices=False)
            self.svd[one] = U[:, :2], S[:2], Vt[:2]
            self.W[one] = self.W[one] + U[:, 2:] * S[2:] @ Vt[2:]

    def model(self) -> Weights:
        return {one: self.W[one] + U * S @ Vt for one, (U, S, Vt) in self.svd.items()}


@pytest.mark.parametrize("ranks", [None, RANKS], ids=["one rank", "ranks 1 to 4"])
def test_rounds_match_dense_averages(ranks: dict[str, int] | None) -> None:
    """Ranks and scalings of their own: nothing is lost, neither on the server nor on a client of a smaller rank."""
    problem = Problem()
    method = FedMomentum(spec=problem.adapted().spec, r=2, lora_alpha=4)
    oracle = _Oracle(method, problem.to_dense(*LAYERS), ranks or dict.fromkeys(problem.client_ids, 2))
    made = federation(method, ranks)
    follow(made, oracle, cohorts=[*COHORTS, (2,), EVERYBODY], ranks=ranks)
    for id in problem.client_ids:  # every client starts from the global model
        for one in LAYERS:
            assert float((made.get_weight(one, id) - oracle.model()[one]).norm()) < 1e-9


def test_only_its_own_rank_trains_on_a_small_client() -> None:
    made = federation(FedMomentum(spec=Problem().adapted().spec, r=2, lora_alpha=4), RANKS)
    made.round()
    job = made.job("client-0")
    assert {name.partition("/")[2] for name in job.trainable_names if name.startswith("fc1")} == {"A", "B"}
    assert job.tensors["fc1/A"].shape == (1, 5)
    assert job.tensors["fc1/L"].shape == (8, 1)


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    weights=st.lists(st.floats(0.1, 9.0), min_size=5, max_size=5),
    zero=st.booleans(),
    seed=st.integers(0, 999),
)
def test_the_server_s_step_is_exact_for_any_ranks_and_weights(
    ranks: list[int], weights: list[float], zero: bool, seed: int
) -> None:
    """Change of the global weight = weighted mean of the clients' weights, what rode along included."""
    layer = LayerSpec("one", 7, 5)
    method = FedMomentum(spec=Spec((layer,)), r=3, lora_alpha=6)
    rng = create_generator(seed, "test")
    state = ServerState(
        tensors={
            name: torch.randn(shape, generator=rng, dtype=torch.float64)
            for name, shape in {"one/A": (3, 5), "one/B": (7, 3)}.items()
        }
    )
    total, items, mean = sum(weights[: len(ranks)]), [], torch.zeros(7, 5, dtype=torch.float64)
    for k, rank in enumerate(ranks):
        client = Client(f"c{k}", rank, 6 / rank, 1, weights[k])
        A = torch.randn((rank, 5), generator=rng, dtype=torch.float64)
        B = torch.zeros(7, rank, dtype=torch.float64) if zero else torch.randn((7, rank), generator=rng, dtype=A.dtype)
        items.append(StackItem(client, weights[k] / total, {"one/A": A, "one/B": B}))
        rode = 2.0 * state.tensors["one/B"][:, rank:] @ state.tensors["one/A"][rank:]
        mean += weights[k] / total * (6 / rank * B @ A + rode)
    after = method.update(state, Reduced(stack=tuple(items), count=len(items)))
    found = 2.0 * after.tensors["one/B"] @ after.tensors["one/A"]
    if "one" in after.base.total:
        rest = after.base.total["one"]
        found = found + (rest if isinstance(rest, torch.Tensor) else rest.to_dense())
    assert float((found - mean).norm()) < 1e-9 * max(1.0, float(mean.norm()))
    assert (after.tensors[join_tensor_name("one", "A")].norm(dim=1) > 1e-3).all()  # every direction can be trained on
