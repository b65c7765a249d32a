"""What the page shows of a run, read from its folder while it grows, fails and ends, and of a server and its nodes."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedspan.deployment.status import store_named_run
from fedspan.errors import FedspanError
from fedspan.files import to_json
from fedspan.monitoring.run_monitor import INTERVAL, MAX_CLIENTS, RunMonitor, ServerMonitor, clean_text
from fedspan.transports.http.server import Node
from fedspan.transports.http.wire import NodeWork
from helpers.clock import Clock
from helpers.written_run import HOSTILE, PretendRun

Collect = Callable[[], dict[str, Any]]


def get_dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_folder_without_a_run_has_no_state(tmp_path: Path) -> None:
    assert RunMonitor(tmp_path / "later").collect() is None


def test_rounds_are_read_as_they_are_added(pretend_run: PretendRun, collect: Collect) -> None:
    first = collect()["run"]
    assert (first["state"], first["round"], first["rounds"], first["curve"]) == ("running", 0, 5, [])
    pretend_run.add(1, 0.25)
    assert collect()["run"]["round"] == 1
    pretend_run.add(2, 0.75, privacy={"epsilon": 1.5, "delta": 1e-5})
    run = collect()["run"]
    assert [point["round"] for point in run["curve"]] == [1, 2]
    assert [point["score"] for point in run["curve"]] == [0.25, 0.75]
    assert [point["validation"] for point in run["curve"]] == [0.35, 0.85]
    assert [point["loss"] for point in run["curve"]] == [1.0, 0.5]
    assert [point["epsilon"] for point in run["curve"]] == [None, 1.5]
    assert run["bytes"] == {"down": 2000, "up": 1000}
    assert run["metric"] == {"title": "accuracy", "percent": True}


def test_a_run_that_resumes_from_an_earlier_round_is_read_again(pretend_run: PretendRun, collect: Collect) -> None:
    for number in (1, 2, 3):
        pretend_run.add(number, late=["south"])
    assert collect()["run"]["round"] == 3
    lines = pretend_run.folder.metrics.read_bytes().splitlines(keepends=True)
    pretend_run.folder.metrics.write_bytes(lines[0])
    pretend_run.add(2, 0.125, late=["south"])
    state = collect()
    assert [point["score"] for point in state["run"]["curve"]] == [0.5, 0.125]
    assert {client["name"]: client["rounds"] for client in state["clients"]} == {"east": 2, "north": 2, "south": 0}
    assert {client["name"]: client["late"] for client in state["clients"]}["south"] == 2


def test_a_changed_line_is_a_problem_and_not_a_curve(pretend_run: PretendRun, collect: Collect) -> None:
    pretend_run.add(1)
    pretend_run.folder.metrics.write_bytes(pretend_run.folder.metrics.read_bytes().replace(b"0.5", b"0.9"))
    run = collect()["run"]
    assert "line 1" in run["problem"]
    assert run["curve"] == []


def test_clients_of_the_round_that_is_being_run(pretend_run: PretendRun, collect: Collect) -> None:
    failure = {"client": "north", "attempt": 0, "reason": "out of memory", "purpose": "train"}
    pretend_run.add(1, failures=[failure, "no failure", {"client": 3}])
    pretend_run.write_progress(round=2, cohort=["north", "south"], replied=["south"], losses={"south": 0.5})
    state = collect()
    assert state["run"]["current"] == 2
    assert [(client["name"], client["status"], client["loss"]) for client in state["clients"]] == [
        ("north", "no reply yet", None),  # failures first
        ("south", "replied", 0.5),
        ("east", "not selected", None),
    ]
    assert state["clients"][0]["last_failure"] == {"round": 1, "reason": "out of memory"}
    assert state["run"]["failures"] == [{"round": 1, "client": "north", "reason": "out of memory"}]
    assert state["run"]["failure_count"] == 1


def test_a_client_that_failed_in_this_round_is_shown_with_its_reason(pretend_run: PretendRun, collect: Collect) -> None:
    failures = {"north": "out of memory \x1b[31m", "south": 3}
    pretend_run.write_progress(round=2, cohort=["east", "north", "south"], replied=["east"], failures=failures)
    clients = {client["name"]: client for client in collect()["clients"]}
    assert {name: client["status"] for name, client in clients.items()} == {
        "east": "replied",
        "north": "failed",
        "south": "no reply yet",
    }
    assert clients["north"]["last_failure"] == {"round": 2, "reason": "out of memory \\x1b[31m"}


def test_between_rounds_there_is_no_current_round(pretend_run: PretendRun, collect: Collect) -> None:
    pretend_run.add(2)
    pretend_run.write_progress(round=None, round_started=None, cohort=[], updated=1000.5)
    run = collect()["run"]
    assert (run["state"], run["round"], run["current"], run["updated"]) == ("running", 2, None, 1000.5)


def test_stopped_and_failed_runs(pretend_run: PretendRun, collect: Collect) -> None:
    pretend_run.start(get_dead_process())
    pretend_run.write_progress(cohort=["north"], stage={"text": "training", "done": 1, "total": 2, "unit": "clients"})
    run = collect()["run"]
    assert (run["state"], run["reason"], run["stage"], run["current"]) == ("stopped", None, None, None)
    pretend_run.write_progress(state="failed", reason="`nodes`: 1 of 3 nodes participate.")
    run = collect()["run"]
    assert (run["state"], run["reason"]) == ("failed", "`nodes`: 1 of 3 nodes participate.")
    pretend_run.start()  # resumed
    assert collect()["run"]["state"] == "running"


def test_a_finished_run_shows_its_best_round(pretend_run: PretendRun, collect: Collect) -> None:
    pretend_run.add(1, 0.75)
    pretend_run.add(2, 0.5)
    scores = {"test": {"accuracy": 0.75}, "clients": {"worst": {"client": HOSTILE, "accuracy": 0.25}}}
    report = {"method": "FedIT", "metric": "accuracy", "rounds": 2, "best_round": 1, "scores": scores}
    pretend_run.folder.report.write_text(to_json({**report, "warnings": ["the loss doubled"]}))
    state = collect()
    worst = {"client": clean_text(HOSTILE), "score": 0.25}
    result = {"best_round": 1, "selected": True, "score": 0.75, "worst": worst}
    assert state["run"]["result"] == result
    pretend_run.folder.report.write_text(to_json({**report, "selected": False}))
    assert collect()["run"]["result"] == {**result, "selected": False}
    assert (state["run"]["state"], state["run"]["method"]) == ("finished", "FedIT")
    assert state["run"]["notes"] == ["the loss doubled"]


def test_texts_of_others_are_cut_and_without_controls(pretend_run: PretendRun, collect: Collect) -> None:
    failure = {"client": HOSTILE, "attempt": 0, "reason": "\x1b]0;x\x07" + 5000 * "y", "purpose": "train"}
    pretend_run.add(1, failures=[failure])
    text = to_json(collect())
    assert "\\u001b" not in text
    assert "\\u0007" not in text
    assert 400 < text.count("y") < 2000


def test_files_of_any_content_do_not_stop_the_page(pretend_run: PretendRun, collect: Collect) -> None:
    for content in (b"", b"[]", b"null", b"{", b'{"stage": 3, "cohort": {"a": 1}, "losses": []}', b"\xff", b"[" * 9000):
        for path in (pretend_run.folder.progress, pretend_run.folder.report, pretend_run.folder.config):
            path.write_bytes(content[: 1100 if path == pretend_run.folder.config else None])  # YAML takes seconds
            assert collect()["run"]["round"] == 0
    pretend_run.folder.metrics.write_bytes(b'{"round": 1}\n')
    assert "metrics.jsonl, line 1" in collect()["run"]["problem"]


@pytest.mark.parametrize(
    "values",
    [
        {"loss": 10**400},
        {"seconds": -(10**400), "bytes": {"down": 10**400}},
        {"test": [1]},
        {"test": "x"},
        {"test": {"accuracy": 10**400}},
        {"test": {"accuracy": "x"}},
        {"test": None, "clients": [1]},
        {"validation": {"accuracy": 10**400}, "privacy": {"epsilon": 10**400}},
        {"cohort": {"a": 1}, "late": 3, "failures": "x"},
    ],
)
def test_any_values_do_not_stop_the_page(values: Mapping[str, Any], pretend_run: PretendRun, collect: Collect) -> None:
    pretend_run.add(1, **values)
    pretend_run.write_progress(
        rounds=10**400, losses={"east": 10**400}, baseline={"name": "x", "round": 10**400, "rounds": 1}
    )
    run = collect()["run"]
    assert (run["round"], run["rounds"], run["baseline"]) == (1, None, None)
    for name, key in (("loss", "loss"), ("validation", "validation")):
        if name in values:
            assert run["curve"][0][key] is None
    if "test" in values:
        assert run["curve"][0]["score"] is None
    for scores in ("s", {"test": "s"}, {"test": [1]}, {"clients": {"worst": [1]}}, {"test": {"accuracy": 10**400}}):
        pretend_run.folder.report.write_text(to_json({"metric": "accuracy", "scores": scores}))
        run = collect()["run"]
        assert (run["state"], run["result"]["score"], run["result"]["worst"]) == ("finished", None, None)


@pytest.mark.slow
def test_long_runs_and_many_clients_are_thinned_out(pretend_run: PretendRun, collect: Collect) -> None:
    for number in range(1, 904):
        pretend_run.add(number, cohort=[f"client-{number:04}"])
    state = collect()
    points = [point["round"] for point in state["run"]["curve"]]
    assert 300 <= len(points) <= 400
    assert points[-1] == 903
    assert len(state["clients"]) == 500
    assert state["run"]["known_clients"] == 903


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
    assert rows[2:] == [("south", "registered", "not since start"), ("west", "revoked", "not since start")]


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
