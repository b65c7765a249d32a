"""Every fault, done to a real deployment on this machine: a server, three nodes, TLS and keys.

Needs to be root, for network namespaces and small file systems.

    python -m evidence.regression.faults --page docs/results/faults.md --record docs/results/faults.json
    python -m evidence.regression.faults nan server-killed

A tiny BERT. After each fault the run must have every round that was
finished before it, unchanged, and a model that is finite and has the bits of an undisturbed run in which the same
clients replied; where nodes join or leave and in asynchronous rounds, these are the bits of a simulation with the same
clients in each round.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

import fedspan
from tests.helpers import tiny
from tests.helpers.sites import (
    SITES,
    local_values,
    run_values,
    site_files,
)
from tests.helpers.slow_link import SlowLink
from tests.helpers.stage import Deployment, build_command, build_environment, find_child

HERE = Path(__file__).resolve().parent
NORTH, SOUTH, WEST = SITES
ROUNDS = 3
STEPS = 60
"""Of a client's round, so that there is time to do something in it."""
LONG = 300
"""The same, where the node must not have replied before it is stopped."""
WAIT = 900.0
"""Seconds after which a scenario gives up; beside other work on the machine, starting a node takes minutes."""
AREA, OUTSIDE, INSIDE = "fedspan-faults", "10.213.77.1", "10.213.77.2"
"""A network namespace, and the addresses of the pair of interfaces to it."""


class Failed(AssertionError):
    """A fault had consequences that it must not have."""


def require(holds: bool, description: str) -> None:
    if not holds:
        raise Failed(description)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a fault.

    Args:
        seen: The line that a user sees.
        state: The run that the model is equal to.
        left_out: Clients whose replies did not count.
        rounds: Number of the run's rounds; None: no run is submitted.
        steps: Number of a client's local steps in a round; None as for ``rounds``.
        seconds: Duration of the scenario.
        date: Date of the call of this script.
        commit: The commit that was checked out.
    """

    seen: str
    state: str
    left_out: str = "nobody"
    rounds: int | None = None
    steps: int | None = None
    seconds: float = 0.0
    date: str = ""
    commit: str = ""


@dataclass(frozen=True)
class Model:
    """The model of a finished run: the global adapter, or each client's."""

    tensors: Mapping[str, torch.Tensor]

    def require_same(self, other: "Model") -> None:
        require(all(bool(torch.isfinite(value).all()) for value in self.tensors.values()), "the model is not finite")
        require(self.tensors.keys() == other.tensors.keys(), "the models have other tensors")
        for name, value in self.tensors.items():
            require(torch.equal(value, other.tensors[name]), f"{name} has other bits")


