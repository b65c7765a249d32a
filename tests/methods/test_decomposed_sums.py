"""Methods that decompose or pass on the dense sum, against dense residuals and SVDs by hand."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspan.core.factors import draw_initial_A
from fedspan.core.lowrank import LowRank, find_energy_rank
from fedspan.core.tensors import create_generator, join_tensor_name
from fedspan.core.values import Client, LayerSpec, Reduced, ServerState, Spec, StackItem
from fedspan.methods.federa import FeDeRA
from fedspan.methods.fedex_lora import FedExLoRA
from fedspan.methods.fedmomentum import FedMomentum
from fedspan.methods.fedsvd import FedSVD
from fedspan.methods.flexlora import FlexLoRA
from fedspan.methods.flora import FLoRA
from fedspan.methods.florist import FLoRIST
from fedspan.methods.fr_lora import FRLoRA
from helpers.dense_rounds import (
    ALPHA,
    COHORTS,
    EVERYBODY,
    LR,
    RANKS,
    STEPS,
    PairOracle,
    Pairs,
    Weights,
    dense,
    factor_mean,
    federation,
    follow,
    get_pairs,
    product_mean,
    scaling,
)
from helpers.families import others_slow
from helpers.toys.oracle import average, copied, descend
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Federation, close
from helpers.watched_rounds import RunMethod


class FedExOracle(PairOracle):
    """The residual is formed as an O x I matrix, and truncated by its own SVD."""

    def __init__(self, made: Federation, rank: int | None) -> None:
        super().__init__(made)
        self.rank = rank

    def finish(self, trained: Mapping[str, Pairs], shares: Mapping[str, float]) -> None:
        ideal, self.pairs = product_mean(trained, shares, None), factor_mean(trained, shares)
        for one in LAYERS:
            lost = ideal[one] - 2.0 * self.pairs[one]["B"] @ self.pairs[one]["A"]
            U, S, Vt = torch.linalg.svd(lost, full_matrices=False)
            self.W[one] = self.W[one] + U[:, : self.rank] * S[: self.rank] @ Vt[: self.rank]


@pytest.mark.parametrize("uniform", [False, True], ids=["by examples", "uniform"])
@pytest.mark.parametrize("rank", others_slow([None, 1, 3, 6], [None, 3]))
def test_rounds_match_the_dense_residual(rank: int | None, uniform: bool) -> None:
    """Four clients of rank 2: the residual has rank 6, which one of the layers (8 x 5) cannot have."""
    problem = Problem()
    made = federation(FedExLoRA(spec=problem.adapted().spec, r=2, lora_alpha=4, residual_rank=rank), uniform=uniform)
    follow(made, FedExOracle(made, rank), uniform=uniform)
    assert made.method.declare_claims().exact == (rank is None)


def test_everybody_replays_every_residual_and_a_lone_client_leaves_none() -> None:
    problem = Problem()
    made = federation(FedExLoRA(spec=problem.adapted().spec, r=2, lora_alpha=4))
    follow(made, FedExOracle(made, None), cohorts=[*COHORTS, (2,), (2,), EVERYBODY])
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


class FRLoRAOracle(PairOracle):
    """The base is dense; the fixed pair is on top of it at every round's start."""

    def __init__(self, made: Federation) -> None:
        super().__init__(made)
        self.lift = {one: 2.0 * pair["B"] @ pair["A"] for one, pair in self.pairs.items()}
        self.W = {one: self.W[one] - self.lift[one] for one in LAYERS}

    def finish(self, trained: Mapping[str, Pairs], shares: Mapping[str, float]) -> None:
        means = factor_mean(trained, shares)
        self.W = {one: self.W[one] + 2.0 * means[one]["B"] @ means[one]["A"] - self.lift[one] for one in LAYERS}


@pytest.mark.parametrize(("train", "exact"), [("both", False), ("B", True)])
def test_rounds_match_dense_weights(train: str, exact: bool) -> None:
    problem = Problem()
    method = FRLoRA(spec=problem.adapted().spec, r=2, lora_alpha=4, train=train)
    made = federation(method)
    for one in LAYERS:
        assert close(made.get_weight(one), problem.to_dense(one)[one])  # the model begins as the pretrained one
    follow(made, FRLoRAOracle(made), train="AB" if train == "both" else "B")
    assert method.declare_claims().exact == exact


@pytest.mark.parametrize(("train", "rank"), [("both", 6), ("B", 3)])
def test_every_round_starts_from_the_same_factors_which_are_transmitted_once(
    train: str, rank: int, run_method: RunMethod
) -> None:
    run = run_method("fr-lora", method={"train": train})
    name = run.layers[0].name
    first = run.rounds[0].before.state.tensors
    for round in run.rounds:
        for local in round.trained:
            for slot in "AB":
                assert torch.equal(local.job.tensors[f"{name}/{slot}"], first[f"{name}/{slot}"])
        for call in round.of("sync"):
            assert (f"{name}/A" in call.result.tensors) == (call.args[1].last_round is None)
        delta = round.after.state.base.recent[-1].deltas[name]
        assert isinstance(delta, LowRank)
        assert delta.rank == rank


class FedSVDOracle(PairOracle):
    """Renews A by an SVD of the dense product."""

    def finish(self, trained: Mapping[str, Pairs], shares: Mapping[str, float]) -> None:
        for one, mean in factor_mean(trained, shares).items():
            U, S, Vt = torch.linalg.svd(mean["B"] @ self.pairs[one]["A"], full_matrices=False)
            self.pairs[one] = {"A": Vt[:2], "B": U[:, :2] * S[:2]}


