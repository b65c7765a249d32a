"""FLoRG and FedASK against dense Gram matrices and products, their eigendecomposition and the chain rule by hand."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspan.core.alignment import compute_gram_factor, factorize_gram
from fedspan.core.base import materialize
from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import Client, LayerSpec, Message, Reduced, ServerState, Spec, Trained
from fedspan.federation.second_exchange import SecondExchange
from fedspan.federation.validation import build_untrained_reply, validate_reply
from fedspan.methods.fedask import FedASK
from fedspan.methods.florg import FLoRG
from fedspan.wrappers.scaffold import Scaffold
from helpers import method_checks
from helpers.dense_rounds import PairOracle, Pairs, federation, follow
from helpers.families import others_slow
from helpers.refusals import refused
from helpers.toys.oracle import average
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Federation, close, sgd, with_extras
from helpers.watched_rounds import MethodRun, RunMethod

LR, STEPS = 0.2, 2
ALIGNMENTS = ("paper", "untruncated", "none")


def made(problem: Problem, **options: Any) -> FLoRG:
    return FLoRG(spec=problem.adapted().spec, **{"seed": 11, "r": 2, "lora_alpha": 3.0, "init_std": 0.3, **options})


def written_out(method: FLoRG, layer: LayerSpec) -> tuple[Tensor, Tensor]:
    """L (O, K) and R (K, I) in float64, whatever form the method keeps them in."""
    _, fixed = method.build_fixed(layer)
    if "L" in fixed:
        return fixed["L"].double(), fixed["R"].double()
    longer, shorter = max(layer.shape), min(layer.shape)
    j = torch.arange(longer, dtype=torch.float64)
    M = torch.cos(math.pi * j * (4 * fixed["places"].double()[:, None] + 1) / (2 * longer)) * math.sqrt(2 / longer)
    M[:, 0] *= math.sqrt(0.5)
    M = M * fixed["signs"].double()
    identity = torch.eye(shorter, dtype=torch.float64)
    return (identity, M) if layer.out_features <= layer.in_features else (M.T, identity)


def next_A(Q: Tensor, before: Tensor, alignment: str) -> Tensor:
    """The server's step from the dense Gram matrix, for every variant."""
    eigenvalues, eigenvectors = (part.flip(-1) for part in torch.linalg.eigh(Q))
    A_tilde = eigenvalues.clamp_min(0).sqrt()[:, None] * eigenvectors.T
    if alignment != "untruncated":
        A_tilde = A_tilde[: len(before)]
    if alignment == "none":
        largest = A_tilde.gather(1, A_tilde.abs().argmax(1, keepdim=True))
        return A_tilde * largest.sign()
    U, _, Vt = torch.linalg.svd(before @ A_tilde.T, full_matrices=False)
    return U @ Vt @ A_tilde


@pytest.mark.parametrize("center", [False, True], ids=["plain", "centered"])
@pytest.mark.parametrize("bases", ["structured", pytest.param("dense", marks=pytest.mark.slow)])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_rounds_match_dense_gram_matrices(alignment: str, bases: str, center: bool) -> None:
    problem = Problem()
    method = made(problem, alignment=alignment, bases=bases, center=center)
    federation = Federation(with_extras(method), problem, sgd(LR, steps=STEPS))
    W, head, s = problem.to_dense(*LAYERS), problem.to_dense(*HEAD), 3.0 / 2
    LR_of = {layer.name: written_out(method, layer) for layer in method.spec.layers}
    A = {layer: federation.state.tensors[join_tensor_name(layer, "A")].double() for layer in LAYERS}
    if center:
        W = {one: W[one] - s * LR_of[one][0] @ A[one].T @ A[one] @ LR_of[one][1] for one in LAYERS}
        for one in LAYERS:
            assert close(federation.get_weight(one), problem.to_dense(one)[one], 1e-7)  # the start is W0

    for positions in [(0, 1, 2, 3), (0, 2, 3), (0, 1, 2, 3)]:
        cohort = [problem.client_ids[position] for position in positions]
        federation.round(cohort)
        shares = problem.shares(cohort)
        trained = {}
        for id in cohort:
            mine, my_head = dict(A), dict(head)
            for _ in range(STEPS):
                full = {one: W[one] + s * LR_of[one][0] @ mine[one].T @ mine[one] @ LR_of[one][1] for one in LAYERS}
                dense = problem.gradients(id, {**full, **my_head})
                for one in LAYERS:
                    H = s * LR_of[one][0].T @ dense[one] @ LR_of[one][1].T  # gradient by A^T A
                    mine[one] = mine[one] - LR * mine[one] @ (H + H.T)
                my_head = {name: my_head[name] - LR * dense[name] for name in HEAD}
            trained[id] = mine, my_head
        head = average((shares[id], own) for id, (_, own) in trained.items())
        for one in LAYERS:
            Q = sum((shares[id] * mine[one].T @ mine[one] for id, (mine, _) in trained.items()), torch.zeros(()))
            A[one] = next_A(Q, A[one], alignment)
            assert close(federation.state.tensors[join_tensor_name(one, "A")], A[one], 1e-7 if center else 1e-9)
            change = s * LR_of[one][0] @ A[one].T @ A[one] @ LR_of[one][1]
            assert close(federation.get_weight(one), W[one] + change, 1e-7 if center else 1e-9)
        for name in HEAD:
            assert close(federation.state.tensors[f"extras/{name}"], head[name], 1e-7 if center else 1e-9)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.integers(0, 1000), st.booleans())