class Submitted:
    """A run that was submitted and has not ended.

    Args:
        stage: The deployment.
        log: Path of the log.
        out: Folder of the run.
        arguments: Arguments of ``fedspan submit``, which is started in the stage's folder.
    """

    def __init__(self, stage: "Stage", log: Path, out: Path, *arguments: str) -> None:
        self.stage, self.log, self.out = stage, log, out
        self.began = time.time()
        command = build_command("submit", *arguments, "--server", str(stage.made.server))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=stage.folder, env=build_environment(), stdout=log, stderr=log, start_new_session=True
            )

    def rows(self) -> list[str]:
        path = self.out / "metrics.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    def until(self, round: int, seconds: float = WAIT) -> None:
        """Wait until so many rounds are finished."""
        end = time.monotonic() + seconds
        while len(self.rows()) < round:
            require(self.process.poll() is None, f"submit ended before round {round}: {self.said()[-3000:]}")
            require(time.monotonic() < end, f"no round {round} after {seconds:g} s{self.stage.made.logs()}")
            time.sleep(0.02)

    def until_event(self, event: str) -> None:
        """Wait until a round's metrics name who joined, or left."""
        end = time.monotonic() + WAIT
        while not any(event in json.loads(row) for row in self.rows()):
            require(self.process.poll() is None, f"submit ended before any client {event}: {self.said()[-3000:]}")
            require(time.monotonic() < end, f"nobody {event} after {WAIT:g} s{self.stage.made.logs()}")
            time.sleep(0.05)

    def in_the_middle(self, site: str = "") -> list[str]:
        """Wait until a client trains in the second round, and return the metrics of the finished rounds.

        Args:
            site: Name of the client; left out: the last one.
        """
        self.until(1)
        self.stage.made.wait_for_training(site or WEST, seconds=WAIT)
        return self.rows()

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self, code: int | None = 0) -> str:
        """Wait for the end of the run, and return the log.

        Args:
            code: Expected exit code; None: any.
        """
        try:
            code_found = self.process.wait(WAIT)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise Failed(f"submit did not end: {self.said()[-3000:]}{self.stage.made.logs()}") from None
        require(code is None or code_found == code, f"submit ended with {code_found}: {self.said()[-3000:]}")
        require("Traceback" not in self.said(), f"a traceback: {self.said()[-3000:]}")
        return self.said()

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Stage:
    """The deployment with its three nodes, one of which can misbehave; and uninterrupted runs to compare with.

    Args:
        folder: Folder for everything that the stage writes.

    Attributes:
        work: Rounds, and steps of a round, of the run that was submitted last; None each: no run was.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work: tuple[int | None, int | None] = (None, None)
        tiny.save_corpus(folder)
        tiny.save_model("deep-bert", folder).rename(folder / "bert")  # with one layer, rounds would pass before faults
        self.files = site_files(folder / "corpus.csv", folder)
        self.made = Deployment(folder / "deployment", names=[OUTSIDE])
        self.kind = folder / "kind"
        self._references: dict[str, Model] = {}
        self._count = 0
        self._last: Submitted | None = None

    def node(self, id: str, like: str = "", **changes: Any) -> Path:
        """A node's file, optionally with the data of another node."""
        limits = {"round_seconds": 60.0, **changes.pop("limits", {})}
        return self.made.node_file(id, self.files[like or id], limits=limits, **changes)

    def join(
        self, id: str, path: Path | None = None, before: tuple[str, ...] = (), *, until: str = "connected to"
    ) -> None:
        """Start a node, and wait until it says something."""
        path = path or self.made.folder / f"{id}.yaml"
        if id == WEST:
            command = [sys.executable, str(HERE / "spoilt_node.py"), str(path), str(self.kind)]
        else:
            command = build_command("join", str(path))
        (self.made.folder / f"{id}.log").unlink(missing_ok=True)
        self.made.start(id, options=[*before, *command])
        self.made.wait_for(id, until, WAIT)

    def leave(self, id: str) -> None:
        self.made.end(id, signal.SIGTERM)

    def submit(
        self,
        name: str,
        method: Mapping[str, Any] | None = None,
        out: Path | None = None,
        steps: int = STEPS,
        training: Mapping[str, Any] | None = None,
        engine: Mapping[str, Any] | None = None,
        base: str = "",
        **federation: Any,
    ) -> Submitted:
        """Submit a run.

        Args:
            name: Name of the run.
            method: Its method; None: fedit.
            out: Its folder; None: one in the stage's folder.
            steps: Local steps of a round.
            training: Further fields of ``training``.
            engine: The section ``engine``; None: the default.
            base: Folder of a base model that is offered to the nodes; empty: the model that all of them have.
            federation: Further fields of ``federation``.
        """
        self._count += 1
        run_folder = self.folder / f"{self._count:02}-{name}"
        out = out or run_folder
        values = run_values(
            self.folder,
            method or {"name": "fedit", "r": 2},
            federation={"rounds": ROUNDS, "deadline": 120.0, "min_replies": 3, **federation},
        )
        values["training"] = {**values["training"], "local_steps": steps, **(training or {})}
        if engine is not None:
            values["engine"] = dict(engine)
        if base:
            values["model"]["name"] = base
        self.work = values["federation"]["rounds"], steps
        path = run_folder.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(values))
        options = ["--out", str(out), *(["--offer-base"] if base else [])]
        return self._start(run_folder.with_suffix(".log"), out, str(path), *options)

    def resume(self, run: Submitted) -> Submitted:
        return self._start(run.log.with_suffix(".resumed.log"), run.out, "--resume", str(run.out))

    def _start(self, log: Path, out: Path, *arguments: str) -> Submitted:
        self._last = Submitted(self, log, out, *arguments)
        return self._last

    def restore(self) -> None:
        """Restore the deployment after a fault that had consequences, so that the next one is judged independently."""
        if self._last is not None and self._last.process.poll() is None:
            self._last.kill()
        self.kind.write_text("")
        for name in [name for name in self.made.processes if name != "server"]:
            self.made.end(name)
        for site in SITES:
            self.join(site, self.node(site))

    def finished(self, run: Submitted, before: list[str], rounds: int = ROUNDS) -> Model:
        """Return the model of a finished run.

        Args:
            run: The run.
            before: Metrics of the rounds that were finished before the fault.
            rounds: Number of its rounds.
        """
        rows = run.rows()
        require(rows[: len(before)] == before, "a finished round was lost or run again")
        require([json.loads(row)["round"] for row in rows] == list(range(1, rounds + 1)), "rounds are missing")
        return Model(load_file(run.out / "adapter" / "adapter_model.safetensors"))

    def simulate(self, run: Submitted, data: Path, federation: Mapping[str, Any], **changes: Any) -> Model:
        """Return the model of a simulation of a run, with the same engine.

        Args:
            run: The run, whose config names its engine.
            data: Data of all clients.
            federation: Fields of ``federation`` that replace those of the run.
            changes: Further sections of the config.
        """
        values = yaml.safe_load(run.log.with_suffix(".yaml").read_text())
        simulated = {**local_values(values, data, values["engine"]), **changes}
        simulated["federation"] = {**simulated["federation"], **federation}
        out = self.folder / f"{run.out.name}-simulated"
        fedspan.run(simulated, out)
        return Model(load_file(out / "adapter" / "adapter_model.safetensors"))

    def own_models(self, since: float) -> Model:
        """Return the clients' own models on the nodes that were written since then."""
        models: dict[str, torch.Tensor] = {}
        for site in SITES:
            folders = (self.made.folder / f"{site}-state").glob("*/adapter/adapter_model.safetensors")
            newest = max(folders, key=lambda path: path.stat().st_mtime)
            require(newest.stat().st_mtime > since, f"{site} wrote no adapter of its own")
            models.update({f"{site}/{name}": value for name, value in load_file(newest).items()})
        return Model(models)

    def clean(self) -> Model:
        """Of a run in which everybody replied."""
        if "clean" not in self._references:
            run = self.submit("clean")
            run.end()
            self._references["clean"] = self.finished(run, [])
        return self._references["clean"]

    def without_west(self, steps: int = STEPS) -> Model:
        """Of a run in which one node declined the second round."""
        name = f"without-{steps}"
        if name not in self._references:
            with self.spoilt("declines"):
                run = self.submit(name, min_replies=2, steps=steps)
                run.end()
            self._references[name] = self.finished(run, [])
        return self._references[name]

    def clean_personal(self) -> Model:
        """The clients' own models of a run in which everybody replied."""
        if "personal" not in self._references:
            run = self.submit("personal", {"name": "fedsa-lora", "r": 2})
            run.end()
            self._references["personal"] = self.own_models(run.began)
        return self._references["personal"]

    @contextlib.contextmanager
    def spoilt(self, kind: str) -> Iterator[None]:
        self.kind.write_text(kind)
        try:
            yield
        finally:
            self.kind.write_text("")


