"""Asynchronous rounds: against a loop over events, by which rules replies arrive, and which methods have none."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, final

import pytest
import torch
from torch import Tensor

from fedspan.assembly.run import prepare
from fedspan.config.combinations import explain_round_dependence
from fedspan.core.factors import draw_a_factors
from fedspan.core.method import Memory, Method, Wrapper
from fedspan.core.values import Client, Job, LayerSpec, Message, ServerState, Spec
from fedspan.errors import FedspanError
from fedspan.federation.arrival_sources import Arrival, NodeArrivals
from fedspan.federation.federation import Federation
from fedspan.federation.progress import OpenOrder, OpenOrders, Progress, RoundResult, TooFewReplies
from fedspan.federation.protocol import Envelope
from fedspan.federation.settings import BufferedSettings
from fedspan.federation.transport import AsynchronousTransport, OnReply, Orders
from fedspan.methods.fedit import FedIT
from fedspan.methods.fedloru import FedLoRU
from fedspan.training.batched import BatchedEngine
from fedspan.transports.in_process import simulate
from fedspan.wrappers.fedpaq import FedPAQ
from fedspan.wrappers.low_precision import LowPrecision
from helpers import tiny
from helpers.watched_rounds import differences

SPEED = {"distribution": "uniform", "median": 10, "spread": 3}


def federated(folder: Path, federation: dict[str, Any], concurrency: int = 3, **changes: Any) -> Federation:
    settings = {"rounds": 6, "clients_per_round": 2, "clip_ratio": None, "buffered": {"concurrency": concurrency}}
    simulation = {"speed": SPEED, **changes.pop("simulation", {})}
    changes = {"training": {"local_steps": 1}, **changes}
    return prepare(
        tiny.config(folder, federation={**settings, **federation}, simulation=simulation, **changes)
    ).federation


def run(federation: Federation) -> list[RoundResult]:
    results, progress = list[RoundResult](), federation.begin()
    while progress.state.round < federation.settings.rounds:
        results.append(federation.run_round(progress))
        progress = results[-1].progress
    return results


def train_alone(federation: Federation, progress: Progress, client: str) -> dict[str, Tensor]:
    settings = replace(federation.settings, buffered=None, cohort=None)
    alone = simulate(federation.method, federation.engine, [federation.clients[client]], federation.examples, settings)
    return dict(alone.run_round(Progress(progress.state)).progress.state.tensors)


@pytest.mark.parametrize("exponent", [0.5, pytest.param(0.0, marks=pytest.mark.slow)])
def test_rounds_are_those_of_a_loop_over_events(exponent: float, tiny_folder: Path) -> None:
    """All four clients train at any time, so that nothing is drawn; one is six times slower than another."""
    buffered = {"concurrency": 4, "staleness_exponent": exponent}
    federation = federated(tiny_folder, {"buffered": buffered})
    transport = federation.transport
    workload = 4  # one step of four examples
    seconds = {id: transport.conditions.compute_seconds(id, workload) for id in federation.clients}
    weights = {id: data.client.examples for id, data in federation.clients.items()}
    assert max(seconds.values()) > 4 * min(seconds.values())

    states = [federation.begin()]
    training = {id: (seconds[id], 0) for id in federation.clients}  # when the reply arrives, and the state it is of
    clock, stale = 0.0, 0
    for number, result in enumerate(run(federation)):
        start, arrived = clock, list[tuple[str, int]]()
        while len(arrived) < 2:
            id = min(training, key=lambda id: training[id][0])
            clock, sent = training.pop(id)
            arrived.append((id, sent))
        total = sum(weights[id] for id, _ in arrived)
        expected = {name: value.double() for name, value in states[number].state.tensors.items()}
        for id, sent in arrived:
            reply = train_alone(federation, states[sent], id)
            for name, value in reply.items():
                change = value.double() - states[sent].state.tensors[name].double()
                expected[name] += weights[id] / total * (1 + number - sent) ** -exponent * change
            stale += sent < number
        assert result.arrivals == tuple((id, number - sent) for id, sent in arrived)
        assert result.simulated_seconds == pytest.approx(clock - start)
        for name, value in result.progress.state.tensors.items():
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-7)
        states.append(result.progress)
        for id, _ in arrived:
            training[id] = clock + seconds[id], number + 1
    assert stale >= 3


def test_clients_train_at_the_requested_number_and_once_a_round(tiny_folder: Path) -> None:
    trained = list[tuple[str, int]]()
    for result in run(federated(tiny_folder, {"rounds": 12})):
        number = result.progress.state.round - 1
        assert len(result.progress.open.orders) == 2  # the third one's next order is of the state after the round
        assert result.arrivals is not None
        assert len(result.cohort) == len(result.arrivals) == 2
        assert result.cohort == tuple(sorted(id for id, _ in result.arrivals))
        assert set(result.progress.open.states) <= {order.round for order in result.progress.open.orders}
        trained += [(id, number - staleness) for id, staleness in result.arrivals]
    assert len(set(trained)) == len(trained) == 24
    assert len({id for id, _ in trained}) == 4


def test_rounds_in_which_all_clients_reply_are_synchronous_ones(tiny_folder: Path) -> None:
    """With the default clipping and the validation of replies, too."""
    settings: dict[str, Any] = {"rounds": 3, "clients_per_round": 4, "clip_ratio": 0.9}
    waiting = federated(tiny_folder, {**settings, "buffered": None})
    for result, expected in zip(run(federated(tiny_folder, settings, concurrency=4)), run(waiting), strict=True):
        assert differences(replace(result.progress, open=expected.progress.open), expected.progress) == []
        assert result.clipped == expected.clipped != {}
        assert result.loss == expected.loss
        assert result.simulated_seconds == pytest.approx(expected.simulated_seconds)
        assert differences(result.transfers, expected.transfers) == []


def test_clients_that_start_from_one_state_train_together(tiny_folder: Path) -> None:
    loop = federated(tiny_folder, {}, concurrency=4)
    batched = federated(tiny_folder, {}, concurrency=4, engine={"name": "batched", "clients_per_pass": 4})
    assert isinstance(batched.engine, BatchedEngine)
    for ours, theirs in zip(run(batched), run(loop), strict=True):
        assert ours.arrivals == theirs.arrivals
        for name, value in theirs.progress.state.tensors.items():
            torch.testing.assert_close(ours.progress.state.tensors[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("max_staleness", [None, 0])
def test_one_client_at_a_time_starts_from_the_newest_state(max_staleness: int | None, tiny_folder: Path) -> None:
    """With one reply a round and one client at a time, no reply is of an older state."""
    settings = {"clients_per_round": 1, "buffered": {"concurrency": 1, "max_staleness": max_staleness}, "rounds": 8}
    results = run(federated(tiny_folder, settings))
    assert [staleness for result in results for _, staleness in result.arrivals or ()] == [0] * 8
    assert [result.failures for result in results] == [()] * 8


def test_orders_replies_and_failures_are_reported_when_they_happen(tiny_folder: Path) -> None:
    """A client whose reply is rejected is replaced in the round."""
    simulation = {"faults": {"share": 0.25, "kind": "nan"}}
    federation = federated(tiny_folder, {}, concurrency=4, simulation=simulation)
    progress, rejected = federation.begin(), dict[str, str]()
    for _ in range(3):
        orders, replied, failed = list[str](), list[str](), dict[str, str]()
        carried = [order.client for order in progress.open.orders]
        result = federation.run_round(
            progress,
            lambda id, loss, replied=replied: replied.append(id),
            on_failure=lambda id, reason, failed=failed: failed.update({id: reason}),
            on_order=lambda id, orders=orders: orders.append(id),
        )
        progress = result.progress
        assert orders[: len(carried)] == carried
        assert set(orders) == {*result.cohort, *(order.client for order in progress.open.orders), *failed}
        assert sorted(replied) == sorted({*(id for id, _ in result.arrivals or ()), *failed})  # a loss arrives with nan
        assert failed == {failure.client: failure.reason for failure in result.failures}
        assert len(result.cohort) - len(failed) == 2
        assert all(bool(value.isfinite().all()) for value in progress.state.tensors.values())
        assert not math.isnan(result.loss)
        rejected |= failed
    assert len(rejected) == 1


def test_compressed_changes_of_earlier_states_count_as_uncompressed_ones(tiny_folder: Path) -> None:
    """In float32 nothing is rounded off, so the wrapper's way of sending changes is all that could differ."""
    wrapper = {"name": "low-precision", "uplink": "float32", "downlink": "float32"}
    plain = run(federated(tiny_folder, {"rounds": 3}))
    compressed = run(federated(tiny_folder, {"rounds": 3}, method={"name": "fedit", "wrappers": [wrapper]}))
    assert any(staleness for result in plain for _, staleness in result.arrivals or ())
    assert [result.arrivals for result in compressed] == [result.arrivals for result in plain]
    for name, value in plain[-1].progress.state.tensors.items():
        torch.testing.assert_close(compressed[-1].progress.state.tensors[name], value, rtol=0, atol=1e-6)