def test_the_stack_s_factor_has_the_gram_matrix_of_the_replies(
    clients: int, rank: int, k: int, seed: int, equal: bool
) -> None:
    """Also where replies are equal, so that the stack is rank-deficient; its rows are the rank of Q."""
    rng = torch.Generator().manual_seed(seed)
    one = torch.randn(rank, k, generator=rng, dtype=torch.float64)
    replies = [one if equal else torch.randn(rank, k, generator=rng, dtype=torch.float64) for _ in range(clients)]
    shares = torch.rand(clients, generator=rng, dtype=torch.float64) + 0.1
    shares /= shares.sum()
    factor = compute_gram_factor(
        torch.cat([math.sqrt(share) * A for share, A in zip(shares.tolist(), replies, strict=True)])
    )
    Q = sum((share * A.T @ A for share, A in zip(shares, replies, strict=True)), torch.zeros(()))
    assert close(factor.T @ factor, Q)
    assert len(factor) == int(torch.linalg.matrix_rank(Q))
    gram = factor @ factor.T
    assert torch.allclose(gram, torch.diag(gram.diagonal()), atol=1e-9)
    assert (gram.diagonal().diff() <= 1e-9).all()


def test_replies_of_nothing_are_a_factor_of_zeros() -> None:
    assert torch.equal(compute_gram_factor(torch.zeros(4, 6)), torch.zeros(1, 6, dtype=torch.float64))


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("r", [2, 7])
def test_a_round_in_which_nobody_moved(alignment: str, r: int) -> None:
    """A~ is a rotation of A then. Procrustes undoes it; without, only the weight is the same. Also with r > k."""
    problem = Problem(clients=3)
    method = made(problem, alignment=alignment, r=r)
    federation = Federation(with_extras(method), problem, sgd(lr=0.0))
    before = {layer: federation.state.tensors[join_tensor_name(layer, "A")].double() for layer in LAYERS}
    weights = {layer: federation.get_weight(layer) for layer in LAYERS}
    federation.round()
    for layer in LAYERS:
        after = federation.state.tensors[join_tensor_name(layer, "A")]
        assert close(federation.get_weight(layer), weights[layer], 1e-7)
        assert close(after, before[layer], 1e-7) == (alignment != "none")


@pytest.mark.parametrize("bases", ["structured", "dense"])
@pytest.mark.parametrize("center", [pytest.param(False, marks=pytest.mark.slow), True])
def test_only_A_is_transmitted(bases: str, center: bool) -> None:
    """And, once, what ``center`` takes off the base. k is 5 for the 8 x 5 layer and 6 for the 6 x 8 one."""
    problem = Problem()
    federation = Federation(with_extras(made(problem, bases=bases, center=center)), problem, sgd(LR))
    taken = 2 * (8 + 5 + 6 + 8) if center else 0
    for number in range(2):
        federation.round()
        for id in problem.client_ids:
            expected = (2 * (5 + 6) + (0 if number else taken), 2 * (5 + 6))
            assert federation.elements[id] == federation.declare_claims(id, number) == expected


def test_structured_bases_hold_no_matrix() -> None:
    """4096 x 4096: 8192 numbers in place of 33 million."""
    method = FLoRG(spec=Problem().adapted().spec)
    _, fixed = method.build_fixed(LayerSpec("big", 4096, 4096))
    assert sum(value.numel() for value in fixed.values()) == 2 * 4096


