"""The nodes of a run between its rounds: who joins, leaves and comes back, and what a resumed run knows of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedspan.core.values import Client
from fedspan.deployment import participants as module
from fedspan.deployment.handshake import build_server_config
from fedspan.deployment.participants import NodeCallbacks, Participant, Participants, load_record
from fedspan.errors import FedspanError
from fedspan.federation.progress import ClientData
from helpers.node_service import values

EMPTY = np.zeros(0, np.int64)
FIRST = {id: Participant(node=node, examples=10 * node) for node, id in enumerate("abc", start=1)}


class Nodes:
    """Nodes that are online, those that were accepted, and those that have not replied."""

    def __init__(self, online: set[int]) -> None:
        self.online, self.accepted, self.undecided = online, {**FIRST}, set[int]()
        self.known: Mapping[str, int] = {}

    def callbacks(self) -> NodeCallbacks:
        return NodeCallbacks(lambda: self.online, self.invite, lambda: self.undecided, self.build, self.store)

    def invite(self) -> dict[str, Participant]:
        return self.accepted

    def build(self, examples: Mapping[str, int]) -> dict[str, ClientData]:
        return {
            id: ClientData(Client(id, 2, 1.0, count, float(count)), EMPTY, EMPTY, EMPTY)
            for id, count in examples.items()
        }

    def store(self, nodes: Mapping[str, int]) -> None:
        self.known = dict(nodes)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL", 0.01)


def begin(participants: Participants, round: int) -> list[str]:
    clients, presence = participants.begin_round(round)
    return sorted(presence.select_present(clients, round))


def test_nodes_join_leave_and_come_back_between_rounds(tmp_path: Path) -> None:
    nodes = Nodes({1, 2, 3})
    participants = Participants(tmp_path, FIRST, nodes.callbacks(), least=2, seconds=0.1)
    assert begin(participants, 0) == ["a", "b", "c"]
    nodes.online, nodes.accepted["d"] = {1, 2, 3, 4}, Participant(node=4, examples=40)
    participants.admit()
    assert nodes.known == participants.nodes == {"a": 1, "b": 2, "c": 3, "d": 4}
    assert begin(participants, 1) == ["a", "b", "c", "d"]
    nodes.online = {1, 3, 4}
    assert begin(participants, 2) == ["a", "c", "d"]
    nodes.online = {1, 2, 3}
    clients, presence = participants.begin_round(3)
    assert [sorted(presence.select_present(clients, round)) for round in range(4)] == [
        ["a", "b", "c"], ["a", "b", "c", "d"], ["a", "c", "d"], ["a", "b", "c"]
    ]  # fmt: skip
    assert presence.list_changes(3) == (("b",), ("d",))
    assert clients["d"].client.examples == 40


def test_a_resumed_run_repeats_a_round_with_the_same_nodes_if_they_are_online(tmp_path: Path) -> None:
    nodes = Nodes({1, 2, 3})
    participants = Participants(tmp_path, FIRST, nodes.callbacks(), least=2, seconds=0.1)
    begin(participants, 0)
    nodes.online = {1, 2}
    assert begin(participants, 1) == ["a", "b"]
    nodes.online = {1, 2, 3}  # c is back while the run is down
    resumed = Participants(tmp_path, {id: FIRST[id] for id in "ab"}, nodes.callbacks(), least=2, seconds=0.1)
    assert sorted(resumed.clients) == ["a", "b", "c"]
    assert resumed.build_presence() == participants.build_presence()
    assert begin(resumed, 1) == ["a", "b"]
    assert begin(resumed, 2) == ["a", "b", "c"]
    nodes.online = {1, 3}  # b, of the interrupted round, stays away: the others go on after the wait
    again = Participants(tmp_path, FIRST, nodes.callbacks(), least=2, seconds=0.1)
    assert begin(again, 2) == ["a", "c"]
    record = load_record(tmp_path)
    assert record.present == (("a", "b", "c"), ("a", "b"), ("a", "c"))


def test_a_recorded_node_is_a_client_only_if_it_was_accepted_in_this_process(tmp_path: Path) -> None:
    nodes = Nodes({1, 2, 3})
    begin(Participants(tmp_path, FIRST, nodes.callbacks(), least=2, seconds=0.1), 0)
    del nodes.accepted["c"]  # online, and its new introduction was refused
    resumed = Participants(tmp_path, nodes.accepted, nodes.callbacks(), least=2, seconds=0.1)
    assert sorted(resumed.clients) == ["a", "b", "c"]
    assert begin(resumed, 0) == ["a", "b"]
    nodes.accepted["c"] = FIRST["c"]
    assert begin(resumed, 1) == ["a", "b", "c"]


def test_an_entry_follows_the_last_accepted_introduction(tmp_path: Path) -> None:
    nodes = Nodes({1, 2, 3})
    participants = Participants(tmp_path, FIRST, nodes.callbacks(), least=2, seconds=0.1)
    begin(participants, 0)
    nodes.online, nodes.accepted["c"] = {1, 2, 7}, Participant(node=7, examples=5)
    clients, presence = participants.begin_round(1)
    assert sorted(presence.select_present(clients, 1)) == ["a", "b", "c"]
    assert clients["c"].client.examples == 5
    assert nodes.known == participants.nodes == {"a": 1, "b": 2, "c": 7}
    record = load_record(tmp_path)
    assert record.clients["c"] == Participant(node=7, examples=5)


def test_a_node_that_does_not_reply_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SETTLE", 0.05)
    nodes, slept = Nodes({1, 2, 3, 9}), list[float]()
    participants = Participants(tmp_path, FIRST, nodes.callbacks(), least=2, seconds=10.0)
    nodes.undecided = {8}  # offline
    sleep = module.time.sleep
    monkeypatch.setattr(module.time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds)))
    begin(participants, 0)
    assert not slept
    nodes.undecided = {9}
    begin(participants, 1)
    assert slept
    slept.clear()
    begin(participants, 2)
    assert not slept


def test_a_record_with_fewer_rounds_than_were_finished_is_refused(tmp_path: Path) -> None:
    participants = Participants(tmp_path, FIRST, Nodes({1, 2, 3}).callbacks(), least=2, seconds=0.1)
    participants.begin_round(0)
    assert load_record(tmp_path, 1) is not None
    with pytest.raises(FedspanError, match="at least 2 rounds"):
        load_record(tmp_path, 2)
    (tmp_path / "participants.json").unlink()
    with pytest.raises(FedspanError, match="has 1 finished rounds, and the record of their participants is missing"):
        load_record(tmp_path, 1)


def test_a_round_needs_its_quorum_online(tmp_path: Path) -> None:
    nodes = Nodes({2})
    participants = Participants(tmp_path, FIRST, nodes.callbacks(), least=2, seconds=0.05)
    with pytest.raises(FedspanError, match=r"`nodes`: 1 nodes are online before round 1: b\. Expected at least 2"):
        participants.begin_round(0)
    assert load_record(tmp_path) is None


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", json.dumps({"format": 2}), json.dumps({"present": [["a"], 3]}), json.dumps({"present": [["a"]]})],
)
def test_a_damaged_record_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "participants.json").write_text(content)
    with pytest.raises(FedspanError, match="the record of a run's participants is damaged"):
        Participants(tmp_path, FIRST, Nodes({1}).callbacks(), least=1, seconds=0.1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"privacy": {"mechanism": "central", "noise": 1.0}, "federation": {"weights": "uniform"}}, "central privacy"),
        (
            {
                "method": {"name": "fedit", "r": 2, "wrappers": [{"name": "scaffold", "variate": "gradient"}]},
                "training": {"max_grad_norm": 0.0},
            },
            "scaffold averages its control",
        ),
        ({"federation": {"ranks": [2, 4]}, "method": {"name": "hetlora", "r": 4}}, "assigns ranks to the clients"),
    ],
)
def test_what_counts_on_fixed_clients_is_refused(changes: dict[str, Any], why: str, tiny_folder: Path) -> None:
    given = {**values(tiny_folder), **changes}
    given["federation"] = {"rounds": 2, **changes.get("federation", {}), "late_joiners": True}
    with pytest.raises(FedspanError, match=rf"`federation\.late_joiners`: .*{why}"):
        build_server_config(given)


def test_ranks_that_are_drawn_for_each_client_fit_and_a_simulation_has_a_field_of_its_own(tiny_folder: Path) -> None:
    given = {**values(tiny_folder), "method": {"name": "hetlora", "r": 4}}
    given["federation"] = {"rounds": 2, "ranks": {"assign": "draw", "of": [2, 4]}, "late_joiners": True}
    config = build_server_config(given)
    with pytest.raises(FedspanError, match=r"in a simulation, set simulation\.present"):
        config.require_simulated()
