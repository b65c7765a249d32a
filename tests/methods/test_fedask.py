"""FedASK against dense products, and its two sketches on their own."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import Client, LayerSpec, Message, Reduced, ServerState, Spec, Trained
from fedspan.errors import FedspanError
from fedspan.federation.second_exchange import SecondExchange
from fedspan.federation.validation import build_untrained_reply, validate_reply
from fedspan.methods.fedask import FedASK
from helpers.dense_rounds import PairOracle, Pairs, federation, follow
from helpers.families import others_slow
from helpers.toys.oracle import average
from helpers.toys.problem import LAYERS, Problem
from helpers.toys.rounds import close

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
    with pytest.raises(FedspanError, match=r"a matrix Q \[6, 3\]"):
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