def test_zero_is_a_stationary_point_and_the_start_is_not() -> None:
    problem = Problem()
    for init_A in ("gaussian", "orthonormal"):
        method = made(problem, init_A=init_A, init_std=0.01)
        federation = Federation(with_extras(method), problem, sgd(LR))
        for layer in method.spec.layers:
            A = federation.state.tensors[join_tensor_name(layer.name, "A")].double()
            assert 0.2 < float(A.norm()) / (0.01 * math.sqrt(A.numel())) < 2
            gram = A @ A.T / (1e-4 * min(layer.shape))
            assert close(gram, torch.eye(2), 1e-6) == (init_A == "orthonormal")
        before = {layer: federation.get_weight(layer) for layer in LAYERS}
        federation.round()
        assert all(not close(federation.get_weight(layer), before[layer], 1e-6) for layer in LAYERS)
    for layer in LAYERS:  # nothing was taken off the base
        assert torch.equal(
            materialize(problem.to_dense(layer)[layer], federation.state.base, layer), problem.to_dense(layer)[layer]
        )


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_a_client_s_moments_do_not_outlive_a_rotation(alignment: str) -> None:
    """The server's coordinates last where A is rotated towards the former one; what clients stored is dropped."""
    problem = Problem()
    method = made(problem, alignment=alignment)
    federation = Federation(with_extras(method), problem, sgd(LR))
    for expected in (1, 2):
        federation.round()
        assert federation.job().generation == expected
        assert federation.state.generation == (expected if alignment == "none" else 0)
    refusal = Scaffold(inner=method).explain_refusal(method.declare_claims())
    assert (refusal is not None) == (alignment == "none")


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("r", [2, pytest.param(7, marks=pytest.mark.slow)])
def test_gram_sums_give_what_stacked_factors_give(alignment: str, r: int) -> None:
    """To the rounding of squares: three rounds, cohorts that change, non-square layers, also with r > k."""
    found: dict[bool, Federation] = {}
    problems = {sums: Problem() for sums in (False, True)}
    for sums, problem in problems.items():
        method = made(problem, alignment=alignment, r=r, gram_sums=sums)
        assert method.declare_claims().reduction == ("sum" if sums else "stack")
        found[sums] = Federation(with_extras(method), problem, sgd(LR, steps=STEPS))
        for positions in [(0, 1, 2, 3), (0, 2, 3), (0, 1, 2, 3)]:
            found[sums].round([problem.client_ids[position] for position in positions])
    for layer in LAYERS:
        assert close(found[True].get_weight(layer), found[False].get_weight(layer), 1e-6)
        if alignment != "none":  # signs of directions that are all but equal may turn
            one, other = (found[sums].state.tensors[join_tensor_name(layer, "A")] for sums in (True, False))
            assert close(one.double(), other.double(), 1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 1000))
