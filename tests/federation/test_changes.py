"""Sizes of changes, limits compared within a cohort, and scaling: of every method's replies, summed or stacked."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from fedspan.core.values import Client, Contribution, Message
from fedspan.federation.changes import ChangeSize, compute_norm_limits, measure_change, rebase_change, shrink_reply
from fedspan.federation.federation import Federation
from fedspan.federation.progress import RoundResult
from fedspan.federation.protocol import Order
from fedspan.federation.serialization import encode_state
from fedspan.federation.validation import build_untrained_reply
from fedspan.methods.registry import METHODS
from fedspan.runs.setup import Prepared, prepare
from fedspan.transports.in_process import InProcess
from helpers import tiny
from helpers.watched_rounds import method_config

VICTIM = "west"
SENDING = [key for key, cls in METHODS.items() if cls.claims.sends != "nothing"]


@pytest.fixture(scope="module")
def prepared(tiny_folder: Path) -> Prepared:
    return prepare(tiny.config(tiny_folder, model={"target_modules": ["intermediate.dense"]}))


def federated(prepared: Prepared, folder: Path, key: str, **changes: Any) -> Federation:
    config = method_config(folder, key, federation={"clients_per_round": None, **changes})
    return tiny.variant(prepared, config).federation


def attacked(federation: Federation, factor: float) -> tuple[RoundResult, dict[str, Message]]:
    """Run one round in which a client's change is multiplied; return the honest replies, too."""
    assert isinstance(federation.transport, InProcess)
    host, replies, method = federation.transport.host, dict[str, Message](), federation.method

    def tamper(order: Order, sent: Message, reply: Message) -> Message:
        if order.task == "second":  # in which changes are scaled by the factors of the first exchange
            return reply
        replies[order.to] = reply
        if order.to != VICTIM or factor == 1:
            return reply
        assert order.client is not None
        start = build_untrained_reply(method, sent, replace(order.client, last_round=None), order.round)
        return boosted(reply, start, factor, method.declare_claims().directions)

    host.tamper = tamper
    return federation.run_round(federation.begin()), replies