def line(text: str, words: str) -> str:
    """The line that holds some words."""
    match = next((one for one in text.splitlines() if words in one), None)
    require(match is not None, f"nobody said {words!r}: {text[-2000:]}")
    return " ".join(str(match).split())


Scenario = Callable[[Stage], Outcome]
FAULTS: dict[str, tuple[str, Scenario]] = {}


def register_fault(name: str, fault: str) -> Callable[[Scenario], Scenario]:
    def known(scenario: Scenario) -> Scenario:
        FAULTS[name] = (fault, scenario)
        return scenario

    return known


ALL, REST = "bits of an undisturbed run", "bits of a run in which that client declined the round"
_REPLIES = {
    "raises": ("a client raises in the second round", "RuntimeError"),
    "nan": ("a client's reply is NaN throughout", "not finite"),
    "shapes": ("a client's reply has tensors of other shapes", "not ["),
    "extra": ("a client's reply has a tensor more", "backdoor"),
    "huge": ("a client's reply is moved by 1000 in every number", "times the cohort's norm"),
    "stale": ("a client's reply is one to the round before", "a reply of"),
    "too-large": ("a reply of 3 MiB, where 1 MiB is the most (`federation.message_mib: 1`)", "larger than its order"),
    "no-header": ("a reply whose header is no JSON", "not a fedspan header"),
}


def _make_spoilt_scenario(kind: str, words: str) -> Scenario:
    def scenario(stage: Stage) -> Outcome:
        expected = stage.without_west()
        with stage.spoilt(kind):
            run = stage.submit(kind, min_replies=2, **({"message_mib": 1} if kind == "too-large" else {}))
            before = run.in_the_middle()
            output = run.end()
        stage.finished(run, before).require_same(expected)
        require("patient" not in output, "what a client's error said left its machine")
        return Outcome(line(output, words), REST, "that client, in that round")

    return scenario


for _kind, (_done, _words) in _REPLIES.items():
    register_fault(_kind, _done)(_make_spoilt_scenario(_kind, _words))


@register_fault("replay", "the order reaches a client twice, and it answers the second")
def replay(stage: Stage) -> Outcome:
    expected = stage.clean()
    with stage.spoilt("replay"):
        run = stage.submit("replay")
        before = run.in_the_middle()
        run.end()
    stage.finished(run, before).require_same(expected)
    return Outcome(line(stage.made.log(WEST), "its reply is sent again"), ALL)


@register_fault(
    "node-killed",
    "a node is killed (-9) in the middle of the second round and started again; FedSA-LoRA, whose B stays on the nodes",
)
def node_killed(stage: Stage) -> Outcome:
    expected = stage.clean_personal()
    run = stage.submit("node-killed", {"name": "fedsa-lora", "r": 2})
    before = run.in_the_middle(NORTH)
    stage.made.end(NORTH)
    stage.join(NORTH)
    output = run.end()
    require(run.rows()[: len(before)] == before, "a finished round was lost")
    require(f"{NORTH}:" not in output, f"the order was lost: {output[-3000:]}")
    stage.own_models(run.began).require_same(expected)
    return Outcome(line(stage.made.log(NORTH), "round 2: train done"), ALL + ", every client's own model")


@register_fault(
    "checkpointed",
    "the fault `node-killed` with `training.checkpoint_steps: 5` and `federation.min_replies: 1`: the node continues "
    "within the round",
)
def node_killed_with_checkpoints(stage: Stage) -> Outcome:
    wanted = stage.clean_personal()
    method = {"name": "fedsa-lora", "r": 2}
    run = stage.submit("checkpointed", method, training={"checkpoint_steps": 5}, min_replies=1)
    before = run.in_the_middle(NORTH)
    stage.made.end(NORTH)
    stage.join(NORTH)
    output = run.end()
    require(f"{NORTH}:" not in output, f"the order was lost: {output[-3000:]}")
    require(run.rows()[: len(before)] == before, "a finished round was lost")
    stage.own_models(run.began).require_same(wanted)
    return Outcome(line(stage.made.log(NORTH), "training continues after step"), ALL + ", every client's own model")


@register_fault("worker-killed", "the process in which a node trains is killed (-9), as when memory runs out")
def worker_killed(stage: Stage) -> Outcome:
    expected = stage.clean()
    run = stage.submit("worker-killed")
    before = run.in_the_middle(SOUTH)
    os.kill(find_child(stage.made.processes[SOUTH].pid), signal.SIGKILL)
    output = run.end()
    stage.finished(run, before).require_same(expected)
    return Outcome(line(output, f"{SOUTH}:"), ALL)


@register_fault(
    "training-hangs", "training hangs (SIGSTOP) for longer than the node's limit (`limits.round_seconds: 15`)"
)
def training_hangs(stage: Stage) -> Outcome:
    expected = stage.clean()
    stage.leave(SOUTH)
    stage.join(SOUTH, stage.node(SOUTH, limits={"round_seconds": 15.0}))
    try:
        run = stage.submit("training-hangs")
        before = run.in_the_middle(SOUTH)
        os.kill(find_child(stage.made.processes[SOUTH].pid), signal.SIGSTOP)
        output = run.end()
    finally:
        stage.leave(SOUTH)
        stage.join(SOUTH, stage.node(SOUTH))
    stage.finished(run, before).require_same(expected)
    return Outcome(line(output, "limits.round_seconds"), ALL)