def test_the_factor_of_a_gram_matrix_is_that_of_its_stack(rows: int, k: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    stack = torch.randn(rows, k, generator=rng, dtype=torch.float64)
    factor = factorize_gram(stack.T @ stack)
    assert close(factor.T @ factor, stack.T @ stack)
    assert len(factor) == min(rows, k)
    skewed = stack.T @ stack + torch.triu(torch.full((k, k), 1e-3, dtype=torch.float64), 1)
    symmetric = factorize_gram((skewed + skewed.T) / 2)
    assert close(factorize_gram(skewed).T @ factorize_gram(skewed), symmetric.T @ symmetric)
    assert torch.equal(factorize_gram(torch.zeros(k, k)), torch.zeros(1, k, dtype=torch.float64))


KEY = "florg"


@pytest.fixture
def gram(run_method: RunMethod) -> RunMethod:
    """``run_method`` with the option set."""

    def get(key: str, **changes: Mapping[str, Any]) -> MethodRun:
        return run_method(key, **{**changes, "method": {"gram_sums": True, **changes.get("method", {})}})

    return get


def test_it_declares_what_it_does(gram: RunMethod) -> None:
    run = gram(KEY)
    assert run.federation.method.declare_claims().reduction == "sum"
    assert method_checks.sends(run) == run.federation.method.declare_claims().sends == "other"
    for round in run.rounds:
        assert not any(call.result.stack for call in round.of("contribute"))


def test_claims(gram: RunMethod) -> None:
    method_checks.require_exactness(KEY, gram)
    method_checks.require_any_order(KEY, gram)
    method_checks.require_new_values(KEY, gram)
    method_checks.require_no_writes(KEY, gram)
    method_checks.require_short_moments(KEY, gram)
    method_checks.require_frozen_tensors(KEY, {}, gram)


@pytest.mark.parametrize("policy", others_slow(method_checks.POLICIES, ["frozen"]))
def test_messages(policy: str, gram: RunMethod) -> None:
    method_checks.require_declared_bytes(KEY, policy, gram)
    method_checks.require_extras_policy(KEY, policy, gram)


def test_a_client_that_was_away(gram: RunMethod) -> None:
    method_checks.require_catching_up(KEY, gram)


SHAPES = {"wide": (6, 11), "tall": (13, 5)}


class _Oracle(PairOracle):
    """Takes the best approximation of rank 2 of the mean dense product by numpy's SVD."""

    def finish(self, trained: Mapping[str, Pairs], shares: Mapping[str, float]) -> None:
        for one in LAYERS:
            products = ((share, {one: trained[id][one]["B"] @ trained[id][one]["A"]}) for id, share in shares.items())
            U, S, Vt = np.linalg.svd(average(products)[one].numpy(), full_matrices=False)
            signs = np.sign(U[np.abs(U).argmax(0), np.arange(len(S))])[:2]
            B, A = U[:, :2] * signs * np.sqrt(S[:2]), (signs * np.sqrt(S[:2]))[:, None] * Vt[:2]
            self.pairs[one] = {"A": torch.from_numpy(A), "B": torch.from_numpy(B)}


@pytest.mark.parametrize("oversampling", others_slow([0, 3, 40], [3]))
@pytest.mark.parametrize("uniform", [False, True], ids=["by examples", "uniform"])
def test_rounds_match_dense_products(oversampling: int, uniform: bool) -> None:
    """Sketches of 2, 5 and 42 columns; the last are wider than the layers of 8 x 5 and 6 x 8."""
    problem = Problem()
    made = federation(
        FedASK(spec=problem.adapted().spec, r=2, lora_alpha=4, oversampling=oversampling), uniform=uniform
    )
    follow(made, _Oracle(made), train="B", uniform=uniform)
    for one in LAYERS:  # both factors share the singular values
        A, B = made.state.tensors[join_tensor_name(one, "A")], made.state.tensors[join_tensor_name(one, "B")]
        assert close(A @ A.T, B.T @ B)


def test_with_both_factors_trained_a_sketch_as_wide_as_the_layers_gives_the_best_approximation() -> None:
    """Four clients of rank 2: the mean product has rank 5 and 6 in layers of 8 x 5 and 6 x 8."""
    problem = Problem()
    made = federation(FedASK(spec=problem.adapted().spec, r=2, lora_alpha=4, oversampling=6, train_A=True))
    follow(made, _Oracle(made), train="AB")


def _sketch(pairs: list[tuple[float, Tensor, Tensor]], oversampling: int, shape: tuple[int, int], r: int) -> Tensor:
    """B A after the two exchanges of clients that are given as weight, B and A."""
    method = FedASK(spec=Spec((LayerSpec("layer", *shape),)), r=r, oversampling=oversampling, train_A=True)
    client, state = Client("client", r, 1.0, 1, 1.0), ServerState(round=3)
    job = method.start(Message(method.init(None).tensors, {"generation": 0}), client, {}, 3)
    means: dict[str, Tensor] = {}
    trained = [{"layer/B": B, "layer/A": A} for _, B, A in pairs]
    first = [method.finish(job, Trained(tensors), client, {}, 3)[0].tensors["layer/Y"] for tensors in trained]
    means["layer/Y"] = sum((p * Y for (p, _, _), Y in zip(pairs, first, strict=True)), torch.zeros(()))
    order = method.build_second_order(state, Reduced(means))
    second = [method.build_second_reply(order, tensors, client, 3).tensors["layer/P"] for tensors in trained]
    means["layer/P"] = sum((p * P for (p, _, _), P in zip(pairs, second, strict=True)), torch.zeros(()))
    after = method.update(state, Reduced(means)).tensors
    return after["layer/B"] @ after["layer/A"]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_sum_is_recovered_when_the_sketch_has_its_rank(shape: tuple[int, int]) -> None:
    """Three clients with pairs of rank 1, whose weighted sum has rank 3, which is r: nothing is cut off."""
    rng, pairs = np.random.default_rng(5), []
    for weight in (0.5, 0.3, 0.2):
        B, A = np.zeros((shape[0], 3)), rng.normal(size=(3, shape[1]))
        B[:, :1] = rng.normal(size=(shape[0], 1))
        pairs.append((weight, torch.from_numpy(B), torch.from_numpy(A)))
    expected = sum(weight * B.numpy() @ A.numpy() for weight, B, A in pairs)
    assert np.linalg.matrix_rank(expected) == 3
    assert np.allclose(_sketch(pairs, 0, shape, r=3).numpy(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_oversampling_brings_the_result_to_the_best_approximation(shape: tuple[int, int]) -> None:
    """Of a sum whose rank is larger than r; the error is never below the best one, and reaches it with all columns."""
    rng = np.random.default_rng(6)
    pairs = [
        (weight, torch.from_numpy(rng.normal(size=(shape[0], 2))), torch.from_numpy(rng.normal(size=(2, shape[1]))))
        for weight in (0.4, 0.35, 0.25)
    ]
    dense = sum(weight * B.numpy() @ A.numpy() for weight, B, A in pairs)
    best = np.sqrt(np.square(np.linalg.svd(dense)[1][2:]).sum())
    found = [
        np.linalg.norm(_sketch(pairs, oversampling, shape, r=2).numpy() - dense) for oversampling in (0, min(shape) - 2)
    ]
    assert found[0] > best * 1.0001
    assert found[1] == pytest.approx(best, rel=1e-10)


def test_each_round_and_layer_draws_a_sketch_of_its_own_that_all_clients_share() -> None:
    spec = Spec((LayerSpec("one", 4, 7), LayerSpec("two", 4, 7)))
    method, tensors = FedASK(spec=spec, r=2), {}
    for layer in ("one", "two"):
        tensors |= {f"{layer}/B": torch.eye(4)[:, :2], f"{layer}/A": torch.eye(7)[:2]}
    replies = {
        (id, round): method.finish(
            method.start(Message(tensors, {"generation": 0}), None, {}, round),
            Trained(tensors),
            Client(id, 2, 1.0, 1, 1.0),
            {},
            round,
        )[0].tensors
        for id in ("a", "b")
        for round in (0, 1)
    }
    assert torch.equal(replies["a", 0]["one/Y"], replies["b", 0]["one/Y"])
    assert not torch.allclose(replies["a", 0]["one/Y"], replies["a", 1]["one/Y"])
    assert not torch.allclose(replies["a", 0]["one/Y"], replies["a", 0]["two/Y"])


def test_replies_of_zeros_leave_a_model_that_can_be_trained() -> None:
    method = FedASK(spec=Spec((LayerSpec("layer", 6, 4),)), r=2, oversampling=1)
    means = {"layer/Y": torch.zeros(6, 3), "layer/P": torch.zeros(4, 3)}
    after = method.update(ServerState(), Reduced(means)).tensors
    assert not after["layer/B"].any()
    assert torch.allclose(after["layer/A"] @ after["layer/A"].T, torch.eye(2))


@pytest.mark.parametrize("Q", [torch.zeros(6, 2), torch.zeros(3, 6), torch.zeros(6, 3, dtype=torch.int64), None])
def test_an_order_with_other_matrices_is_refused(Q: Tensor | None) -> None:
    method = FedASK(spec=Spec((LayerSpec("layer", 6, 4),)), r=2, oversampling=1)
    tensors = {"layer/B": torch.zeros(6, 2), "layer/A": torch.ones(2, 4)}
    order = Message({} if Q is None else {"layer/Q": Q})
    with refused("message.tensors"):
        method.build_second_reply(order, tensors, Client("a", 2, 1.0, 1, 1.0), 0)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ({"layer/P": torch.ones(5, 3)}, r"\[5, 3\]"),
        ({"layer/P": torch.full((4, 3), float("nan"))}, "not finite"),
        ({"layer/P": torch.full((4, 3), 1e20)}, "numbers up to"),
        ({"layer/P": torch.ones(4, 3), "layer/A": torch.ones(2, 4)}, "with"),
        ({"layer/Y": torch.ones(6, 3)}, "tensors are not those"),
    ],
)
def test_hostile_replies_of_the_second_exchange_are_refused(reply: dict[str, Tensor], reason: str) -> None:
    inner = FedASK(spec=Spec((LayerSpec("layer", 6, 4),)), r=2, oversampling=1)
    state = inner.init(None)
    order = inner.build_second_order(state, Reduced({"layer/Y": torch.randn(6, 3)}))
    method, client = SecondExchange(inner=inner, order=order, state=state), Client("a", 2, 1.0, 1, 1.0)
    expected = build_untrained_reply(method, order, client, 0)
    validate_reply(method, Message({"layer/P": torch.ones(4, 3)}), client, expected)
    with pytest.raises(ValueError, match=reason):
        validate_reply(method, Message(reply), client, expected)


def test_only_clients_that_train_b_alone_average_exactly() -> None:
    spec = Spec((LayerSpec("layer", 6, 4),))
    assert FedASK(spec=spec, r=2).declare_claims().exact
    assert not FedASK(spec=spec, r=2, train_A=True).declare_claims().exact