def test_states_whose_replies_will_not_count_are_not_stored(tiny_folder: Path) -> None:
    buffered = {"concurrency": 4, "max_staleness": 1}
    for number, result in enumerate(run(federated(tiny_folder, {"buffered": buffered, "rounds": 8})), 1):
        assert all(round >= number - 1 for round in result.progress.open.states)


def test_replies_that_are_too_old_are_dropped(tiny_folder: Path) -> None:
    buffered = {"concurrency": 4, "max_staleness": 2}
    results = run(federated(tiny_folder, {"buffered": buffered, "rounds": 8}))
    reasons = [failure.reason for result in results for failure in result.failures]
    assert reasons
    assert all(reason.endswith("rounds old, and federation.buffered.max_staleness is 2") for reason in reasons)
    assert {staleness for result in results for _, staleness in result.arrivals or ()} == {0, 1, 2}
    assert all(len(result.arrivals or ()) == 2 for result in results)


def test_a_round_is_retried_and_fails_when_too_few_clients_reply(tiny_folder: Path) -> None:
    """Of four clients two never reply, and three replies are needed; the others' replies count once."""
    silent = {"dropout": {"east": 1.0, "west": 1.0}}
    settings = {"clients_per_round": 3, "min_replies": 3, "retries": 1, "deadline": 50}
    federation = federated(tiny_folder, settings, simulation=silent)
    with pytest.raises(TooFewReplies, match="needs good replies of at least 3 of 4 clients, and has 2") as error:
        federation.run_round(federation.begin())
    assert "east: it dropped out (simulated)" in str(error.value)
    result = federated(tiny_folder, {**settings, "min_replies": 2}, simulation=silent).run_round(federation.begin())
    assert [id for id, _ in result.arrivals or ()] in (["north", "south"], ["south", "north"])
    assert {failure.client for failure in result.failures} == {"east", "west"}
    assert result.simulated_seconds is not None
    assert result.simulated_seconds >= 50


