"""A server and three nodes as processes, with TLS and keys: who is kept out, and what is lost when something dies."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

import fedspan
from fedspan.run_folder import RunFolder
from fedspan.runs.checkpoint import load_latest
from fedspan.transports.http.keys import make_authority
from helpers.ports import free_port
from helpers.sites import SITES, local_values, run_values, site_files
from helpers.stage import Deployment, build_command, build_environment, find_child
from helpers.submitted_runs import finish, rounds, submitted, wait_for_round, was_asked_twice
from helpers.watched_rounds import differences

pytestmark = pytest.mark.slow
STEPS = 600
"""Of a client's round, so that there is time to kill somebody in it."""
TRAINED = 0.3
"""Seconds of CPU time after which a node is surely training: far less than a round's training takes."""


@pytest.fixture
def deployment(tiny_folder: Path, tmp_path: Path) -> Iterator[tuple[Deployment, dict[str, Path]]]:
    files = site_files(tiny_folder / "corpus.csv", tmp_path)
    with Deployment(tmp_path / "deployment") as made:
        for site in SITES:
            made.join(site, made.node_file(site, files[site]))
        yield made, files


def config(tiny_folder: Path, folder: Path, **changes: Any) -> Path:
    values = run_values(tiny_folder, {"name": "fedit", "r": 2}, federation={"rounds": 3, "deadline": 120.0, **changes})
    values["training"] = {**values["training"], "local_steps": STEPS}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def wait_for_event(run: Path, event: str, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 240
    while not any(event in row for row in rounds(run)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, rounds(run)
        time.sleep(0.05)


def wait_for_training(made: Deployment, run: Path, process: subprocess.Popen[str], site: str) -> None:
    wait_for_round(run, 1, process)
    made.wait_for_training(site, TRAINED)


def adapter(run: Path) -> dict[str, Any]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def same(one: Path, other: Path) -> bool:
    mine, theirs = adapter(one), adapter(other)
    return mine.keys() == theirs.keys() and all((value == theirs[name]).all() for name, value in mine.items())


def test_whoever_is_killed_costs_no_finished_round_and_changes_no_bit(
    deployment: tuple[Deployment, dict[str, Path]], tiny_folder: Path, tmp_path: Path
) -> None:
    made, _ = deployment
    plan = config(tiny_folder, tmp_path, min_replies=3)
    printed = " ".join(finish(submitted(made, plan, tmp_path / "clean"), made).split())
    assert "exports its last round" not in printed  # the metrics of three nodes select a round

    # The server's process, in the middle of the second round.
    run = tmp_path / "server"
    process = submitted(made, plan, run)
    wait_for_training(made, run, process, SITES[0])
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = len(rounds(run))
    finish(submitted(made, plan, run, "--resume", str(run)), made)
    assert before >= 1
    assert [row["round"] for row in rounds(run)] == [1, 2, 3]
    assert same(tmp_path / "clean", run)

    # A node, which comes back: the order comes again.
    run = tmp_path / "node"
    process = submitted(made, plan, run)
    wait_for_training(made, run, process, SITES[0])
    made.end(SITES[0])
    made.join(SITES[0], made.folder / f"{SITES[0]}.yaml")
    finish(process, made)
    assert was_asked_twice(made, SITES[0])
    assert same(tmp_path / "clean", run)

    # The process in which a node trains.
    run = tmp_path / "worker"
    process = submitted(made, plan, run)
    wait_for_training(made, run, process, SITES[1])
    os.kill(find_child(made.processes[SITES[1]].pid), signal.SIGKILL)
    finish(process, made)
    assert same(tmp_path / "clean", run)

    # The serving process, which is started again.
    run = tmp_path / "serving"
    process = submitted(made, plan, run)
    wait_for_training(made, run, process, SITES[0])
    pid = made.processes["server"].pid
    os.kill(find_child(pid), signal.SIGKILL)
    finish(process, made)
    assert same(tmp_path / "clean", run)


def test_strangers_are_kept_out(deployment: tuple[Deployment, dict[str, Path]], tmp_path: Path) -> None:
    made, files = deployment
    made.call_here("join", "--new-key", str(made.folder / "stranger.key"))
    path = made.folder / "stranger.yaml"
    known = yaml.safe_load((made.folder / f"{SITES[0]}.yaml").read_text())
    stranger = {**known, "id": "stranger", "folder": str(tmp_path / "stranger")}
    path.write_text(yaml.safe_dump({**stranger, "key": str(made.folder / "stranger.key")}))
    made.join("stranger", path)
    made.wait_for("stranger", "refused the connection")

    make_authority(tmp_path / "other", [])
    path = made.folder / "misled.yaml"
    made.call_here("join", "--new-key", str(made.folder / "misled.key"))
    misled = {**stranger, "folder": str(tmp_path / "misled"), "authority": str(tmp_path / "other" / "ca.crt")}
    misled["key"] = str(made.folder / "misled.key")
    path.write_text(yaml.safe_dump(misled))
    made.join("misled", path)
    made.wait_for("misled", "no connection")
    shown = made.call_here("status", "--server", str(made.server))
    assert shown.count("online") - shown.count("online for") == len(SITES)
    copy = made.folder / "secretless"
    shutil.copytree(made.server, copy, ignore=shutil.ignore_patterns("orders.db*", "messages"))
    (copy / "secret").write_text("another")
    done = made.call("submit", str(files["all"]), "--server", str(copy), check=False)
    assert done.returncode == 2


def test_a_node_receives_the_base_model_that_the_server_offers(tiny_folder: Path, tmp_path: Path) -> None:
    """The model's folder is relative to that of ``fedspan submit``; the node is started elsewhere."""
    files = site_files(tiny_folder / "corpus.csv", tmp_path)
    values = run_values(tiny_folder, {"name": "fedit", "r": 2}, federation={"rounds": 1})
    folder = Path(values["model"]["name"])
    values["model"]["name"] = folder.name
    values["partition"]["clients"] = 1
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    with Deployment(tmp_path / "deployment") as made:
        made.join("north", made.node_file("north", files["north"], limits={"accept_base": True}))
        command = build_command("submit", str(tmp_path / "config.yaml"), "--out", str(tmp_path / "run"))
        completed = subprocess.run(
            [*command, "--server", str(made.server), "--offer-base"],
            cwd=folder.parent,
            env=build_environment(),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert completed.returncode == 0, completed.stdout + completed.stderr + made.logs()
        printed = " ".join(completed.stdout.split())
        assert "receives the base model from the server" in printed
        assert "offered to the nodes" in printed
        (received,) = (made.folder / "north-state" / "bases").iterdir()
        assert {path.name for path in received.iterdir()} >= {"config.json", "model.safetensors"}
        for path in received.iterdir():
            assert path.read_bytes() == (folder / path.name).read_bytes()
        assert not list((made.server / "bases").iterdir())


def test_nodes_join_and_leave_a_run_under_way(tiny_folder: Path, tmp_path: Path) -> None:
    """A fourth node is admitted after the first round, one leaves politely, the server is killed and resumes: the
    adapter has the bits of a simulation with the same clients in each round.
    """
    sites, late = (*SITES, "east"), "east"
    files = site_files(tiny_folder / "corpus.csv", tmp_path, sites)
    plan = config(tiny_folder, tmp_path, rounds=24, late_joiners=True)
    values = yaml.safe_load(plan.read_text())
    values["training"]["local_steps"] = STEPS // 2
    values["engine"] = {"name": "loop"}  # in the batched one, the bits depend on how many clients share a pass
    plan.write_text(yaml.safe_dump(values))
    run = tmp_path / "run"
    with Deployment(tmp_path / "deployment") as made:
        for site in SITES:
            made.join(site, made.node_file(site, files[site]))
        key = made.folder / f"{late}.key"
        made.call_here("join", "--new-key", str(key))
        process = submitted(made, plan, run)
        made.join(late, made.node_file(late, files[late]))  # refused until it is admitted
        wait_for_round(run, 1, process)
        made.call_here("admit", f"{key}.pub", "--as", late, "--server", str(made.server))
        wait_for_event(run, "joined", process)
        os.kill(made.processes[SITES[1]].pid, signal.SIGTERM)
        wait_for_event(run, "left", process)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        finish(submitted(made, plan, run, "--resume", str(run)), made)
        assert made.processes[SITES[1]].wait(60) == 0
    rows = rounds(run)
    assert [row["round"] for row in rows] == list(range(1, 25))
    events = {event: [(row["round"], row[event]) for row in rows if event in row] for event in ("joined", "left")}
    ((joined, who),) = events["joined"]
    ((left, gone),) = events["left"]
    assert (who, gone) == ([late], [SITES[1]])
    assert 1 < joined < left
    assert rows[-1]["cohort"] == sorted({*sites} - {SITES[1]})
    failures = [(row["round"], one["client"], one["purpose"]) for row in rows for one in row.get("failures", [])]
    assert {failure[:2] for failure in failures} <= {(left - 1, SITES[1])}  # it was stopped when that round began
    last = left - 1 - ((left - 1, SITES[1], "train") in failures)
    simulated = local_values(values, files["all"], {"name": "loop"})
    simulated["federation"] = {**simulated["federation"], "late_joiners": False}
    simulated["simulation"] = {"present": {late: [joined, None], SITES[1]: [1, last]}}
    fedspan.run(simulated, tmp_path / "simulated")
    assert same(run, tmp_path / "simulated")


def test_asynchronous_rounds_wait_for_no_node_and_their_record_repeats_them(tiny_folder: Path, tmp_path: Path) -> None:
    """The server is killed and resumes, and a node is killed for good; a simulation of the record ends with the same
    bits. Two replies end a round in which three nodes train, so one of them is of an older state in some rounds.
    """
    files = site_files(tiny_folder / "corpus.csv", tmp_path)
    buffered = {"concurrency": 3}
    plan = config(tiny_folder, tmp_path, rounds=8, clients_per_round=2, buffered=buffered)
    values = yaml.safe_load(plan.read_text())
    values["engine"] = {"name": "loop"}
    values["training"] |= {"local_steps": None, "local_epochs": 40}  # the sites have 19, 32 and 58 texts
    plan.write_text(yaml.safe_dump(values))
    run, slowest = tmp_path / "run", "west"
    with Deployment(tmp_path / "deployment") as made:
        for site in SITES:
            made.join(site, made.node_file(site, files[site]))
        process = submitted(made, plan, run)
        wait_for_round(run, 3, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process = submitted(made, plan, run, "--resume", str(run))
        wait_for_round(run, 5, process)
        made.end(slowest)
        finish(process, made)
    rows = rounds(run)
    assert [row["round"] for row in rows] == list(range(1, 9))
    assert all(len(row["arrivals"]) == 2 for row in rows)
    assert max(age for row in rows for _, age in row["arrivals"]) >= 1
    assert slowest not in dict(rows[-1]["arrivals"])
    simulated = local_values(values, files["all"], {"name": "loop"})
    simulated["federation"]["buffered"] = {**buffered, "replay": str(run)}
    fedspan.run(simulated, tmp_path / "again")
    assert [row["arrivals"] for row in rounds(tmp_path / "again")] == [row["arrivals"] for row in rows]
    assert same(run, tmp_path / "again")
    ours, theirs = (load_latest(RunFolder(path)) for path in (run, tmp_path / "again"))
    assert differences(ours.state, theirs.state) == []


def wait_for_page(page: Any, expression: str) -> None:
    """Wait until an expression is true; the page's policy forbids Playwright's own wait, which evaluates text."""
    until = time.monotonic() + 120
    while not page.evaluate(expression):
        assert time.monotonic() < until, (expression, page.inner_text("body"))
        page.wait_for_timeout(50)


def test_nodes_and_the_rounds_of_a_run_appear_without_a_reload(tiny_folder: Path, tmp_path: Path, browser: Any) -> None:
    """The web page of a server in a real browser, while nodes connect and a run is submitted."""
    files = site_files(tiny_folder / "corpus.csv", tmp_path)
    plan = tmp_path / "config.yaml"
    plan.write_text(yaml.safe_dump(run_values(tiny_folder, {"name": "fedit", "r": 2}, federation={"rounds": 3})))
    web = ["--web-port", str(free_port())]
    with Deployment(tmp_path / "deployment", options=web) as made:
        made.wait_for("server", "web page: ")
        (url,) = (line.split()[-1] for line in made.log("server").splitlines() if line.startswith("web page: "))
        page, wrong = browser.new_page(), list[str]()
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.goto(url)
        wait_for_page(page, "document.getElementById('title').textContent === 'No run yet'")
        page.evaluate("window.unchanged = true")
        for site in SITES:
            made.join(site, made.node_file(site, files[site]))
        wait_for_page(page, f"document.getElementById('facts').textContent.includes('{len(SITES)} of {len(SITES)}')")
        assert page.locator("#rows td.online").count() == len(SITES)
        made.call("submit", str(plan), "--out", str(tmp_path / "run"), "--server", str(made.server))
        wait_for_page(page, "document.getElementById('state').textContent === 'finished'")
        assert page.evaluate("window.unchanged")
        assert page.locator("#loss circle").count() == 3
        shown = {row.split("\t")[0]: row.split("\t") for row in page.inner_text("#rows").splitlines()}
        assert {site: (shown[site][1], shown[site][3]) for site in SITES} == dict.fromkeys(SITES, ("online", "3"))
        report = json.loads((tmp_path / "run" / "report.json").read_text())
        moved = sum(report["bytes"].values())
        assert moved > 0
        assert page.evaluate("formatSize(" + str(moved) + ")") in page.inner_text("#facts")
        assert wrong == []
