"""What a round's definition says of its clients, and how its events are recorded."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

from fedspan.core.values import Client, ServerState
from fedspan.federation.progress import ClientData, Failure, Transfer
from fedspan.federation.round_context import RoundContext, Tally
from fedspan.federation.settings import RoundSettings

NOTHING = np.arange(0)
UNUSED: Any = None


def build_context(ids: tuple[str, ...] = ("b", "c"), **changes: Any) -> RoundContext:
    """Build a round of clients that declare 100, 2 and 1000 examples."""
    clients = {
        id: ClientData(Client(id, 2, 1.0, examples, examples, last_round=3), NOTHING, NOTHING, NOTHING)
        for id, examples in {"a": 100, "b": 2, "c": 1000}.items()
    }
    fields: dict[str, Any] = {
        "settings": RoundSettings(3, max_weight_ratio=4.0),
        "state": ServerState(5, {}),
        **dict.fromkeys(("method", "training", "rules", "transport"), UNUSED),
        **changes,
    }
    return RoundContext(clients=clients, ids=ids, draw_order=ids, target=len(ids), run="run", **fields)


def test_weights_are_limited_among_the_selected_clients() -> None:
    assert build_context().limit_weights() == {"b": 2.0, "c": 8.0}
    assert build_context(("a", "b", "c")).limit_weights() == {"a": 100.0, "b": 2.0, "c": 400.0}
    assert build_context(settings=RoundSettings(3)).limit_weights() == {"b": 2.0, "c": 1000.0}


def test_a_second_exchange_has_the_weights_of_the_first() -> None:
    weights = {"a": 100.0, "b": 2.0, "c": 400.0}
    assert build_context(task="second", weights=weights).limit_weights() == weights


def test_a_client_that_was_sent_an_earlier_state_trains_it() -> None:
    context = build_context(sent={"b": ServerState(3, {})})
    assert context.get_sent_state("b").round == 3
    assert context.get_sent_state("c") is context.state


@pytest.mark.parametrize(("task", "purpose"), [("train", "train"), ("second", "train"), ("statistics", "statistics")])
def test_both_exchanges_of_a_round_are_part_of_the_training(
    task: Literal["train", "second", "statistics"], purpose: str
) -> None:
    assert build_context(task=task).purpose == purpose


@pytest.mark.parametrize(("ids", "first"), [(("b", "c"), "b"), ((), "a")])
def test_a_new_client_stores_nothing(ids: tuple[str, ...], first: str) -> None:
    client = build_context(ids).new_client
    assert (client.id, client.last_round) == (first, None)


def test_a_second_exchange_adds_its_events_to_those_of_the_round() -> None:
    tally = Tally([Transfer("a", "down", 8, 4)], [Failure("a", 0, "late")], {"a"})
    tally.extend(Tally([Transfer("b", "up", 9, 5)], [Failure("b", 1, "not finite")]))
    assert tally.transfers == [Transfer("a", "down", 8, 4), Transfer("b", "up", 9, 5)]
    assert tally.failures == [Failure("a", 0, "late"), Failure("b", 1, "second exchange: not finite")]
    assert tally.lost == {"a"}


def test_events_are_sorted_in_whatever_order_they_happened() -> None:
    transfers = (Transfer("a", "down", 1, 1), Transfer("a", "up", 1, 1), Transfer("b", "down", 1, 1))
    failures = (Failure("b", 0, "late"), Failure("a", 1, "late"), Failure("c", 1, "late"))
    tally = Tally([*reversed(transfers)], [*reversed(failures)])
    assert tally.sort_transfers() == transfers
    assert tally.sort_failures() == failures