@pytest.mark.parametrize("init_A", ["kaiming", "gaussian", "orthonormal"])
def test_rounds_match_dense_products(init_A: str) -> None:
    problem = Problem()
    made = federation(FedSVD(spec=problem.adapted().spec, r=2, lora_alpha=4, init_A=init_A))
    follow(made, FedSVDOracle(made), train="B")
    for one in LAYERS:
        A, B = made.state.tensors[join_tensor_name(one, "A")], made.state.tensors[join_tensor_name(one, "B")]
        assert close(A @ A.T, torch.eye(2, dtype=torch.float64))
        assert (B[B.abs().argmax(0), [0, 1]] > 0).all()


def test_under_sgd_it_is_ffa_lora_with_an_orthonormal_A() -> None:
    """From the first renewal on, never renewing A again gives the same weights."""
    problem = Problem()
    made = federation(FedSVD(spec=problem.adapted().spec, r=2, lora_alpha=4))
    made.round()
    W, pairs = problem.to_dense(*LAYERS), get_pairs(made)
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
    before = get_pairs(federation(method))
    state = ServerState(tensors={join_tensor_name(one, slot): before[one][slot] for one in LAYERS for slot in "AB"})
    replies = {join_tensor_name(one, "B"): torch.zeros_like(before[one]["B"]) for one in LAYERS}
    after = method.update(state, Reduced(mean=replies, count=1)).tensors
    for one in LAYERS:
        A, A0 = after[join_tensor_name(one, "A")], before[one]["A"]
        assert not after[join_tensor_name(one, "B")].any()
        assert close(A @ A.T, torch.eye(2, dtype=torch.float64))
        assert close(A.T @ A, A0.T @ torch.linalg.solve(A0 @ A0.T, A0))


class FloristOracle:
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
    oracle = FloristOracle(made, threshold)
    oracle.prepare()
    follow(made, oracle, ranks=RANKS)
    assert len(set(oracle.ranks)) > 1  # the rank follows the data
    assert max(oracle.ranks) < min(min(layer.shape) for layer in method.spec.layers)


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


class FlexOracle:
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
    oracle = FlexOracle(method, problem.to_dense(*LAYERS), ranks or dict.fromkeys(problem.client_ids, 2))
    cohorts = [EVERYBODY, EVERYBODY, (1, 3)] if ranks is None else [(0, 1, 2), (1, 2, 3), EVERYBODY, (0, 2), EVERYBODY]
    follow(federation(method, ranks), oracle, cohorts=cohorts, ranks=ranks)


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


class FeDeRAOracle(PairOracle):
    """Dense weights without the principal part, and pairs on top."""

    def __init__(self, made: Federation, aggregation: str) -> None:
        super().__init__(made)
        self.W = {one: W - 2.0 * self.pairs[one]["B"] @ self.pairs[one]["A"] for one, W in self.W.items()}
        self.aggregation = aggregation

    def finish(self, trained: Mapping[str, Pairs], shares: Mapping[str, float]) -> None:
        self.pairs = factor_mean(trained, shares)
        if self.aggregation == "factors":
            return
        for one, D in product_mean(trained, shares, None).items():
            U, S, Vt = torch.linalg.svd(D, full_matrices=False)
            signs = torch.sign(U.gather(0, U.abs().argmax(0)[None]))
            root = (S[:2] / 2.0).sqrt()
            self.pairs[one] = {"A": root[:, None] * (Vt * signs.T)[:2], "B": (U * signs)[:, :2] * root}


@pytest.mark.parametrize("singular", ["full", "randomized"])
@pytest.mark.parametrize("aggregation", ["factors", "product_svd"])
def test_rounds_match_dense_weights_without_the_principal_part(aggregation: str, singular: str) -> None:
    problem = Problem()
    method = FeDeRA(spec=problem.adapted().spec, r=2, lora_alpha=4, aggregation=aggregation, singular=singular)
    made = federation(method)
    follow(made, FeDeRAOracle(made, aggregation))
    claims = method.declare_claims()
    assert (claims.reduction, claims.reinitializes) == (("sum", False) if aggregation == "factors" else ("stack", True))
    assert made.state.generation == (0 if aggregation == "factors" else 4)


def test_it_begins_as_the_pretrained_model_with_the_principal_part_in_the_factors() -> None:
    """s B A is the best approximation of rank 2 of W0, shared evenly, and the base is what is left."""
    problem = Problem()
    made = federation(FeDeRA(spec=problem.adapted().spec, r=2, lora_alpha=4))
    W, pairs = problem.to_dense(*LAYERS), get_pairs(made)
    for one in LAYERS:
        assert close(made.get_weight(one), W[one])
        U, S, Vt = torch.linalg.svd(W[one])
        A, B = pairs[one]["A"], pairs[one]["B"]
        assert close(2.0 * B @ A, U[:, :2] * S[:2] @ Vt[:2], 1e-6)  # factors are sent in float32
        assert close(A @ A.T, torch.diag(S[:2] / 2.0), 1e-6)
        assert close(B.T @ B, torch.diag(S[:2] / 2.0), 1e-6)


S0 = ALPHA / 2


class MomentumOracle:
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
def test_rounds_match_averages_of_what_trained_and_what_did_not(ranks: dict[str, int] | None) -> None:
    """Ranks and scalings of their own: nothing is lost, neither on the server nor on a client of a smaller rank."""
    problem = Problem()
    method = FedMomentum(spec=problem.adapted().spec, r=2, lora_alpha=4)
    oracle = MomentumOracle(method, problem.to_dense(*LAYERS), ranks or dict.fromkeys(problem.client_ids, 2))
    made = federation(method, ranks)
    follow(made, oracle, cohorts=[*COHORTS, (2,), EVERYBODY], ranks=ranks)
    for id in problem.client_ids:  # every client starts from the global model
        for one in LAYERS:
            assert float((made.get_weight(one, id) - oracle.model()[one]).norm()) < 1e-9


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