@register_fault("node-hangs", "a whole node hangs (SIGSTOP) past `federation.deadline: 15`")
def node_hangs(stage: Stage) -> Outcome:
    expected = stage.without_west(LONG)
    run = stage.submit("node-hangs", min_replies=2, deadline=15.0, steps=LONG)
    before = run.in_the_middle()
    pid = stage.made.processes[WEST].pid
    os.killpg(pid, signal.SIGSTOP)
    try:
        run.until(2)
    finally:
        os.killpg(pid, signal.SIGCONT)
    output = run.end()
    stage.finished(run, before).require_same(expected)
    return Outcome(line(output, "no reply within"), REST, "that client, in that round")


@register_fault("server-killed", "`fedspan submit` is killed (-9) in the middle of the second round, and resumed")
def server_killed(stage: Stage) -> Outcome:
    expected = stage.clean()
    run = stage.submit("server-killed")
    before = run.in_the_middle()
    run.kill()
    again = stage.resume(run)
    output = again.end()
    stage.finished(again, before).require_same(expected)
    return Outcome(line(output, "resumed after round"), ALL)


@register_fault(
    "serving-killed",
    "the server's serving process is killed (-9) in the middle of the second round; `fedspan server` restarts it",
)
def serving_killed(stage: Stage) -> Outcome:
    expected = stage.clean()
    run = stage.submit("serving-killed")
    before = run.in_the_middle()
    os.kill(find_child(stage.made.processes["server"].pid), signal.SIGKILL)
    run.end()
    stage.finished(run, before).require_same(expected)
    stage.made.wait_for("server", "it runs again")
    return Outcome(line(stage.made.log("server"), "it runs again"), ALL)


@register_fault(
    "server-down", "the whole server is down for 100 s, longer than an order waits for a node that is offline"
)
def server_down(stage: Stage) -> Outcome:
    expected = stage.clean()
    run = stage.submit("server-down")
    before = run.in_the_middle()
    stage.made.end("server")
    time.sleep(100)
    (stage.made.folder / "server.log").unlink()
    stage.made.start_server()
    output = run.end(code=None)
    if run.process.returncode:
        match = line(output, "error:")
        run = stage.resume(run)
        run.end()
    else:
        match = next((one.strip() for one in output.splitlines() if f"{NORTH}:" in one), "nothing: the run goes on")
    stage.finished(run, before).require_same(expected)
    return Outcome(match, ALL)


@register_fault(
    "network-cut",
    "the network between a node and the server is cut for 80 s in the middle of the second round, so that the server "
    "takes the node for offline (the node in a network namespace, whose veth is set down)",
)
def network_cut(stage: Stage) -> Outcome:
    expected = stage.clean()
    stage.leave(NORTH)
    with open_network():
        port = stage.made.port
        stage.join(NORTH, stage.node(NORTH, server=f"{OUTSIDE}:{port}"), ("ip", "netns", "exec", AREA))
        try:
            run = stage.submit("network-cut")
            before = run.in_the_middle(NORTH)
            run_ip("link", "set", f"{AREA[:12]}0", "down")
            time.sleep(80)
            run_ip("link", "set", f"{AREA[:12]}0", "up")
            output = run.end()
        finally:
            stage.leave(NORTH)
    stage.join(NORTH, stage.node(NORTH))
    stage.finished(run, before).require_same(expected)
    require(f"{NORTH}:" not in output, f"the reply was lost: {output[-3000:]}")
    return Outcome("nothing: the reply came when the network was back", ALL)


@register_fault(
    "link-flaps",
    "the link of a node has 1 Mbit/s and is cut every 5 s during the whole run (a proxy; every cut is a reset)",
)
def link_flaps(stage: Stage) -> Outcome:
    expected = stage.clean()
    stage.leave(NORTH)
    with SlowLink(stage.made.port, 1e6 / 8, 5.0, is_cut=False) as slow:
        stage.join(NORTH, stage.node(NORTH, server=f"127.0.0.1:{slow.port}"))
        try:
            slow.cutting.set()
            run = stage.submit("link-flaps")
            run.end()
        finally:
            stage.leave(NORTH)
        require(slow.cuts > 3, "the link was hardly cut")
    output = stage.made.log(NORTH)
    stage.join(NORTH, stage.node(NORTH))
    stage.finished(run, []).require_same(expected)
    is_seen = "no connection to" in output
    return Outcome(line(output, "no connection to") if is_seen else "nothing: the replies came in time", ALL)


def run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def open_network() -> Iterator[None]:
    """A namespace with an interface of its own to this machine."""
    near, far = f"{AREA[:12]}0", f"{AREA[:12]}1"
    run_ip("netns", "add", AREA)
    try:
        run_ip("link", "add", near, "type", "veth", "peer", "name", far)
        run_ip("link", "set", far, "netns", AREA)
        run_ip("addr", "add", f"{OUTSIDE}/30", "dev", near)
        run_ip("link", "set", near, "up")
        for arguments in (
            ("addr", "add", f"{INSIDE}/30", "dev", far),
            ("link", "set", far, "up"),
            ("link", "set", "lo", "up"),
        ):
            run_ip("netns", "exec", AREA, "ip", *arguments)
        yield
    finally:
        run_ip("netns", "del", AREA)


