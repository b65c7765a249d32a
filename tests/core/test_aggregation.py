"""What servers make of stacks, against dense sums in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspan.core.aggregation import average_stack, choose_smaller_form, compute_residual, map_layers, sum_products
from fedspan.core.lowrank import LowRank, svd
from fedspan.core.tensors import create_generator
from fedspan.core.values import Client, LayerSpec, Reduced, StackItem

few = settings(max_examples=30, deadline=None)
shapes = st.tuples(st.integers(1, 7), st.integers(1, 7))


def stack(seed: int, shape: tuple[int, int], ranks: list[int], dtype: torch.dtype = torch.float64) -> Reduced:
    """Random replies of unequal weights; scaling 6 / rank."""
    rng = create_generator(seed, "stack")
    total = sum(range(1, len(ranks) + 1))
    items = []
    for k, rank in enumerate(ranks):
        A = torch.randn((rank, shape[1]), generator=rng, dtype=torch.float64).to(dtype)
        B = torch.randn((shape[0], rank), generator=rng, dtype=torch.float64).to(dtype)
        items.append(StackItem(Client(f"c{k}", rank, 6 / rank, 1, 1.0), (k + 1) / total, {"one/A": A, "one/B": B}))
    return Reduced(stack=tuple(items), count=len(items))


def dense_mean(reduced: Reduced) -> Tensor:
    """``sum_i p_i s_i B_i A_i``, one product after another."""
    products = [one.weight * one.client.scaling * one.tensors["one/B"] @ one.tensors["one/A"] for one in reduced.stack]
    return torch.stack(products).sum(0)


@few
@given(st.integers(0, 999), shapes, st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_products(seed: int, shape: tuple[int, int], ranks: list[int]) -> None:
    reduced = stack(seed, shape, ranks)
    pair = sum_products("one", reduced)
    assert pair.rank == sum(ranks)
    assert torch.allclose(pair.to_dense(), dense_mean(reduced), atol=1e-9)


@few
@given(st.integers(0, 999), shapes, st.integers(1, 5), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 9)))
def test_residual(seed: int, shape: tuple[int, int], count: int, rank: int, kept: int | None) -> None:
    """Rank (K - 1) r as factors; the best approximation of the rank asked for."""
    reduced = stack(seed, shape, [rank] * count)
    means, s = average_stack(reduced), 6 / rank
    lost = dense_mean(reduced) - s * means["one/B"] @ means["one/A"]
    found = compute_residual("one", reduced, means["one/B"], s, kept)
    assert found.rank <= (count - 1) * rank
    cut = torch.linalg.svdvals(lost)[found.rank if kept is None else kept :]
    assert torch.isclose((found.to_dense() - lost).norm(), cut.norm(), atol=1e-9)
    if kept is not None and kept < min(found.rank, *shape):
        assert found.rank == kept


def test_means_are_summed_in_float64_and_given_back_as_they_came() -> None:
    """Many small replies after a large one: a float32 sum would lose them."""
    clients = [Client(f"c{k:04d}", 1, 1.0, 1, 1.0) for k in range(1001)]
    values = [torch.full((2, 2), 2.0**24)] + [torch.ones(2, 2)] * 1000
    items = [StackItem(one, 1.0, {"one/A": value}) for one, value in zip(clients, values, strict=True)]
    mean = average_stack(Reduced(stack=tuple(items), count=1001))["one/A"]
    assert mean.dtype == torch.float32
    assert torch.equal(mean, torch.full((2, 2), 2.0**24 + 1000))


@pytest.mark.parametrize(("rank", "kind"), [(2, LowRank), (4, LowRank), (5, Tensor)])
def test_the_smaller_form(rank: int, kind: type) -> None:
    """6 x 12: factors of rank 4 are as many elements as the matrix."""
    pair = LowRank(torch.ones(6, rank), torch.ones(rank, 12), 0.5)
    form = choose_smaller_form(pair)
    assert type(form) is kind
    assert torch.equal(form if isinstance(form, Tensor) else form.to_dense(), pair.to_dense())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_layers_are_mapped_in_order_on_one_thread_each(threads: int) -> None:
    """Bits do not depend on the number of threads, which is afterwards what it was."""
    layers = [LayerSpec(f"layer{k}", 30, 20) for k in range(7)]
    seen: set[int] = set()

    def work(layer: LayerSpec) -> tuple[Tensor, ...]:
        seen.add(torch.get_num_threads())
        rng = create_generator(0, layer.name)
        return svd(LowRank(torch.randn((30, 9), generator=rng), torch.randn((9, 20), generator=rng)))

    expected = {layer.name: work(layer) for layer in layers}
    seen.clear()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = map_layers(work, layers)
        assert torch.get_num_threads() == threads
        with pytest.raises(ZeroDivisionError):
            map_layers(lambda layer: 1 // 0, layers)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert seen == {1}
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert all(torch.equal(one, other) for one, other in zip(found[name], values, strict=True))
    assert map_layers(work, []) == {}
