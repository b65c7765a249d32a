"""FedHM against dense weights, truncated by hand for every client's rank; convolutions on layers without a model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspan.core.parametrization import compute_dense_change
from fedspan.core.tensors import join_tensor_name, select_slots
from fedspan.core.values import Client, LayerSpec, Reduced, ServerState, Spec, StackItem
from fedspan.methods.fedhm import FedHM
from helpers.toys.oracle import average
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Federation, close, sgd, with_extras

LR, STEPS = 0.2, 3
RANKS = {"client-0": 1, "client-1": 2, "client-2": 4, "client-3": 6}  # more than fc1's 5 singular values


def _split(W: Tensor) -> tuple[Tensor, Tensor]:
    U, S, Vt = torch.linalg.svd(W.double(), full_matrices=False)
    return U * S.sqrt(), S.sqrt()[:, None] * Vt


@pytest.mark.parametrize("keep_global", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_matches_a_dense_oracle(decay: float, keep_global: bool) -> None:
    """Four rounds of gradient descent on the factors; the old weight joins where asked and nobody is of full rank."""
    problem = Problem()
    method = FedHM(spec=problem.adapted().spec, frobenius_decay=decay, keep_global=keep_global)
    training = sgd(LR, steps=STEPS)
    training = training.model_copy(update={"weight_decay": 0.3 if decay else 0.0})
    federation = Federation(with_extras(method), problem, training, ranks=RANKS)
    W, head = {one: federation.get_weight(one) for one in LAYERS}, problem.to_dense(*HEAD)
    factors = {one: tuple(federation.state.tensors[f"{one}/{slot}"].double() for slot in "UV") for one in LAYERS}
    for one in LAYERS:
        for ours, theirs in zip(factors[one], _split(problem.to_dense(one)[one]), strict=True):
            assert close(ours.abs(), theirs.abs(), 1e-5)  # the server begins in float32; signs are free
    for number, positions in enumerate([(0, 1, 2, 3), (0, 2), (0, 1), (0, 1)]):
        cohort = [problem.client_ids[position] for position in positions]
        federation.round(cohort)
        shares, products, heads = problem.shares(cohort), {}, {}
        for id in cohort:
            rank = RANKS[id]
            U = {one: factors[one][0][:, :rank] for one in LAYERS}
            V = {one: factors[one][1][:rank] for one in LAYERS}
            own_head = dict(head)
            for _ in range(STEPS):
                dense = problem.gradients(id, {**{one: U[one] @ V[one] for one in LAYERS}, **own_head})
                for one in LAYERS:
                    G = dense[one] + decay * U[one] @ V[one]  # of decay / 2 ||U V||^2
                    U[one], V[one] = U[one] - LR * G @ V[one].T, V[one] - LR * U[one].T @ G
                for name in HEAD:
                    own_head[name] = own_head[name] - LR * (dense[name] + (0.3 if decay else 0.0) * own_head[name])
            products[id], heads[id] = {one: U[one] @ V[one] for one in LAYERS}, own_head
            assert federation.elements[id] == federation.declare_claims(id, number)
        mean = average((shares[id], own) for id, own in products.items())
        for one, side in (("fc1", 5), ("fc2", 6)):
            if keep_global and max(RANKS[id] for id in cohort) < side:
                mean[one] = (len(cohort) * mean[one] + W[one]) / (len(cohort) + 1)
        W, head = mean, average((shares[id], own) for id, own in heads.items())
        factors = {one: _split(W[one]) for one in LAYERS}
        for one in LAYERS:
            assert close(federation.get_weight(one), W[one])  # the global model is the whole mean
            U, S, Vt = torch.linalg.svd(W[one], full_matrices=False)
            for id, rank in RANKS.items():
                kept = U[:, :rank] * S[:rank] @ Vt[:rank]  # Eckart-Young: the best of that rank
                assert close(federation.get_weight(one, id), kept)
        for name in HEAD:
            assert close(federation.state.tensors[f"extras/{name}"], head[name])


def test_the_pretrained_weight_takes_no_part() -> None:
    """No frozen base: whatever the module's weight holds, only the factors count."""
    problem = Problem()
    federation = Federation(with_extras(FedHM(spec=problem.adapted().spec)), problem, sgd(LR), ranks=RANKS)
    before = federation.loss("client-1")
    with torch.no_grad():
        for layer in federation.adapted.layers.values():
            layer.stored_weight.fill_(1e6)
    assert federation.loss("client-1") == before


def test_a_rank_that_the_weight_has_lost_can_be_trained_again() -> None:
    """After a round of rank 1 alone W has rank 1; two zero factors would keep a client of rank 4 there for ever."""
    problem = Problem()
    federation = Federation(with_extras(FedHM(spec=problem.adapted().spec)), problem, sgd(LR, steps=2), ranks=RANKS)
    federation.round(["client-0"])
    for one in LAYERS:
        assert torch.linalg.matrix_rank(federation.get_weight(one)) == 1
        assert close(federation.get_weight(one, "client-2"), federation.get_weight(one))
    federation.round(["client-2"])
    assert federation.elements["client-2"] == federation.declare_claims("client-2", 1)
    for one in LAYERS:
        assert torch.linalg.matrix_rank(federation.get_weight(one)) > 1


