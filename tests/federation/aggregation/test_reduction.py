"""The reducer: independent of the order of arrival, and equal to the weighted mean written out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspan.core.values import Client, Contribution, Reduced
from fedspan.federation.aggregation.reduction import Reducer

IDS = ("a", "b", "c", "d")


def _client(id: str, weight: float) -> Client:
    return Client(id, rank=2, scaling=1.0, examples=3, weight=weight)


@st.composite
def cohorts(draw: st.DrawFn) -> dict[str, tuple[Client, Contribution | None]]:
    """Clients with weights of very different size; replies of both kinds, some with their own weight, some failed."""
    cohort: dict[str, tuple[Client, Contribution | None]] = {}
    for id in IDS[: draw(st.integers(1, 4))]:
        client = _client(id, draw(st.sampled_from([0.1, 1.0, 3.0, 1e4])))
        rng = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
        reply: Contribution | None = None
        if id == "a" or draw(st.integers(0, 3)):
            reply = Contribution(
                sum={
                    "l/A": torch.randn((2, 3), generator=rng),
                    "l/B": torch.randn((4, 2), generator=rng, dtype=torch.float64) * 1e6,
                },
                stack={"l/U": torch.randn((3, draw(st.integers(1, 3))), generator=rng)},
                weight=draw(st.sampled_from([None, 0.0, 0.7])) if id != "a" else 2.5,
            )
        cohort[id] = client, reply
    return cohort


def _reduce(cohort: dict[str, tuple[Client, Contribution | None]], order: tuple[str, ...]) -> Reduced:
    reducer = Reducer([cohort[id][0] for id in order])
    for id in order:
        reducer.add(id, cohort[id][1])
    return reducer.compute_result()


@given(cohorts())
@settings(max_examples=25, deadline=None)
def test_weighted_mean_and_stack_match_the_oracle(cohort: dict[str, tuple[Client, Contribution | None]]) -> None:
    reduced = _reduce(cohort, tuple(cohort))
    replies = {id: reply for id, (_, reply) in cohort.items() if reply is not None}
    weights = {id: cohort[id][0].weight if reply.weight is None else reply.weight for id, reply in replies.items()}
    total = math.fsum(weights.values())
    for name, tolerance in (("l/A", 1e-6), ("l/B", 1e-12)):
        expected = sum((weights[id] / total * replies[id].sum[name].double() for id in replies), torch.zeros(()))
        assert isinstance(expected, Tensor)
        assert torch.allclose(reduced.mean[name].double(), expected, rtol=tolerance, atol=tolerance * 1e6)
        assert reduced.mean[name].dtype == replies["a"].sum[name].dtype
    assert [item.client.id for item in reduced.stack] == sorted(replies)
    assert reduced.count == len(replies)
    assert sum(item.weight for item in reduced.stack) == pytest.approx(1.0, rel=1e-12)
    for item in reduced.stack:
        assert item.weight == pytest.approx(weights[item.client.id] / total, rel=1e-12)
        assert item.tensors["l/U"] is replies[item.client.id].stack["l/U"]


@given(cohorts())
@settings(max_examples=20, deadline=None)
def test_any_order_of_arrival_gives_the_same_bits(cohort: dict[str, tuple[Client, Contribution | None]]) -> None:
    first = _reduce(cohort, tuple(cohort))
    for order in itertools.permutations(cohort):
        other = _reduce(cohort, order)
        for name, value in first.mean.items():
            assert torch.equal(other.mean[name], value)
        assert [(item.client.id, item.weight) for item in other.stack] == [
            (item.client.id, item.weight) for item in first.stack
        ]


def test_a_failed_client_counts_for_nothing() -> None:
    clients = [_client("a", 1.0), _client("b", 5.0), _client("c", 3.0)]
    reducer = Reducer(clients)
    reducer.add("c", Contribution(sum={"l/A": torch.tensor([4.0])}))
    reducer.add("b", None)
    reducer.add("a", Contribution(sum={"l/A": torch.tensor([0.0])}))
    reduced = reducer.compute_result()
    assert reduced.mean["l/A"].item() == 3.0  # weights 1 and 3
    assert reduced.count == 2


def test_a_missing_client_is_named() -> None:
    reducer = Reducer([_client("a", 1.0), _client("b", 1.0)])
    reducer.add("b", Contribution(sum={"l/A": torch.zeros(1)}))
    with pytest.raises(ValueError, match="'a'"):
        reducer.compute_result()


def test_strangers_and_repetitions_are_refused() -> None:
    reducer = Reducer([_client("a", 1.0), _client("b", 1.0)])
    reply = Contribution(sum={"l/A": torch.zeros(1)})
    with pytest.raises(ValueError, match="'z'"):
        reducer.add("z", reply)
    for id in ("b", "a"):  # one that waits, and one that was folded at once
        reducer.add(id, reply)
        with pytest.raises(ValueError, match=f"'{id}'"):
            reducer.add(id, reply)


@pytest.mark.parametrize("replies", [{"a": None}, {"a": Contribution(sum={"l/A": torch.ones(1)}, weight=0.0)}])
def test_a_round_without_weight_is_refused(replies: dict[str, Contribution | None]) -> None:
    reducer = Reducer([_client("a", 1.0)])
    for id, reply in replies.items():
        reducer.add(id, reply)
    with pytest.raises(ValueError, match="positive weight"):
        reducer.compute_result()


def test_a_tensor_that_some_leave_out_counts_as_zero_for_them() -> None:
    """What LoRA-A2's masks and FedGaLore's segments rely on: sums of changes, absent ones being none."""
    reducer = Reducer([_client("a", 1.0), _client("b", 3.0)])
    reducer.add("a", Contribution(sum={"l/dA": torch.tensor([8.0])}))
    reducer.add("b", Contribution(sum={"l/dB": torch.tensor([4.0])}))
    mean = reducer.compute_result().mean
    assert (mean["l/dA"].item(), mean["l/dB"].item()) == (2.0, 3.0)


def test_contributions_are_not_written_to() -> None:
    value = torch.ones(2, dtype=torch.float64)
    reducer = Reducer([_client("a", 1.0), _client("b", 1.0)])
    for id in ("a", "b"):
        reducer.add(id, Contribution(sum={"l/A": value}))
    assert torch.equal(reducer.compute_result().mean["l/A"], torch.ones(2, dtype=torch.float64))
    assert torch.equal(value, torch.ones(2, dtype=torch.float64))


def test_small_addends_survive_large_ones() -> None:
    """The sum is in float64 even where replies are float32."""
    values = [1e8, 1.0, -1e8, 1.0]
    reducer = Reducer([_client(id, 1.0) for id in IDS])
    for id, value in zip(IDS, values, strict=True):
        reducer.add(id, Contribution(sum={"l/A": torch.tensor([value])}))
    mean = reducer.compute_result().mean["l/A"]
    assert mean.item() == 0.5
    assert mean.dtype == torch.float32


def test_integers_are_not_averaged_silently() -> None:
    reducer = Reducer([_client("a", 1.0), _client("b", 1.0)])
    for id, value in (("a", 2), ("b", 3)):
        reducer.add(id, Contribution(sum={"l/n": torch.tensor([value])}))
    assert reducer.compute_result().mean["l/n"].item() == 2.5