def test_a_transport_without_a_simulated_clock_is_refused(tiny_folder: Path) -> None:
    from helpers.reply_transport import ReplyingTransport

    class Silent(ReplyingTransport):
        def replies(self, *arguments: Any, **options: Any) -> Any:
            raise AssertionError("no order is sent")

    federation = federated(tiny_folder, {}).replace_transport(Silent())
    with pytest.raises(FedspanError, match="asynchronous rounds run in the simulator"):
        federation.run_round(federation.begin())


IDS = ("a", "b", "c", "d", "e", "f")


class Machines(AsynchronousTransport):
    """Clients that reply at once unless they are silent or offline."""

    def __init__(self, silent: Collection[str] = ()) -> None:
        self.silent, self.offline = set(silent), set[str]()
        self.open = dict[str, None]()
        self.overdue = set[str]()
        self.sent = list[list[str]]()
        self.waited = list[bool]()

    def exchange(self, orders: Orders, on_reply: OnReply, seconds: float, *, wait_for_offline: bool = False) -> None:
        raise AssertionError("no order is sent beside the open ones")

    def send_orders(self, orders: Orders, seconds: float, *, wait_for_offline: bool = False) -> None:
        assert not self.open.keys() & set(orders)
        self.open |= dict.fromkeys(orders)
        self.sent.append(list(orders))
        self.waited.append(wait_for_offline)

    def receive_reply(self) -> tuple[str, Envelope | str] | None:
        for id in self.open:
            if id not in self.silent | self.offline:
                del self.open[id]
                return id, Envelope(id)
        return None  # a real one waits until the deadline

    def retain_orders(self, ids: Collection[str]) -> frozenset[str]:
        self.open = {id: None for id in self.open if id in ids and id not in self.offline}
        return frozenset(self.open)

    def list_training(self) -> frozenset[str]:
        return frozenset(self.open)

    def list_stalled(self) -> frozenset[str]:
        return frozenset(self.overdue | (self.offline & self.open.keys()))

    def assume_training(self, ids: Collection[str]) -> None:
        self.overdue |= set(ids)