def test_all_zeros_are_no_dead_end() -> None:
    layer = LayerSpec("one", 6, 4)
    method = FedHM(spec=Spec((layer,)))
    state = method.init(_Random((layer,), 0))
    client = Client("c", 2, 1.0, 1, 1.0)
    zeros = {"one/U": torch.zeros(6, 2), "one/V": torch.zeros(2, 4)}
    after = method.update(state, Reduced(stack=(StackItem(client, 1.0, zeros),), count=1))
    job = method.start(method.sync(after, client), client, {}, after.round)
    assert not job.tensors["one/U"].any()
    assert all(row.norm() > 0.5 for row in job.tensors["one/V"])


class _Random:
    """Pretrained weights of any layers."""

    def __init__(self, layers: tuple[LayerSpec, ...], seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.weights = {layer.name: torch.randn(layer.shape, generator=rng) for layer in layers}

    def get_weight(self, layer: str) -> Tensor:
        return self.weights[layer].clone()

    def get_extra(self, parameter: str) -> Tensor:
        raise KeyError(parameter)


CONVOLUTIONS = (
    LayerSpec("linear", 7, 5),
    LayerSpec("square", 4, 3 * 9, (3, 3)),
    LayerSpec("tall", 6, 2 * 3, (3, 1)),
    LayerSpec("wide", 3, 5 * 2, (1, 2)),
)


def _rectangle(weight: Tensor, layer: LayerSpec) -> Tensor:
    """Entry by entry: (o k1 + a, c k2 + b) of the matrix is (o, c, a, b) of the convolution."""
    k1, k2 = layer.kernel
    channels = layer.in_features // (k1 * k2)
    matrix = torch.zeros(layer.out_features * k1, channels * k2, dtype=torch.float64)
    four = weight.double().view(layer.out_features, channels, k1, k2)
    for o in range(layer.out_features):
        for c in range(channels):
            for a in range(k1):
                for b in range(k2):
                    matrix[o * k1 + a, c * k2 + b] = four[o, c, a, b]
    return matrix


def _weight(method: FedHM, state: ServerState, layer: LayerSpec, client: Client | None) -> Tensor:
    """What a layer computes with: (O, channels * k1 * k2)."""
    job = method.start(method.sync(state, client), client, {}, state.round)
    slots = {slot: value.double() for slot, value in select_slots(job.tensors, layer.name).items()}
    return compute_dense_change(
        job.parametrization[layer.name].compute_effective(slots), torch.zeros(layer.shape).double()
    )


@given(
    rounds=st.lists(st.lists(st.integers(1, 14), min_size=1, max_size=3), min_size=1, max_size=3),
    weights=st.lists(st.floats(0.1, 10.0), min_size=3, max_size=3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15, deadline=None)
def test_convolutions_of_any_ranks(rounds: list[list[int]], weights: list[float], seed: int) -> None:
    """Random replies: the mean is that of the clients' weights, and each is sent the best of its rank, k1 and k2 apart.

    Of a single client of rank 1 to one of rank 14, which is more than any layer here has.
    """
    method = FedHM(spec=Spec(CONVOLUTIONS), seed=seed)
    start = _Random(CONVOLUTIONS, seed)
    state, rng = method.init(start), torch.Generator().manual_seed(seed + 1)
    for layer in CONVOLUTIONS:
        assert close(_weight(method, state, layer, None), start.get_weight(layer.name), 1e-6)
    for ranks in rounds:
        total, items = sum(weights[: len(ranks)]), list[StackItem]()
        expected = {layer.name: torch.zeros(layer.shape, dtype=torch.float64) for layer in CONVOLUTIONS}
        for index, rank in enumerate(ranks):
            client, share = Client(f"c{index}", rank, 1.0, 1, weights[index]), weights[index] / total
            job = method.start(method.sync(state, client), client, {}, state.round)
            trained = {n: v + 0.3 * torch.randn(v.shape, generator=rng) for n, v in job.tensors.items()}
            items.append(StackItem(client, share, trained))
            for layer in CONVOLUTIONS:
                slots = {slot: value.double() for slot, value in select_slots(trained, layer.name).items()}
                effective = job.parametrization[layer.name].compute_effective(slots)
                expected[layer.name] += share * compute_dense_change(effective, torch.zeros(layer.shape).double())
                sent = sum(trained[join_tensor_name(layer.name, slot)].numel() for slot in "UV")
                assert sent == min(rank, *layer.rectangle) * sum(layer.rectangle)
        state = method.update(state, Reduced(stack=tuple(items), count=len(items)))
        for layer in CONVOLUTIONS:
            assert close(_weight(method, state, layer, None), expected[layer.name], 1e-5)
            matrix = _rectangle(expected[layer.name], layer)
            S = torch.linalg.svdvals(matrix)
            for rank in (1, 2, 5, 14):
                cut = _rectangle(_weight(method, state, layer, Client("any", rank, 1.0, 1, 1.0)), layer)
                assert torch.linalg.matrix_rank(cut, rtol=1e-5) <= rank
                assert abs(float((cut - matrix).norm() - S[rank:].norm())) < 1e-5 * float(S.norm())