@contextlib.contextmanager
def mount_small_disk(folder: Path, mib: int) -> Iterator[Callable[[bool], None]]:
    """A file system of its own at a folder, and a function that fills it or frees it."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)], check=True)

    def filled(full: bool) -> None:
        path = folder / "filler"
        if not full:
            path.unlink()
            return
        with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    try:
        yield filled
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@register_fault("server-disk-full", "the disk of the run's folder is full after the first round; freed, and resumed")
def server_disk_full(stage: Stage) -> Outcome:
    expected = stage.clean()
    with mount_small_disk(stage.folder / "disk", 16) as filled:
        run = stage.submit("server-disk-full", out=stage.folder / "disk" / "run")
        before = run.in_the_middle()
        filled(True)
        output = run.end(code=2)
        filled(False)
        run = stage.resume(run)
        run.end()
        stage.finished(run, before).require_same(expected)
    return Outcome(line(output, "the disk is full"), ALL)


@register_fault(
    "client-disk-full", "the disk of a node's folder is full in the second round; the run stops; freed, and resumed"
)
def client_disk_full(stage: Stage) -> Outcome:
    expected = stage.clean()
    stage.leave(NORTH)
    folder = stage.made.folder / f"{NORTH}-disk"
    book = Path("budget.json")  # what the server has used of the node's data goes along with it
    usual = stage.made.folder / f"{NORTH}-state"
    with mount_small_disk(folder, 16) as filled:
        shutil.copy2(usual / book, folder / book)
        folder.chmod(0o700)
        stage.join(NORTH, stage.node(NORTH, folder=str(folder)))
        try:
            run = stage.submit("client-disk-full")
            run.until(1)
            before = run.rows()
            filled(True)
            output = run.end(code=2)
            filled(False)
            run = stage.resume(run)
            run.end()
        finally:
            stage.leave(NORTH)
            shutil.copy2(folder / book, usual / book)
    stage.join(NORTH, stage.node(NORTH))
    stage.finished(run, before).require_same(expected)
    return Outcome(line(output, "error:"), ALL)


@register_fault("same-key", "a second node joins with the key of another")
def same_key(stage: Stage) -> Outcome:
    expected = stage.clean()
    known = yaml.safe_load((stage.made.folder / f"{NORTH}.yaml").read_text())
    path = stage.made.folder / "double.yaml"
    folder = stage.folder / "double-state"
    folder.mkdir(mode=0o700)
    shutil.copy2(stage.made.folder / f"{NORTH}-state" / "budget.json", folder)  # without it, the node itself refuses
    path.write_text(yaml.safe_dump({**known, "id": "double", "folder": str(folder)}))
    stage.join("double", path, until="refused the connection")
    try:
        run = stage.submit("same-key")
        before = run.in_the_middle()
        run.end()
    finally:
        stage.made.end("double")
    stage.finished(run, before).require_same(expected)
    return Outcome(line(stage.made.log("double"), "refused the connection"), ALL)


@register_fault("same-id", "a node that was admitted under another name uses the name of one that is connected")
def same_id(stage: Stage) -> Outcome:
    expected = stage.clean()
    path = stage.node("twin", NORTH)
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "id": NORTH}))
    stage.leave(NORTH)  # so that this node is selected, whichever connected first
    stage.join("twin", path)
    try:
        run = stage.submit("same-id")
        end = time.monotonic() + WAIT
        while "was admitted as" not in run.said():
            require(time.monotonic() < end, f"the twin is not refused: {run.said()}")
            time.sleep(0.1)
        stage.join(NORTH)
        before = run.in_the_middle()
        output = run.end()
    finally:
        stage.leave("twin")
    stage.finished(run, before).require_same(expected)
    return Outcome(line(output, "was admitted as"), ALL, "that node")


@register_fault("wrong-authority", "a node trusts another authority than the server's")
def wrong_authority(stage: Stage) -> Outcome:
    from fedspan.transports.http.keys import make_authority

    make_authority(stage.folder / "other", [])
    path = stage.node("misled", NORTH, authority=str(stage.folder / "other" / "ca.crt"))
    stage.join("misled", path, until="no connection")
    stage.leave("misled")
    return Outcome(line(stage.made.log("misled"), "no connection"), "no run is touched", "that node")


@register_fault("version", "a node runs another version of fedspan")
def version(stage: Stage) -> Outcome:
    """The third node can't participate: the run waits for it in vain, and continues with the right one."""
    expected, words = stage.clean(), "`version`: "
    stage.leave(WEST)
    os.environ["SPOILT_VERSION"] = "0.0.9"
    try:
        stage.join(WEST)
    finally:
        del os.environ["SPOILT_VERSION"]
    try:
        run = stage.submit("version")
        end = time.monotonic() + WAIT
        while words not in run.said():
            require(time.monotonic() < end and run.process.poll() is None, f"not refused: {run.said()}")
            time.sleep(0.1)
    finally:
        stage.leave(WEST)
        stage.join(WEST, stage.node(WEST))
    run.kill()
    output = run.said()
    run = stage.resume(run)
    run.end()
    stage.finished(run, []).require_same(expected)
    return Outcome(line(output, words), ALL + ", resumed with the right node", "that node")


@register_fault("labels", "a node's data hold a label that the run does not have")
def labels(stage: Stage) -> Outcome:
    """Its example is left out, so the model does not depend on what it holds."""
    models, seen = [], ""
    stage.leave(WEST)
    for name, example in (("label-a", "word1 word2,surgery,west"), ("label-b", "word7 word5 word3,pharmacy,west")):
        path = stage.files[name] = stage.folder / f"{name}.csv"
        path.write_text(f"{stage.files[WEST].read_text()}{example}\n")
        stage.join(WEST, stage.node(WEST, name))
        try:
            run = stage.submit(name)
            run.end()
            seen = line(stage.made.log(WEST), "are left out")
        finally:
            stage.leave(WEST)
        models.append(stage.finished(run, []))
    stage.join(WEST, stage.node(WEST))
    models[0].require_same(models[1])
    return Outcome(seen, "a run with another such example")


LOOP = {"name": "loop"}
"""Engine of the runs that a simulation repeats. The bits of the batched engine depend on how many clients share a pass,
and a node has one client."""


