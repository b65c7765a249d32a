"""What a round exchanges: orders, the failures and losses of replies, and the error of a round with too few."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedspan.core.values import Client, OptimizerSpec, Reduced
from fedspan.federation.progress import ClientData, Progress
from fedspan.federation.protocol import Envelope, Part, Reply, decode_order
from fedspan.federation.round_context import RoundContext, Tally
from fedspan.federation.round_exchange import RoundExchange, compute_mean_loss
from fedspan.federation.settings import RoundSettings
from fedspan.federation.validation import ReplyRules
from fedspan.methods.fedit import FedIT
from fedspan.training.accounting import Charge
from fedspan.training.jobs import TrainingSettings
from fedspan.wrappers.extras import WithExtras
from helpers.toys.problem import Problem


@pytest.mark.parametrize(
    ("counts", "ratio", "weights"),
    [
        ((1, 1, 100, 100), 4.0, (1, 1, 4, 4)),  # the mean of the middle two would limit nothing
        ((100, 1, 100, 1), 4.0, (4, 1, 4, 1)),
        ((10, 20, 100), 4.0, (10, 20, 80)),
        ((0, 10, 100), 4.0, (0, 10, 40)),
        ((0, 0, 7, 100), 4.0, (0, 0, 7, 100)),  # the lower middle one is 0: no limit
        ((1, 1, 100, 100), None, (1, 1, 100, 100)),
    ],
)
def test_the_mean_loss_weighs_a_phase_up_to_a_multiple_of_the_lower_median(
    counts: tuple[int, ...], ratio: float | None, weights: tuple[int, ...]
) -> None:
    losses = [2.0**number for number in range(len(counts))]
    replies = [
        Reply("train", 0, 0, "a", (Part(loss=loss, examples=float(count)),))
        for loss, count in zip(losses, counts, strict=True)
    ]
    expected = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
    assert compute_mean_loss(replies, ratio) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("parts", [(), (Part(loss=0.5, examples=0.0),)])
def test_a_mean_loss_over_no_examples_is_nan(parts: tuple[Part, ...]) -> None:
    assert math.isnan(compute_mean_loss([Reply("train", 0, 0, "a", parts)] * 2, 4.0))


class Accepting:
    """An aggregation that accepts replies, of all clients but one, until two are there."""

    quorum = 2
    clipped: Mapping[str, float] = {}
    lowered: Mapping[str, float] = {"b": 0.5, "a": 0.25}

    def __init__(self) -> None:
        self.replies: dict[str, Reply] = {}

    def add(self, client: Client, reply: Reply, attempt: int) -> bool:
        if client.id == "bad":
            raise ValueError("not a number")
        self.replies[client.id] = reply
        return len(self.replies) >= self.quorum


class Heard:
    """What listeners heard."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, object]] = []

    def listen(self, kind: str) -> Callable[[str, object], None]:
        return lambda id, value: self.events.append((kind, id, value))


def exchange(heard: Heard, *, last_rounds: Mapping[str, int] | None = None) -> tuple[RoundExchange, Tally, Accepting]:
    """Round 5 of FedIT on the toy problem, with clients a, b and bad."""
    problem = Problem(clients=2)
    method = WithExtras(inner=FedIT(spec=problem.adapted().spec, r=2), policy="average")
    state = replace(method.init(problem.adapted()), round=4)
    none = np.array([], dtype=np.int64)
    ids = ("a", "b", "bad")
    clients = {id: ClientData(Client(id, 2, 1.0, 3, 3.0), none, none, none) for id in ids}
    settings, rules = RoundSettings(10), ReplyRules(validate=False)
    training = TrainingSettings(OptimizerSpec(lr=0.5), schedule="linear")
    transport: Any = SimpleNamespace(accept_replies=lambda ids: {}, get_simulated_seconds=lambda: 7.5)
    context = RoundContext(
        method, settings, training, clients, state, ids, ids, 3, rules, transport, run="name of the run"
    )
    aggregation, tally = Accepting(), Tally()
    progress = Progress(state, last_rounds=last_rounds or {}, last_replies={"b": 1})
    listeners = (heard.listen("arrival"), heard.listen("client"), heard.listen("failure"))
    made = RoundExchange(context, aggregation, tally, progress, {"a": 2}, *listeners)  # type: ignore[arg-type]
    return made, tally, aggregation


def reply(id: str, **changes: Any) -> Envelope:
    parts = changes.pop("parts", (Part(loss=0.5, examples=3.0),))
    return Reply("train", 4, 0, id, parts, **changes).to_envelope()


