"""Asynchronous rounds against a plain loop over events, and the rules by which replies arrive and count."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedspan.errors import FedspanError
from fedspan.federation.federation import Federation
from fedspan.federation.progress import Progress, RoundResult, TooFewReplies
from fedspan.runs.setup import Prepared, prepare
from fedspan.training.batched import BatchedEngine
from fedspan.transports.in_process import simulate
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
    """The state after a synchronous round with one client: its reply."""
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
    progress = federation.begin()
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


def test_replies_that_do_not_count_are_replaced_by_others(tiny_folder: Path) -> None:
    simulation = {"faults": {"share": 0.25, "kind": "nan"}}
    results = run(federated(tiny_folder, {}, concurrency=4, simulation=simulation))
    rejected = [failure for result in results for failure in result.failures]
    assert rejected
    assert len({failure.client for failure in rejected}) == 1
    for result in results:
        assert len(result.cohort) - len(result.failures) == 2
        assert all(bool(value.isfinite().all()) for value in result.progress.state.tensors.values())
        assert not math.isnan(result.loss)


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


def test_a_transport_without_a_simulated_clock_is_refused(prepared: Prepared, tiny_folder: Path) -> None:
    from helpers.reply_transport import ReplyingTransport

    class Silent(ReplyingTransport):
        def replies(self, *arguments: Any, **options: Any) -> Any:
            raise AssertionError("no order is sent")

    federation = federated(tiny_folder, {}).replace_transport(Silent())
    with pytest.raises(FedspanError, match="asynchronous rounds run in the simulator"):
        federation.run_round(federation.begin())