@register_fault(
    "buffered",
    "asynchronous rounds (`federation.buffered`): a node hangs (SIGSTOP) for two rounds, then another is killed (-9)",
)
def buffered_rounds(stage: Stage) -> Outcome:
    rounds, buffered = 8, {"concurrency": 3}
    run = stage.submit("buffered", rounds=rounds, clients_per_round=2, min_replies=2, buffered=buffered, engine=LOOP)
    before = len(run.in_the_middle())
    pid = stage.made.processes[WEST].pid
    os.killpg(pid, signal.SIGSTOP)
    try:
        run.until(before + 2)
    finally:
        os.killpg(pid, signal.SIGCONT)
    stage.made.wait_for_training(SOUTH, seconds=WAIT)
    killed = run.rows()
    stage.made.end(SOUTH)
    run.end()
    stage.join(SOUTH)
    model = stage.finished(run, killed, rounds)
    arrivals = [json.loads(row)["arrivals"] for row in run.rows()]
    require(all(len(replies) == 2 for replies in arrivals), f"a round has not two replies: {arrivals}")
    oldest = max(age for replies in arrivals for client, age in replies if client == WEST)
    require(oldest >= 2, f"no reply of {WEST} is to a state of two rounds before: {arrivals}")
    require(SOUTH not in dict(arrivals[-1]), f"{SOUTH} replied after its end: {arrivals}")
    replay = {"buffered": {**buffered, "replay": str(run.out)}}
    model.require_same(stage.simulate(run, stage.files["all"], replay))
    seen = f"nothing: {WEST}'s reply counts, and its state is {oldest} rounds old"
    return Outcome(seen, "bits of a simulation that replays the arrivals", "the killed node, from then on")


BASE, BASE_MIB = "offered", 4
"""Folder and size of a base model that one node does not have."""


@register_fault(
    "base-transfer",
    "a node is killed (-9) while it receives the base model (`limits.accept_base: true`), and started again",
)
def base_transfer(stage: Stage) -> Outcome:
    expected = stage.clean()
    folder = stage.folder / BASE
    shutil.copytree(stage.folder / "bert", folder)
    weights = folder / "model.safetensors"
    filler = {"filler": torch.arange(BASE_MIB << 18, dtype=torch.float32)}  # the model ignores it: a longer transfer
    save_file({**load_file(weights), **filler}, weights, {"format": "pt"})
    received = stage.made.folder / f"{NORTH}-state" / "bases"
    for site in SITES:
        stage.leave(site)
    for site in (SOUTH, WEST):
        stage.join(site, stage.node(site, models={BASE: str(folder)}))
    with SlowLink(stage.made.port, 2e6 / 8) as slow:
        path = stage.node(NORTH, server=f"127.0.0.1:{slow.port}", limits={"accept_base": True})
        stage.join(NORTH, path)
        run = stage.submit("base-transfer", base=BASE)
        arrived = wait_for_size(received, weights.name, BASE_MIB << 19)
        stage.made.end(NORTH)
        require(arrived < weights.stat().st_size, "the node was killed too late")
        transmitted = slow.received
        stage.join(NORTH, path)
        output = run.end()
        repeated = slow.received - transmitted
        stage.leave(NORTH)
    for site in (SOUTH, WEST):
        stage.leave(site)
    for site in SITES:
        stage.join(site, stage.node(site))
    require(repeated < weights.stat().st_size, f"after {arrived} bytes the node received {repeated} more")
    (copy,) = received.iterdir()
    for file in copy.iterdir():
        require(file.read_bytes() == (folder / file.name).read_bytes(), f"{file.name} is another")
    stage.finished(run, []).require_same(expected)
    return Outcome(line(output, "receives the base model"), ALL + "; the model's files are equal by bytes")


def wait_for_size(folder: Path, name: str, size: int) -> int:
    """Wait until a file below a folder has a size, and return its size then."""
    end = time.monotonic() + WAIT
    while True:
        sizes = [path.stat().st_size for path in folder.glob(f"*/{name}")]
        if sizes and max(sizes) >= size:
            return max(sizes)
        require(time.monotonic() < end, f"{name} has {sizes} bytes after {WAIT:g} s")
        time.sleep(0.05)


LARGE, LARGE_RANK = "large", 512
"""Folder of a model whose adapter has 20 MB, and the adapter's rank."""


@register_fault(
    "large-messages",
    "an order and a reply of 20 MB over a link of 1 Mbit/s that is cut every 4 s (a proxy; every cut is a reset)",
)
def large_messages(stage: Stage) -> Outcome:
    with open_large_scene(stage, 1e6 / 8, 4.0) as scene:
        run = scene.submit()
        output = run.end()
    link, size = scene.link, scene.message_bytes
    messages = link.received / size  # the model for training, and after the round for its evaluation
    require(link.cuts > 50, f"the link was cut {link.cuts} times")
    require(link.up < 1.1 * size, f"{link.up} bytes for a reply of {size}")
    require(messages < 1.1 * round(messages), f"{link.received} bytes for orders of {size}")
    require(f"{NORTH}:" not in output, f"the reply was lost: {output[-3000:]}")
    stage.finished(run, [], 1).require_same(scene.expected)
    return Outcome(
        f"nothing: the link was cut {link.cuts} times, and {link.up / size:.2f} times the reply's bytes passed it", ALL
    )


@register_fault(
    "interrupted-reply",
    "a node is killed (-9) when it has sent half of a reply of 2.6 MB (1 Mbit/s), and started again",
)
def interrupted_reply(stage: Stage) -> Outcome:
    return interrupt_reply(stage, 1e6 / 8, 64)