def test_an_order_has_the_round_s_facts_and_counts_once_however_often_it_is_made() -> None:
    made, tally, _ = exchange(Heard(), last_rounds={"a": 3})
    charge = Charge("a", None, 3)  # type: ignore[arg-type]
    envelope = [made.create_order("a", made.context.state, 1, charges=[charge]) for _ in range(2)][-1]
    order = decode_order(envelope)
    assert (order.task, order.run, order.to, order.round, order.attempt) == ("train", "name of the run", "a", 4, 1)
    assert order.lr == pytest.approx(0.5 * (1 - 4 / 10))
    assert (order.best, order.secure) == (2, None)
    assert order.client.last_round == 3
    assert [(one.client, one.direction, one.bytes) for one in tally.transfers] == [("a", "down", len(envelope.body))]
    assert made.charges == [charge]
    made.create_order("a", made.context.state, 2)
    assert len(tally.transfers) == 2


def test_replies_are_heard_and_counted_or_fail_their_client_with_the_reason() -> None:
    heard = Heard()
    made, tally, aggregation = exchange(heard, last_rounds={"a": 3, "b": 3})
    assert made.take_reply("a", reply("a"), 0) is False
    assert made.take_reply("bad", reply("bad"), 0) is False
    assert made.take_reply("b", "its node is not online", 0) is False
    assert made.take_reply("b", reply("b", failed="full disk", lost=True), 1) is False
    assert made.take_reply("b", reply("b", parts=()), 2) is True
    assert list(aggregation.replies) == ["a", "b"]
    kinds = [(kind, id) for kind, id, _ in heard.events]
    assert kinds == [
        *(("arrival", "a"), ("client", "a"), ("arrival", "bad"), ("failure", "bad"), ("failure", "b")),
        *(("failure", "b"), ("arrival", "b"), ("client", "b")),
    ]
    assert [(one.client, one.attempt, one.reason) for one in tally.failures] == [
        ("bad", 0, "not a number"),
        ("b", 0, "its node is not online"),
        ("b", 1, "full disk"),
    ]
    assert tally.lost == {"b"}
    made.forget_lost()
    assert made.last_rounds == {"a": 3}


def test_a_round_with_too_few_replies_names_each_client_s_last_reason_and_the_way_on() -> None:
    made, _, _ = exchange(Heard())
    made.take_reply("bad", reply("bad"), 0)
    made.take_reply("bad", "its node is not online", 1)
    error = made.build_error(["a"])
    assert error.problem == (
        "round 5 needs good replies of at least 2 of 3 clients, and has 1 (b: no reply; bad: its node is not online). "
        "The state before the round is stored: fix the cause and resume"
    )
    for task, words in (("second", "the second exchange of round 5 needs"), ("statistics", "the exchange of statist")):
        made.context = replace(made.context, task=task)  # type: ignore[arg-type]
        assert str(made.build_error(["a"]).problem).startswith(words)


def test_the_result_has_what_counted_and_what_clients_store() -> None:
    """A client whose reply counted but that trains on from an earlier state, or lost its own, is in no new round."""
    made, _, aggregation = exchange(Heard(), last_rounds={"a": 2, "b": 2, "bad": 1})
    made.take_reply("a", reply("a", parts=(Part(loss=1.0, examples=1.0),)), 0)
    made.take_reply("b", reply("b", parts=(Part(loss=2.0, examples=3.0),)), 0)
    made.forget_replied(["bad"])
    mean = dict(made.context.state.tensors)
    result = made.build_result(Reduced(mean=mean, count=2), missed=["b"])
    assert result.progress.state.round == 5
    assert result.progress.last_rounds == {"a": 4, "b": 2}
    assert result.progress.last_replies == {"b": 1, "bad": 4}
    assert result.cohort == ("a", "b", "bad")
    assert result.loss == pytest.approx((1.0 + 3 * 2.0) / 4)
    assert result.simulated_seconds == 7.5
    assert list(result.lowered.items()) == [("a", 0.25), ("b", 0.5)]
    assert result.failures == ()
    aggregation.replies["a"] = replace(aggregation.replies["a"], parts=(Part(loss=-1.0, examples=1.0),))
    made.context = replace(made.context, rules=ReplyRules())
    checked = made.build_result(Reduced(mean=mean, count=2), attempt=3)
    assert checked.loss == 2.0
    ((failure),) = checked.failures
    assert (failure.client, failure.attempt) == ("a", 3)
    assert failure.reason.startswith("of its training, ")
