"""The median and the trimmed mean of replies, against numpy and scipy, and the mean of clipped changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedspan.config import parse_config
from fedspan.core.values import Client, Contribution, Reduced
from fedspan.errors import FedspanError
from fedspan.federation.aggregation.reduction import Reducer, reducer_for
from fedspan.federation.settings import RoundSettings


def reducer_of(clients: list[Client], origin: torch.Tensor | None = None, **settings: Any) -> Reducer:
    def known() -> dict[str, torch.Tensor]:
        assert origin is not None
        return {"layer/A": origin}

    return reducer_for(RoundSettings(1, **settings), clients, len(clients), 0, known)


def reduced(
    values: list[torch.Tensor], order: list[int], origin: torch.Tensor | None = None, **settings: Any
) -> Reduced:
    clients = [Client(f"c{number:03}", 2, 1.0, 5, float(number + 1)) for number in range(len(values))]
    reducer = reducer_of(clients, origin, **settings)
    for number in order:
        reducer.add(clients[number].id, Contribution(sum={"layer/A": values[number]}))
    return reducer.result()


@given(st.integers(1, 9), st.floats(0.01, 0.49), st.randoms(use_true_random=False))
def test_coordinates_are_reduced_one_by_one_in_any_order(count: int, trim: float, rng: Any) -> None:
    draw = torch.Generator().manual_seed(rng.randrange(2**30))
    values = [torch.randn(3, 2, generator=draw) for _ in range(count)]
    order = list(range(count))
    rng.shuffle(order)
    stacked = torch.stack(values).double().numpy()
    median = reduced(values, order, reduction="median")
    assert median.count == count
    assert np.allclose(median.mean["layer/A"].numpy(), np.median(stacked, axis=0), atol=1e-6)
    dropped = min(int(np.ceil(trim * count)), (count - 1) // 2)
    expected = scipy.stats.trim_mean(stacked, dropped / count + 1e-9, axis=0)
    found = reduced(values, order, reduction="trimmed-mean", trim=trim).mean["layer/A"]
    assert found.dtype == torch.float32
    assert np.allclose(found.numpy(), expected, atol=1e-6)


def test_one_reply_of_five_can_t_move_them_far() -> None:
    good = [torch.full((2,), 1.0 + number / 10) for number in range(4)]
    for rule in ("median", "trimmed-mean", "clipped-mean"):
        replies, origin = [*good, torch.full((2,), 1e9)], torch.ones(2)
        found = reduced(replies, [0, 1, 2, 3, 4], origin, reduction=rule, trim=0.2).mean["layer/A"]
        assert 1.0 <= float(found.min()) <= float(found.max()) <= 1.3
    assert float(reduced([*good, torch.full((2,), 1e9)], [0, 1, 2, 3, 4]).mean["layer/A"].max()) > 1e8


def test_a_tensor_that_a_client_leaves_out_counts_as_zero_and_a_stack_is_refused() -> None:
    clients = [Client(id, 2, 1.0, 5, 1.0) for id in "abc"]
    reducer = reducer_of(clients, reduction="median")
    for id, value in (("a", 4.0), ("b", 2.0)):
        reducer.add(id, Contribution(sum={"x": torch.tensor([value])}))
    with pytest.raises(ValueError, match="no contribution yet of client 'c'"):
        reducer.result()
    reducer.add("c", Contribution(sum={"y": torch.ones(1)}))
    assert reducer.result().mean["x"].tolist() == [2.0]
    assert reducer.result().mean["y"].tolist() == [0.0]
    other = reducer_of(clients[:1], reduction="median")
    with pytest.raises(ValueError, match="no median"):
        other.add("a", Contribution(stack={"x": torch.ones(1)}))
    assert type(reducer_of(clients)) is Reducer


@given(st.integers(1, 7), st.floats(0.05, 20) | st.none(), st.randoms(use_true_random=False))
def test_changes_are_clipped_to_a_norm_and_averaged_by_weight(count: int, most: float | None, rng: Any) -> None:
    draw = torch.Generator().manual_seed(rng.randrange(2**30))
    origin = torch.randn(3, 2, generator=draw)
    values = [origin + torch.randn(3, 2, generator=draw) * 4**number for number in range(count)]
    order = list(range(count))
    rng.shuffle(order)
    found = reduced(values, order, origin, reduction="clipped-mean", max_norm=most)
    changes = np.stack([(value.double() - origin.double()).numpy() for value in values])
    norms = np.linalg.norm(changes.reshape(count, -1), axis=1)
    limit = np.median(norms) if most is None else most
    changes *= np.minimum(1, limit / norms)[:, None, None]
    expected = origin.numpy() + np.average(changes, axis=0, weights=np.arange(count) + 1)
    assert found.count == count
    assert found.mean["layer/A"].dtype == torch.float32
    assert np.allclose(found.mean["layer/A"].numpy(), expected, atol=1e-5)


def test_methods_that_stack_refuse_them() -> None:
    for rule in ("median", "trimmed-mean", "clipped-mean"):
        values = {"data": {"train": "x.csv"}, "method": {"name": "flora"}, "federation": {"reduction": rule}}
        why = f"{rule} cannot be combined with flora, whose server needs single replies"
        with pytest.raises(FedspanError, match=why) as refused:
            parse_config(values)
        assert refused.value.field == "federation.reduction"
        parse_config({**values, "method": {"name": "fedit"}})