@register_fault(
    "interrupted-pieces",
    "the fault `interrupted-reply` with a reply of 7.9 MB (4 Mbit/s), which is announced and sent in pieces",
)
def interrupted_pieces(stage: Stage) -> Outcome:
    return interrupt_reply(stage, 4e6 / 8, 192)


@register_fault(
    "server-stopped",
    "`fedspan server` is stopped (SIGTERM) when a node has sent half of a reply of 2.6 MB (1 Mbit/s), and started "
    "again",
)
def server_stopped(stage: Stage) -> Outcome:
    with open_large_scene(stage, 1e6 / 8, rank=64) as scene:
        run = scene.submit()
        scene.wait_for_half(run)
        stage.made.processes["server"].send_signal(signal.SIGTERM)
        require(stage.made.processes["server"].wait(60) == 0, "the server did not end")
        (stage.made.folder / "server.log").unlink()
        stage.made.start_server()
        output = run.end()
        seen = line(stage.made.log(NORTH), "no connection to")
    require(f"{NORTH}:" not in output, f"the reply was lost: {output[-3000:]}")
    stage.finished(run, [], 1).require_same(scene.expected)
    return Outcome(seen, ALL)


def interrupt_reply(stage: Stage, rate: float, rank: int) -> Outcome:
    """Kill a node when it has sent half of its reply, and start it again.

    Args:
        stage: The deployment.
        rate: Rate of the node's link, in bytes per second.
        rank: Rank of the adapter.
    """
    with open_large_scene(stage, rate, rank=rank) as scene:
        run = scene.submit()
        scene.wait_for_half(run)
        stage.made.end(NORTH)
        scene.link.cut()  # with what the system has buffered of the reply
        stage.join(NORTH)
        output = run.end()
        seen = line(stage.made.log(NORTH), "its reply is sent again")
    require(f"{NORTH}:" not in output, f"the reply was lost: {output[-3000:]}")
    stage.finished(run, [], 1).require_same(scene.expected)
    return Outcome(seen, ALL)


@dataclass(frozen=True)
class LargeScene:
    """A model whose messages are large, and a node behind a slow link.

    Args:
        submit: Submits a run of one round.
        link: The link of the first node.
        expected: The model of an undisturbed run.
        message_bytes: Size of a message, in bytes.
    """

    submit: Callable[[], Submitted]
    link: SlowLink
    expected: Model
    message_bytes: int

    def wait_for_half(self, run: Submitted) -> None:
        """Wait until the first node has sent half of its reply."""
        end = time.monotonic() + WAIT
        while self.link.up < self.message_bytes / 2:
            require(time.monotonic() < end and run.process.poll() is None, f"no reply: {run.said()[-3000:]}")
            time.sleep(0.05)


@contextlib.contextmanager
def open_large_scene(
    stage: Stage, rate: float, cut_after: float | None = None, rank: int = LARGE_RANK
) -> Iterator[LargeScene]:
    """Give all nodes a model with large messages, and one of them a slow link.

    Args:
        stage: The deployment.
        rate: Rate of the link, in bytes per second.
        cut_after: Seconds after which it is cut, again and again; None: never.
        rank: Rank of the adapter, of which each one makes a message of 41 kB.
    """
    import transformers

    folder, method = stage.folder / LARGE, {"name": "fedit", "r": rank}
    fields: dict[str, Any] = {"steps": 1, "base": str(folder), "rounds": 1, "deadline": WAIT}
    if not folder.exists():
        config = transformers.BertConfig.from_pretrained(
            stage.folder / "bert", hidden_size=LARGE_RANK, intermediate_size=LARGE_RANK
        )
        with torch.random.fork_rng():
            torch.manual_seed(5)
            transformers.BertModel(config).save_pretrained(folder)
        tiny.save_tokenizer(folder)
    for site in SITES:
        stage.leave(site)
        stage.join(site, stage.node(site, models={LARGE: str(folder)}))
    undisturbed = stage.submit("large-undisturbed", method, **fields)
    undisturbed.end()
    size = (undisturbed.out / "adapter" / "adapter_model.safetensors").stat().st_size
    require(size > 40e3 * rank, f"the adapter has {size} bytes")
    stage.leave(NORTH)
    with SlowLink(stage.made.port, rate, cut_after) as link:
        stage.join(NORTH, stage.node(NORTH, server=f"127.0.0.1:{link.port}", models={LARGE: str(folder)}))
        expected = stage.finished(undisturbed, [], 1)
        yield LargeScene(lambda: stage.submit("large", method, **fields), link, expected, size)
        for site in SITES:
            stage.leave(site)
    for site in SITES:
        stage.join(site, stage.node(site))


LATE, LATE_ROUNDS = "east", 16


@register_fault(
    "joins-and-leaves",
    "a fourth node is admitted after the first round, and another one is stopped (SIGTERM) once it participates "
    "(`federation.late_joiners: true`)",
)
def joins_and_leaves(stage: Stage) -> Outcome:
    folder = stage.folder / "four"
    folder.mkdir()
    files = site_files(stage.folder / "corpus.csv", folder, (*SITES, LATE))
    stage.files[LATE] = files[LATE]
    key = stage.made.folder / f"{LATE}.key"
    stage.made.call_here("join", "--new-key", str(key))
    run = stage.submit("joins-and-leaves", steps=LONG, engine=LOOP, late_joiners=True, rounds=LATE_ROUNDS)
    run.until(1)
    stage.made.call_here("admit", f"{key}.pub", "--as", LATE, "--server", str(stage.made.server))
    stage.join(LATE, stage.node(LATE))
    run.until_event("joined")
    os.kill(stage.made.processes[SOUTH].pid, signal.SIGTERM)
    output = run.end()
    stage.restore()
    model = stage.finished(run, [], LATE_ROUNDS)
    rows = [json.loads(row) for row in run.rows()]
    ((joined, _),) = [(row["round"], row["joined"]) for row in rows if "joined" in row]
    ((left, gone),) = [(row["round"], row["left"]) for row in rows if "left" in row]
    require(gone == [SOUTH], f"{gone} left")
    failures = [(row["round"], one["client"], one["purpose"]) for row in rows for one in row.get("failures", [])]
    require({failure[:2] for failure in failures} <= {(left - 1, SOUTH)}, f"clients failed: {failures}")
    last = left - 1 - ((left - 1, SOUTH, "train") in failures)  # it may be stopped at the moment when a round begins
    presence = {"present": {LATE: [joined, None], SOUTH: [1, last]}}
    model.require_same(stage.simulate(run, files["all"], {"late_joiners": False}, simulation=presence))
    state = "bits of a simulation with the same clients in each round"
    return Outcome(line(output, f"{LATE} has joined"), state, f"that node, from round {left} on")


