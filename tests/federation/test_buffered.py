"""The rounds: who is asked, in what order, whose weight counts; asynchronous ones against a loop over events."""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, final

import numpy as np
import pytest
import torch
from torch import Tensor

from fedspan.assembly.run import Prepared, prepare
from fedspan.config.combinations import explain_round_dependence
from fedspan.core.factors import draw_a_factors
from fedspan.core.method import Memory, Method, Wrapper
from fedspan.core.values import Client, Job, LayerSpec, Message, ServerState, Spec, Trained
from fedspan.federation import serialization
from fedspan.federation.arrival_sources import Arrival, NodeArrivals
from fedspan.federation.config import BufferedSettings
from fedspan.federation.federation import Federation
from fedspan.federation.progress import OpenOrder, OpenOrders, Progress, RoundResult, TooFewReplies
from fedspan.federation.protocol import Envelope
from fedspan.federation.transport import AsynchronousTransport, OnReply, Orders
from fedspan.methods.fedit import FedIT
from fedspan.methods.fedloru import FedLoRU
from fedspan.training.batched import BatchedEngine
from fedspan.transports.in_process import simulate
from fedspan.wrappers.fedpaq import FedPAQ
from fedspan.wrappers.low_precision import LowPrecision
from helpers import tiny
from helpers.refusals import refused
from helpers.round_settings import make_settings
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
    settings = federation.settings.trust().model_copy(update={"buffered": None, "clients_per_round": None})
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
    with refused("federation.buffered"):
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
    settings = SimpleNamespace(buffered=BufferedSettings(concurrency=concurrency, **buffered), seed=1, deadline=60.0)
    context = SimpleNamespace(
        settings=settings,
        clients=dict.fromkeys(IDS),
        state=SimpleNamespace(round=round),
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


def with_rounds(prepared: Prepared, rounds: int, cohort: int | None, seed: int = 0) -> Federation:
    """The prepared federation with other round settings; nothing is trained by making it."""
    old = prepared.federation
    settings = make_settings(rounds, clients_per_round=cohort, seed=seed)
    return simulate(old.method, old.engine, list(old.clients.values()), old.examples, settings)


def around(prepared: Prepared, wrapper: type[Wrapper]) -> Federation:
    """The prepared federation with a wrapper around its method, which the clients alone run."""
    old = prepared.federation
    # The server runs it, too, to see what an untrained client sends.
    settings = old.settings.trust().model_copy(update={"clip_ratio": None})
    return simulate(wrapper(inner=old.method), old.engine, list(old.clients.values()), old.examples, settings)


def same(left: Progress, right: Progress) -> bool:
    return serialization.encode_state(left.state) == serialization.encode_state(right.state)


def test_cohorts_follow_seed_and_round_alone(prepared: Prepared) -> None:
    """Sorted, of the size asked for, the same again in any order, each client about equally often."""
    federation = with_rounds(prepared, 400, 3)
    drawn = [federation.draw_cohort(round) for round in range(400)]
    assert [with_rounds(prepared, 2, 3).draw_cohort(round) for round in reversed(range(400))] == drawn[::-1]
    assert all(list(cohort) == sorted(set(cohort)) and len(cohort) == 3 for cohort in drawn)
    counts = Counter(id for cohort in drawn for id in cohort)
    assert all(abs(count - 300) < 45 for count in counts.values())  # five standard deviations
    assert [with_rounds(prepared, 2, 3, seed=1).draw_cohort(round) for round in range(400)] != drawn
    for size in (None, 4, 9):
        assert with_rounds(prepared, 2, size).draw_cohort(1) == tuple(sorted(tiny.SITES))


def test_the_order_of_clients_does_not_matter(prepared: Prepared) -> None:
    old = prepared.federation
    backwards = list(old.clients.values())[::-1]
    again = simulate(old.method, old.engine, backwards, old.examples, old.settings.trust())
    assert same(old.run_round(old.begin()).progress, again.run_round(again.begin()).progress)


def test_a_round_reports_what_was_transmitted_and_how_it_went(prepared: Prepared) -> None:
    """Down and up for each client in turn; the loss is the mean over examples, not over clients."""
    federation = with_rounds(prepared, 3, None)
    reported: list[tuple[str, float]] = []
    result = federation.run_round(federation.begin(), lambda client, loss: reported.append((client, loss)))
    ids = sorted(tiny.SITES)
    assert result.cohort == tuple(ids)
    assert [(t.client, t.direction) for t in result.transfers] == [(id, way) for id in ids for way in ("down", "up")]
    assert all(0 < transfer.payload < transfer.bytes for transfer in result.transfers)
    assert [client for client, _ in reported] == ids
    losses = [loss for _, loss in reported]
    assert result.loss == pytest.approx(np.mean(losses), rel=1e-9)  # everybody took two batches of four
    assert len(set(losses)) == 4
    assert result.progress.last_rounds == dict.fromkeys(ids, 0)
    assert result.progress.state.round == 1


def test_the_loss_weighs_examples(tiny_folder: Path, prepared: Prepared) -> None:
    """An epoch each: clients of 8, 14, 21 and 43 examples."""
    config = tiny.config(tiny_folder, training={"local_steps": None}, federation={"clients_per_round": 4})
    federation = tiny.variant(prepared, config).federation
    reported: dict[str, float] = {}
    result = federation.run_round(federation.begin(), reported.__setitem__)
    sizes = {id: len(client_data.train) for id, client_data in federation.clients.items()}
    expected = sum(sizes[id] * loss for id, loss in reported.items()) / sum(sizes.values())
    assert result.loss == pytest.approx(expected, rel=1e-9)
    assert abs(result.loss - np.mean(list(reported.values()))) > 1e-3


def test_what_a_client_holds_is_the_last_round_it_took_part_in(prepared: Prepared) -> None:
    federation = with_rounds(prepared, 5, 2)
    progress, expected = federation.begin(), dict[str, int]()
    for round in range(5):
        assert {id: federation.get_client(id, progress).last_round for id in federation.clients} == {
            id: expected.get(id) for id in federation.clients
        }
        progress = federation.run_round(progress).progress
        expected |= dict.fromkeys(federation.draw_cohort(round), round)
    assert progress.last_rounds == expected
    assert set(progress.states) == set(expected)


def test_the_learning_rate_follows_the_schedule(tiny_folder: Path, prepared: Prepared) -> None:
    training = {"schedule": "linear", "warmup_rounds": 1, "lr": 0.1, "local_steps": 1}
    config = tiny.config(tiny_folder, training=training, federation={"rounds": 5})
    federation = tiny.variant(prepared, config).federation
    progress, rates = federation.begin(), []
    for _ in range(5):
        result = federation.run_round(progress)
        progress = result.progress
        rates.append(result.lr)
    assert rates == pytest.approx([0.05, 0.1, 0.075, 0.05, 0.025])


@pytest.mark.parametrize(("method", "matters"), [("fedit", True), ("flora", False)])
def test_moments_are_kept_on_request_and_within_a_generation(
    method: str, matters: bool, tiny_folder: Path, prepared: Prepared
) -> None:
    """FLoRA's factors are new every round: moments of the old ones are dropped even if the run keeps moments."""
    ends = []
    for state in ("reset", "keep"):
        config = tiny.config(
            tiny_folder, method={"name": method}, training={"optimizer_state": state}, model={"extras": "frozen"}
        )
        federation = tiny.variant(prepared, config).federation
        progress = federation.begin()
        for _ in range(2):
            progress = federation.run_round(progress).progress
        assert any(one.moments for one in progress.states.values()) == (state == "keep")
        ends.append(progress)
    assert same(*ends) != matters


def test_a_method_may_train_in_phases(prepared: Prepared) -> None:
    """The second job begins where the first ended, with the memory that it left; one reply is transmitted."""
    seen: list[tuple[str, str]] = []

    @dataclass(frozen=True, kw_only=True)
    class Twice(Wrapper):
        def finish(
            self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
        ) -> tuple[Job | Message, Memory]:
            seen.append((client.id, job.phase))
            if job.phase == "train":
                return replace(job, phase="again", tensors=trained.tensors), {"l/x": torch.ones(1)}
            assert memory.keys() == {"l/x"}
            return self.inner.finish(job, trained, client, {}, round)[0], {"l/x": memory["l/x"] + 1}

    federation = around(prepared, Twice)
    result = federation.run_round(federation.begin())
    assert seen == [(id, phase) for id in result.cohort for phase in ("train", "again")]
    assert len(result.transfers) == 2 * len(result.cohort)
    assert {float(one.memory["l/x"]) for one in result.progress.states.values()} == {2.0}
    assert not same(result.progress, prepared.federation.run_round(federation.begin()).progress)


def test_only_what_is_in_the_message_arrives(prepared: Prepared) -> None:
    """A client gets what the bytes say, on no common ground with the server's objects."""
    ids: list[int] = []

    @dataclass(frozen=True, kw_only=True)
    class Spying(Wrapper):
        def sync(self, state: ServerState, client: Client | None) -> Message:
            ids.extend(value.data_ptr() for value in state.tensors.values())
            return self.inner.sync(state, client)

        def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
            assert not {value.data_ptr() for value in message.tensors.values()} & set(ids)
            return self.inner.start(message, client, memory, round)

    federation = around(prepared, Spying)
    federation.run_round(federation.begin())
    assert ids


def test_predictions_come_in_the_order_asked_for(prepared: Prepared) -> None:
    job = prepared.evaluator.build_job(prepared.federation.begin(), None)
    indices = np.array([40, 3, 77, 12, 5])
    together = prepared.engine.predict(job, prepared.train, indices, 2)
    for row, index in zip(together, indices, strict=True):
        alone = prepared.engine.predict(job, prepared.train, np.array([index]), 1)[0]
        assert torch.allclose(row, alone, atol=1e-5)
    assert len({tuple(row.tolist()) for row in together}) == 5
    twice = prepared.engine.predict(job, prepared.train, np.array([3, 40, 3]), 2)
    assert torch.allclose(twice, together[[1, 0, 1]], atol=1e-5)