def make_arrivals(
    machines: Machines, concurrency: int, open: OpenOrders | None = None, round: int = 0, **buffered: Any
) -> NodeArrivals:
    settings = SimpleNamespace(buffered=BufferedSettings(concurrency=concurrency, **buffered), seed=1)
    context = SimpleNamespace(
        settings=settings,
        clients=dict.fromkeys(IDS),
        state=SimpleNamespace(round=round),
        rules=SimpleNamespace(deadline=60.0),
    )
    return NodeArrivals(cast(Any, context), machines, open or OpenOrders(), lambda order: Envelope(order.client), len)


def take_all(arrivals: NodeArrivals, count: int, attempt: int) -> list[Arrival]:
    """Replies up to a number; each is returned as soon as it arrives."""
    taken = list[Arrival]()
    while len(taken) < count and (arrived := arrivals.take(count - len(taken), attempt)):
        assert len(arrived) == 1
        taken += arrived
    return taken


def list_states(*rounds: int) -> Mapping[int, ServerState]:
    return {round: cast(Any, round) for round in rounds}


def test_clients_that_were_silent_receive_orders_but_take_no_other_client_s_place() -> None:
    """Four of six never reply, and two places are less than four."""
    machines, open = Machines(silent="abcd"), OpenOrders()
    machines.overdue = set("abcd")
    for round in range(12):
        arrivals = make_arrivals(machines, 2, open, round)
        assert sorted(order.client for order, _ in take_all(arrivals, 2, 0)) == ["e", "f"]
        open = arrivals.close(list_states(*range(round + 1)))
    assert {id for ids in machines.sent for id in ids} == set(IDS)


def test_offline_clients_that_a_retry_waits_for_take_no_other_client_s_place() -> None:
    machines = Machines()
    first = make_arrivals(machines, 2)._clients.draw_client()
    machines.offline = {first, "a" if first != "a" else "b"}
    arrivals = make_arrivals(machines, 1)
    assert len(take_all(arrivals, 4, 1)) == 4
    assert set(machines.waited) == {True}
    assert not {order.client for order, _ in arrivals.take(0, 1)} & machines.offline


def test_an_order_that_is_too_old_is_closed_and_its_client_may_train_on() -> None:
    machines = Machines(silent="abc")
    machines.open = dict.fromkeys("abc")
    orders = tuple(OpenOrder(id, round, 0, round, 0.0) for round, id in enumerate("abc"))
    arrivals = make_arrivals(machines, 3, OpenOrders(orders, 3), 3, max_staleness=2)
    assert machines.open.keys() == {"b", "c"}
    assert machines.overdue == {"a"}
    (old, *others) = take_all(arrivals, 2, 0)
    assert old == (orders[0], None)  # the round knows the reason
    assert len(others) == 1
    assert others[0].order.client in "def"
    assert {id for ids in machines.sent for id in ids} <= set("def")
    assert set(arrivals.close(list_states(1, 2, 3)).states) <= {1, 2, 3}


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_client_whose_order_is_lost_with_its_server_may_train_on(is_lost: bool) -> None:
    machines = Machines()
    machines.open = {} if is_lost else {"a": None}
    make_arrivals(machines, 3, OpenOrders((OpenOrder("a", 0, 0, 0, 0.0),), 1), 1)
    assert machines.overdue == ({"a"} if is_lost else set())


SPEC = Spec((LayerSpec("layer", 14, 11),), clients=1)


@final
@dataclass(frozen=True, kw_only=True)
class Redrawing(Wrapper):
    """Its clients start from another A in the fourth round."""

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        if round == 3:
            assert isinstance(self.inner, FedIT)
            message = Message({**message.tensors, **draw_a_factors(self.inner, self.inner.r, round)})
        return super().start(message, client, memory, round)


@pytest.mark.parametrize(
    ("method", "rounds", "reason"),
    [
        (FedIT(spec=SPEC, r=2), 9, None),
        (FedPAQ(inner=FedIT(spec=SPEC, r=2)), 9, None),
        (LowPrecision(inner=FedIT(spec=SPEC, r=2), uplink="int8", error_feedback=True), 9, None),
        (FedLoRU(spec=SPEC, r=2, tau=4), 3, None),  # it is FedIT until then
        (FedLoRU(spec=SPEC, r=2, tau=4), 4, "it re-initializes its factors after round 4"),
        (Redrawing(inner=FedIT(spec=SPEC, r=2)), 3, None),
        (Redrawing(inner=FedIT(spec=SPEC, r=2)), 4, "a client trains something else in round 4 than in round 1"),
    ],
)
def test_dependence_is_found_in_the_round_where_it_shows(method: Method, rounds: int, reason: str | None) -> None:
    assert explain_round_dependence(method, rounds) == reason