def redact(text: str, folder: Path) -> str:
    return text.replace(str(folder), "FOLDER")


def format_table(outcomes: Mapping[str, Outcome]) -> str:
    columns = ("fault", "whose reply did not count", "s", "date", "commit")
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, outcome in outcomes.items():
        cells = (f"`{name}`", outcome.left_out, f"{outcome.seconds:.0f}", outcome.date, outcome.commit)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


PAGE = """# Faults

This page lists faults that were injected into a deployment, and whose replies each of them cost.

A server and three nodes, with TLS and keys, train a tiny BERT on one machine. After each fault, every finished round is
there, unchanged, and the model has the bits of an undisturbed run in which the same clients replied, or of a simulation
with the same clients. If not, the fault has no row, and the command ends with an error that names it. The script
describes each fault beside its name.

Command: `python -m evidence.regression.faults --page docs/results/faults.md`. Machine: {machine}, {cores} cores,
torch {torch}. Seconds are those of the whole fault, from the start of `fedspan submit` to the exported model, beside
other work.

{table}
{missing}"""


def call_git(*arguments: str) -> str:
    command = ["git", "-C", str(HERE.parents[1]), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Record:
    """Outcomes from one or several calls, each with its commit.

    Args:
        path: File that they are stored in; None: they are not stored.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.date = path, datetime.date.today().isoformat()
        self.commit = call_git("rev-parse", "--short", "HEAD").strip()
        if call_git("status", "--porcelain", "src", "evidence", "tests"):
            self.commit += " with changes"
        self.outcomes = self._read()

    def _read(self) -> dict[str, Outcome]:
        if self.path is None or not self.path.exists():
            return {}
        stored = json.loads(self.path.read_text(encoding="utf-8"))
        return {name: Outcome(**fields) for name, fields in stored.items()}

    def add(self, name: str, outcome: Outcome) -> None:
        """Add an outcome, and store it with those in the file, which another call may have extended."""
        known = {**self.outcomes, **self._read(), name: replace(outcome, date=self.date, commit=self.commit)}
        self.outcomes = {name: known[name] for name in FAULTS if name in known}
        if self.path is not None:
            stored = {name: asdict(one) for name, one in self.outcomes.items()}
            self.path.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


def run_scenarios(names: Sequence[str], record: Record, path: Path | None) -> dict[str, str]:
    """Inject faults into one deployment, and return the errors of those that had consequences.

    Args:
        names: The faults.
        record: Takes the outcomes.
        path: File of the page, which is written after every fault, because all of them take long; None: none.
    """
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="fedspan-faults-") as folder_name:
        stage = Stage(Path(folder_name))
        with stage.made:
            for site in SITES:
                stage.join(site, stage.node(site))
            for name in names:
                began, stage.work = time.monotonic(), (None, None)
                try:
                    outcome = FAULTS[name][1](stage)
                except AssertionError as error:  # also of who waits for a process in vain
                    failed[name] = str(error)
                    print(f"FAILED {name}: {error}", flush=True)
                    stage.restore()
                    continue
                seconds, (rounds, steps) = time.monotonic() - began, stage.work
                outcome = replace(outcome, seen=redact(outcome.seen, stage.folder), rounds=rounds, steps=steps)
                outcome = replace(outcome, seconds=round(seconds))
                record.add(name, outcome)
                print(f"{seconds:4.0f} s  {name}: {outcome.seen}", flush=True)
                if path is not None:
                    path.write_text(page(record), encoding="utf-8")
    return failed


def main() -> None:
    """Do them, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "faults", nargs="*", help=f"of {', '.join(FAULTS)}; left out: all that the record does not have"
    )
    parser.add_argument("--page", type=Path, help="write the table to this file, after every fault")
    parser.add_argument("--record", type=Path, help="store the outcomes in this file, beside those of earlier calls")
    args = parser.parse_args()
    if unknown := set(args.faults) - set(FAULTS):
        parser.error(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    record = Record(args.record)
    names = args.faults or [name for name in FAULTS if name not in record.outcomes]
    failed = run_scenarios(names, record, args.page) if names else {}
    text = page(record)
    print(text)
    if args.page:
        args.page.write_text(text, encoding="utf-8")
    if failed:
        sys.exit(f"{len(failed)} of {len(record.outcomes) + len(failed)} faults had consequences: {', '.join(failed)}")


def page(record: Record) -> str:
    missing = [name for name in FAULTS if name not in record.outcomes]
    return PAGE.format(
        machine=platform.machine(),
        cores=os.cpu_count(),
        torch=torch.__version__,
        table=format_table(record.outcomes),
        missing="" if not missing else "\nNot run: " + ", ".join(f"`{name}`" for name in missing) + ".\n",
    )


if __name__ == "__main__":
    main()