def boosted(reply: Message, start: Message, factor: float, kept: tuple[str, ...]) -> Message:
    def changed(name: str, value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point() or name.rpartition("/")[2] in kept:
            return value
        origin = start.tensors[name].double().nan_to_num(0.0, 0.0, 0.0)
        return (origin + factor * (value.double() - origin)).to(value.dtype)

    return replace(reply, tensors={name: changed(name, value) for name, value in reply.tensors.items()})


@pytest.mark.parametrize("key", SENDING)
def test_a_long_change_counts_as_one_of_the_allowed_norm_in_every_method(
    key: str, tiny_folder: Path, prepared: Prepared
) -> None:
    """One client's change times 1000 moves the state as the same change cut to the limit does."""
    result, replies = attacked(federated(prepared, tiny_folder, key, clip_ratio=2.0), 1000.0)
    assert VICTIM in result.clipped
    federation = federated(prepared, tiny_folder, key, clip_ratio=2.0)
    method, state = federation.method, federation.begin().state
    sizes: dict[str, ChangeSize] = {}
    for id, reply in replies.items():
        client = federation.clients[id].client
        expected = build_untrained_reply(method, method.sync(state, client), client, 0)
        sizes[id] = measure_change(reply, method.contribute(reply, client), expected, method, client)
    limits = compute_norm_limits({**sizes, VICTIM: replace(sizes[VICTIM], norm=1000 * sizes[VICTIM].norm)}, 2.0)
    client = federation.clients[VICTIM].client
    expected = build_untrained_reply(method, method.sync(state, client), client, 0)
    long = boosted(replies[VICTIM], expected, 1000.0, method.declare_claims().directions)
    contribution = method.contribute(long, client)
    factor = result.clipped[VICTIM]
    shrunk = shrink_reply(method, long, contribution, expected, client, factor)
    message = boosted(long, expected, factor, method.declare_claims().directions) if shrunk.stack else long
    assert measure_change(message, shrunk, expected, method, client).norm == pytest.approx(limits[VICTIM], rel=0.02)
    assert all(bool(value.isfinite().all()) for value in result.progress.state.tensors.values())


@pytest.mark.parametrize("key", [*SENDING, "local-only"])
def test_a_limit_that_nothing_exceeds_changes_no_bit(key: str, tiny_folder: Path, prepared: Prepared) -> None:
    states = [
        encode_state(attacked(federated(prepared, tiny_folder, key, clip_ratio=ratio), 1.0)[0].progress.state)
        for ratio in (None, 1e6)
    ]
    assert states[0] == states[1]


def test_by_default_a_boosted_change_counts_as_one_and_a_half_times_the_median(
    tiny_folder: Path, prepared: Prepared
) -> None:
    config = tiny.config(tiny_folder, federation={"clients_per_round": None})
    federation = tiny.variant(prepared, config).federation
    result, replies = attacked(federation, 8.0)
    method, state = federation.method, federation.begin().state
    norms = dict[str, float]()
    for id, reply in replies.items():
        client = federation.clients[id].client
        expected = build_untrained_reply(method, method.sync(state, client), client, 0)
        norms[id] = measure_change(reply, method.contribute(reply, client), expected, method, client).norm
    norms[VICTIM] *= 8
    limit = 1.5 * median(norms.values())
    assert result.clipped == pytest.approx({id: limit / norm for id, norm in norms.items() if norm > limit}, rel=1e-3)
    assert VICTIM in result.clipped


def test_limits_are_multiples_of_the_median_by_number_of_entries() -> None:
    sizes = {"a": ChangeSize(1.0, 100), "b": ChangeSize(2.0, 100), "c": ChangeSize(9.0, 100)}
    assert compute_norm_limits(sizes, 2.0) == pytest.approx({"a": 4.0, "b": 4.0, "c": 4.0})
    wide = {"a": ChangeSize(1.0, 100), "b": ChangeSize(1.0, 100), "c": ChangeSize(2.0, 400)}
    assert compute_norm_limits(wide, 2.0) == pytest.approx({"a": 2.0, "b": 2.0, "c": 4.0})
    assert compute_norm_limits({"a": sizes["a"], "c": sizes["c"]}, 2.0) == {}
    assert compute_norm_limits({id: ChangeSize(0.0, 10) for id in "abc"}, 2.0) == {}


def test_a_fixed_norm_takes_the_place_of_the_median(tiny_folder: Path, prepared: Prepared) -> None:
    result, _ = attacked(federated(prepared, tiny_folder, "fedit", max_norm=1e-3), 1.0)
    assert list(result.clipped) == sorted(tiny.SITES)
    moved = federated(prepared, tiny_folder, "fedit").begin().state.tensors
    change = {name: value - moved[name] for name, value in result.progress.state.tensors.items()}
    assert math.sqrt(sum(float(value.double().square().sum()) for value in change.values())) <= 1.001e-3


def test_a_shorter_tensor_is_compared_with_the_leading_slots() -> None:
    """A client that prunes its rank is as near to the untrained one as if it had kept the other slots unchanged."""
    method: Any = _Passing()
    start = Message({"layer/A": torch.arange(12.0).view(4, 3), "layer/n": torch.tensor([3])})
    reply = Message({"layer/A": start.tensors["layer/A"][:2] + 1.0, "layer/n": torch.tensor([7])})
    client = Client("a", 2, 1.0, 5, 1.0)
    contribution = method.contribute(reply, client)
    assert measure_change(reply, contribution, start, method, client) == ChangeSize(math.sqrt(6), 6)
    shrunk = shrink_reply(method, reply, contribution, start, client, 0.5).stack
    assert torch.equal(shrunk["layer/A"], start.tensors["layer/A"][:2] + 0.5)
    assert shrunk["layer/n"].tolist() == [7]


class _Passing:
    """The parts of a method that measure and scale a stacked reply."""

    def declare_claims(self) -> Any:
        return METHODS["hetlora"].claims

    def contribute(self, message: Message, client: Client) -> Any:
        from fedspan.core.values import Contribution

        return Contribution(stack=message.tensors)


def test_a_change_is_scaled_and_counts_from_another_start() -> None:
    """In the reply's format; integers, which count batches, stay as they are."""
    start = {"l/A": torch.full((2, 3), 1.0), "n": torch.tensor([4])}
    target = {"l/A": torch.full((2, 3), 10.0), "n": torch.tensor([9])}
    reply = Contribution(sum={"l/A": torch.tensor([[1.0, 2.0, 3.0], [1.0, 0.0, -1.0]]), "n": torch.tensor([5])})
    moved = rebase_change(reply, start, target, 0.5)
    assert torch.equal(moved.sum["l/A"], torch.tensor([[10.0, 10.5, 11.0], [10.0, 9.5, 9.0]]))
    assert moved.sum["l/A"].dtype == torch.float32
    assert torch.equal(moved.sum["n"], torch.tensor([5]))
