"""What the page shows of a server: its nodes, and the run that was submitted last."""

import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedspan.deployment.status import store_named_run
from fedspan.errors import FedspanError
from fedspan.monitoring.run_monitor import INTERVAL, MAX_CLIENTS, ServerMonitor, clean_text
from fedspan.transports.http.server import Node
from fedspan.transports.http.wire import NodeWork
from helpers.clock import Clock
from helpers.written_run import HOSTILE, PretendRun

NODES = [
    Node("11", "east", "online", 65.0, None),
    Node("12", "north", "offline", 0.0, time.time() - 7300),
    Node("13", "south", "registered", 0.0, None),
    Node("14", "west", "revoked", 0.0, None),
]


def collect_listed(monitor: ServerMonitor) -> dict[str, Any]:
    """The state once the nodes are listed."""
    monitor.collect()
    for thread in threading.enumerate():
        if thread.name == "nodes of the web page":
            thread.join(10)
    return monitor.collect()


def test_a_server_without_a_run_shows_its_nodes(tmp_path: Path) -> None:
    state = collect_listed(ServerMonitor(tmp_path, lambda: NODES))
    assert state["run"] is None
    assert state["nodes"] == {"online": 1, "total": 3, "problem": None}
    rows = [(row["name"], row["node_status"], row["node_seen"]) for row in state["clients"]]
    assert rows[0] == ("east", "online", "now, for 1:05")
    assert rows[1][:2] == ("north", "offline")
    assert re.fullmatch(r"2:\d\d:\d\d ago", rows[1][2])
    assert rows[2:] == [("south", "registered", "never"), ("west", "revoked", "never")]


def test_nodes_of_a_large_run_are_not_listed_as_if_they_were_not_in_it(tmp_path: Path, pretend_run: PretendRun) -> None:
    named = {f"client-{number:04d}": number for number in range(1000)}
    pretend_run.add(1, cohort=sorted(named))
    store_named_run(tmp_path, pretend_run.folder.path, named)
    nodes = [Node(str(id), name, "online", 1.0, None) for name, id in named.items()]
    guests = [Node(str(number), f"guest-{number}", "online", 1.0, None) for number in range(2000, 2600)]
    rows = collect_listed(ServerMonitor(tmp_path, lambda: [*nodes, *guests]))["clients"]
    assert len(rows) == MAX_CLIENTS
    assert {row["rounds"] for row in rows} == {1}
    rows = collect_listed(ServerMonitor(tmp_path / "none", lambda: guests))["clients"]
    assert [row["name"] for row in rows] == [node.name for node in guests[:MAX_CLIENTS]]


def test_clients_of_the_run_have_the_status_of_their_nodes(tmp_path: Path, pretend_run: PretendRun) -> None:
    pretend_run.add(1, cohort=["clinic"])
    store_named_run(tmp_path, pretend_run.folder.path, {"clinic": 12, HOSTILE: 11, "gone": 99})
    state = collect_listed(ServerMonitor(tmp_path, lambda: NODES))
    assert state["run"]["round"] == 1
    assert {row["name"]: (row["node_status"], row["rounds"]) for row in state["clients"]} == {
        "clinic": ("offline", 1),
        clean_text(HOSTILE): ("online", 0),
        "gone": ("unknown", 0),
        "south": ("registered", 0),
        "west": ("revoked", 0),
    }


def test_nodes_that_are_online_say_what_they_do(tmp_path: Path, pretend_run: PretendRun) -> None:
    pretend_run.add(1, cohort=["clinic", "east"])
    store_named_run(tmp_path, pretend_run.folder.path, {"clinic": 12, "east": 11})
    work = NodeWork("training", 37)

    def show_work() -> dict[str, str]:
        nodes = [replace(node, work=work if node.name == "east" else None) for node in NODES]
        state = collect_listed(ServerMonitor(tmp_path, lambda: nodes))
        return {row["name"]: row["node_work"] for row in state["clients"]}

    assert show_work() == {"clinic": "", "east": "training, 37 %", "south": "", "west": ""}
    work = NodeWork("hidden states", None)
    assert show_work()["east"] == "hidden states"


def test_a_newer_run_replaces_the_one_before(tmp_path: Path, pretend_run: PretendRun) -> None:
    pretend_run.add(1)
    store_named_run(tmp_path, pretend_run.folder.path, {"east": 11})
    monitor = ServerMonitor(tmp_path, lambda: NODES)
    assert monitor.collect()["run"]["round"] == 1
    second = PretendRun(tmp_path / "second")
    store_named_run(tmp_path, second.folder.path, {"east": 11})
    assert monitor.collect()["run"]["round"] == 0
    (tmp_path / "run.json").unlink()
    assert monitor.collect()["run"] is None


def test_nodes_are_listed_again_after_a_while_and_a_failure_is_shown(tmp_path: Path) -> None:
    calls, clock = list[float](), Clock()

    def list_nodes() -> Sequence[Node]:
        calls.append(clock.now)
        if len(calls) == 2:
            raise FedspanError("server", None, problem="no answer: \x1b[31m")
        return NODES

    monitor = ServerMonitor(tmp_path, list_nodes, clock)
    assert monitor.collect()["nodes"]["total"] in (None, 3)  # listed or not yet
    assert collect_listed(monitor)["nodes"]["problem"] is None
    clock.now += INTERVAL
    nodes = collect_listed(monitor)["nodes"]
    assert nodes["total"] == 3  # as before
    assert nodes["problem"] == "`server`: no answer: \\x1b[31m."
    clock.now += INTERVAL
    assert collect_listed(monitor)["nodes"]["problem"] is None
    assert calls == [0.0, INTERVAL, 2 * INTERVAL]
