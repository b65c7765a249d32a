"""Every fault, done to a real deployment on this machine: a server, three nodes, TLS and keys.

Needs to be root, for network namespaces and small file systems.

    python -m evidence.regression.faults --page docs/results/faults.md
    python -m evidence.regression.faults --page docs/results/faults.md nan server-killed

A tiny BERT. After each fault the run must have every round that was
finished before it, unchanged, and a model that is finite and has the bits of an undisturbed run in which the same
clients replied; where nodes join or leave and in asynchronous rounds, these are the bits of a simulation with the same
clients in each round. With names, the page keeps its rows of other faults.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

import fedspan
from tests.helpers import tiny
from tests.helpers.sites import SITES, local_values, run_values, site_files
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
NEAR, FAR = f"{AREA[:12]}0", f"{AREA[:12]}1"
"""These interfaces: of this machine, and of the namespace."""
PERSONAL = {"name": "fedsa-lora", "r": 2}
"""The method of runs whose B stays on the nodes."""


class Failed(AssertionError):
    """A fault had consequences that it must not have."""


def require(holds: bool, description: str) -> None:
    if not holds:
        raise Failed(description)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a fault: the line that a user sees, and the clients whose replies did not count."""

    seen: str
    left_out: str = "nobody"


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

    def wait(self, holds: Callable[[], bool], what: str) -> None:
        """Wait, while the run goes on, until something holds."""
        end = time.monotonic() + WAIT
        while not holds():
            is_awaited = time.monotonic() < end and self.process.poll() is None
            require(is_awaited, f"no {what}: {self.said()[-3000:]}{self.stage.made.logs()}")
            time.sleep(0.02)

    def until(self, round: int) -> None:
        """Wait until so many rounds are finished."""
        self.wait(lambda: len(self.rows()) >= round, f"round {round}")

    def in_the_middle(self, site: str = WEST) -> list[str]:
        """Wait until a client trains in the second round, and return the metrics of the finished rounds."""
        self.until(1)
        self.stage.made.wait_for_training(site, seconds=WAIT)
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

    def end_without_loss(self) -> str:
        """The same, where no reply of the first node may be lost."""
        output = self.end()
        require(f"{NORTH}:" not in output, f"the order or the reply was lost: {output[-3000:]}")
        return output

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Stage:
    """The deployment with its three nodes, one of which can misbehave; and uninterrupted runs to compare with.

    Args:
        folder: Folder for everything that the stage writes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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

    @contextlib.contextmanager
    def changed(self, site: str, *before: str, **changes: Any) -> Iterator[None]:
        """Restart a node with changes of its file and a command before its own; afterwards, without them."""
        self.leave(site)
        self.join(site, self.node(site, **changes), before)
        try:
            yield
        finally:
            self.leave(site)
            self.join(site, self.node(site))

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
            run = self.submit("personal", PERSONAL)
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
REPLIES = {
    "raises": "RuntimeError",
    "nan": "not finite",  # throughout
    "shapes": "not [",
    "extra": "backdoor",  # a tensor more
    "huge": "times the cohort's norm",  # moved by 1000 in every number
    "stale": "a reply of",  # to the round before
    "too-large": "larger than its order",  # 3 MiB, where 1 MiB is the most (`federation.message_mib: 1`)
    "no-header": "not a fedspan header",  # its header is no JSON
}
"""What a client's reply is in the second round, and words of the line about it."""


def send_reply(stage: Stage, kind: str, words: str) -> Outcome:
    """A client's reply in the second round is one of ``REPLIES``."""
    expected = stage.without_west()
    with stage.spoilt(kind):
        run = stage.submit(kind, min_replies=2, **({"message_mib": 1} if kind == "too-large" else {}))
        before = run.in_the_middle()
        output = run.end()
    stage.finished(run, before).require_same(expected)
    require("patient" not in output, "what a client's error said left its machine")
    return Outcome(line(output, words), "that client, in that round")


FAULTS: dict[str, Scenario] = {kind: partial(send_reply, kind=kind, words=words) for kind, words in REPLIES.items()}
"""The faults by name."""


def register(scenario: Scenario) -> Scenario:
    """Add a fault, which has the name of its function."""
    FAULTS[scenario.__name__.replace("_", "-")] = scenario
    return scenario


@register
def replay(stage: Stage) -> Outcome:
    """The order reaches a client twice, and it answers the second."""
    expected = stage.clean()
    with stage.spoilt("replay"):
        run = stage.submit("replay")
        before = run.in_the_middle()
        run.end()
    stage.finished(run, before).require_same(expected)
    return Outcome(line(stage.made.log(WEST), "its reply is sent again"))


@register
def node_killed(stage: Stage) -> Outcome:
    """A node is killed (-9) in the middle of the second round and started again; FedSA-LoRA."""
    return kill_node(stage, "round 2: train done")


@register
def checkpointed(stage: Stage) -> Outcome:
    """The same with `training.checkpoint_steps: 5` and `federation.min_replies: 1`: it continues within the round."""
    return kill_node(stage, "training continues after step", training={"checkpoint_steps": 5}, min_replies=1)


def kill_node(stage: Stage, words: str, **fields: Any) -> Outcome:
    """Kill a node in the second round and start it again; the models of all clients are those of a clean run."""
    expected = stage.clean_personal()
    run = stage.submit("node-killed", PERSONAL, **fields)
    before = run.in_the_middle(NORTH)
    stage.made.end(NORTH)
    stage.join(NORTH)
    run.end_without_loss()
    require(run.rows()[: len(before)] == before, "a finished round was lost")
    stage.own_models(run.began).require_same(expected)
    return Outcome(line(stage.made.log(NORTH), words))


@register
def worker_killed(stage: Stage) -> Outcome:
    """The process in which a node trains is killed (-9), as when memory runs out."""
    expected = stage.clean()
    run = stage.submit("worker-killed")
    before = run.in_the_middle(SOUTH)
    os.kill(find_child(stage.made.processes[SOUTH].pid), signal.SIGKILL)
    output = run.end()
    stage.finished(run, before).require_same(expected)
    return Outcome(line(output, f"{SOUTH}:"))


@register
def training_hangs(stage: Stage) -> Outcome:
    """Training hangs (SIGSTOP) for longer than the node's limit (`limits.round_seconds: 15`)."""
    expected = stage.clean()
    with stage.changed(SOUTH, limits={"round_seconds": 15.0}):
        run = stage.submit("training-hangs")
        before = run.in_the_middle(SOUTH)
        os.kill(find_child(stage.made.processes[SOUTH].pid), signal.SIGSTOP)
        output = run.end()
    stage.finished(run, before).require_same(expected)
    return Outcome(line(output, "limits.round_seconds"))


@contextlib.contextmanager
def stopped(stage: Stage, site: str) -> Iterator[None]:
    """Stop all processes of a node (SIGSTOP) for a while."""
    pid = stage.made.processes[site].pid
    os.killpg(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(pid, signal.SIGCONT)


@register
def node_hangs(stage: Stage) -> Outcome:
    """A whole node hangs (SIGSTOP) past `federation.deadline: 15`."""
    expected = stage.without_west(LONG)
    run = stage.submit("node-hangs", min_replies=2, deadline=15.0, steps=LONG)
    before = run.in_the_middle()
    with stopped(stage, WEST):
        run.until(2)
    output = run.end()
    stage.finished(run, before).require_same(expected)
    return Outcome(line(output, "no reply within"), "that client, in that round")


@register
def server_killed(stage: Stage) -> Outcome:
    """`fedspan submit` is killed (-9) in the middle of the second round, and resumed."""
    expected = stage.clean()
    run = stage.submit("server-killed")
    before = run.in_the_middle()
    run.kill()
    again = stage.resume(run)
    output = again.end()
    stage.finished(again, before).require_same(expected)
    return Outcome(line(output, "resumed after round"))


@register
def serving_killed(stage: Stage) -> Outcome:
    """The server's serving process is killed (-9) in the middle of the second round; `fedspan server` restarts it."""
    expected = stage.clean()
    run = stage.submit("serving-killed")
    before = run.in_the_middle()
    os.kill(find_child(stage.made.processes["server"].pid), signal.SIGKILL)
    run.end()
    stage.finished(run, before).require_same(expected)
    stage.made.wait_for("server", "it runs again")
    return Outcome(line(stage.made.log("server"), "it runs again"))


@register
def server_down(stage: Stage) -> Outcome:
    """The whole server is down for 100 s, longer than an order waits for a node that is offline."""
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
    return Outcome(match)


@register
def network_cut(stage: Stage) -> Outcome:
    """The network between a node and the server is cut for 80 s in the second round: the node counts as offline.

    The node is in a network namespace, whose veth is set down.
    """
    expected = stage.clean()
    command = ("ip", "netns", "exec", AREA)
    with open_network(), stage.changed(NORTH, *command, server=f"{OUTSIDE}:{stage.made.port}"):
        run = stage.submit("network-cut")
        before = run.in_the_middle(NORTH)
        run_ip("link", "set", NEAR, "down")
        time.sleep(80)
        run_ip("link", "set", NEAR, "up")
        run.end_without_loss()
    stage.finished(run, before).require_same(expected)
    return Outcome("nothing: the reply came when the network was back")


@register
def link_flaps(stage: Stage) -> Outcome:
    """The link of a node has 1 Mbit/s and is cut every 5 s during the whole run (a proxy; every cut is a reset)."""
    expected = stage.clean()
    with (
        SlowLink(stage.made.port, 1e6 / 8, 5.0, is_cut=False) as slow,
        stage.changed(NORTH, server=f"127.0.0.1:{slow.port}"),
    ):
        slow.cutting.set()
        run = stage.submit("link-flaps")
        run.end()
        output = stage.made.log(NORTH)
        require(slow.cuts > 3, "the link was hardly cut")
    stage.finished(run, []).require_same(expected)
    is_seen = "no connection to" in output
    return Outcome(line(output, "no connection to") if is_seen else "nothing: the replies came in time")


def run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def open_network() -> Iterator[None]:
    """A namespace with an interface of its own to this machine."""
    run_ip("netns", "add", AREA)
    try:
        run_ip("link", "add", NEAR, "type", "veth", "peer", "name", FAR)
        run_ip("link", "set", FAR, "netns", AREA)
        run_ip("addr", "add", f"{OUTSIDE}/30", "dev", NEAR)
        run_ip("link", "set", NEAR, "up")
        for arguments in (
            ("addr", "add", f"{INSIDE}/30", "dev", FAR),
            ("link", "set", FAR, "up"),
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


@register
def server_disk_full(stage: Stage) -> Outcome:
    """The disk of the run's folder is full after the first round; freed, and resumed."""
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
    return Outcome(line(output, "the disk is full"))


@register
def client_disk_full(stage: Stage) -> Outcome:
    """The disk of a node's folder is full in the second round; the run stops; freed, and resumed."""
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
    return Outcome(line(output, "error:"))


@register
def same_key(stage: Stage) -> Outcome:
    """A second node joins with the key of another."""
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
    return Outcome(line(stage.made.log("double"), "refused the connection"))


@register
def same_id(stage: Stage) -> Outcome:
    """A node that was admitted under another name uses the name of one that is connected."""
    expected = stage.clean()
    path = stage.node("twin", NORTH)
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "id": NORTH}))
    stage.leave(NORTH)  # so that this node is selected, whichever connected first
    stage.join("twin", path)
    try:
        run = stage.submit("same-id")
        run.wait(lambda: "was admitted as" in run.said(), "refusal of the twin")
        stage.join(NORTH)
        before = run.in_the_middle()
        output = run.end()
    finally:
        stage.leave("twin")
    stage.finished(run, before).require_same(expected)
    return Outcome(line(output, "was admitted as"), "that node")


@register
def wrong_authority(stage: Stage) -> Outcome:
    """A node trusts another authority than the server's."""
    from fedspan.transports.http.keys import make_authority

    make_authority(stage.folder / "other", [])
    path = stage.node("misled", NORTH, authority=str(stage.folder / "other" / "ca.crt"))
    stage.join("misled", path, until="no connection")
    stage.leave("misled")
    return Outcome(line(stage.made.log("misled"), "no connection"), "that node")


@register
def version(stage: Stage) -> Outcome:
    """A node runs another version of fedspan: the run waits for it in vain, and continues with the right one."""
    expected, words = stage.clean(), "`version`: "
    stage.leave(WEST)
    os.environ["SPOILT_VERSION"] = "0.0.9"
    try:
        stage.join(WEST)
    finally:
        del os.environ["SPOILT_VERSION"]
    try:
        run = stage.submit("version")
        run.wait(lambda: words in run.said(), "refusal")
    finally:
        stage.leave(WEST)
        stage.join(WEST, stage.node(WEST))
    run.kill()
    output = run.said()
    run = stage.resume(run)
    run.end()
    stage.finished(run, []).require_same(expected)
    return Outcome(line(output, words), "that node")


@register
def labels(stage: Stage) -> Outcome:
    """A node's data hold a label that the run does not have; the model does not depend on what its example holds."""
    models, seen = [], ""
    for name, example in (("label-a", "word1 word2,surgery,west"), ("label-b", "word7 word5 word3,pharmacy,west")):
        path = stage.files[name] = stage.folder / f"{name}.csv"
        path.write_text(f"{stage.files[WEST].read_text()}{example}\n")
        with stage.changed(WEST, like=name):
            run = stage.submit(name)
            run.end()
            seen = line(stage.made.log(WEST), "are left out")
        models.append(stage.finished(run, []))
    models[0].require_same(models[1])
    return Outcome(seen)


LOOP = {"name": "loop"}
"""Engine of the runs that a simulation repeats. The bits of the batched engine depend on how many clients share a pass,
and a node has one client."""


@register
def buffered(stage: Stage) -> Outcome:
    """Asynchronous rounds (`federation.buffered`): a node hangs (SIGSTOP) for two rounds, another is killed (-9)."""
    rounds, fields = 8, {"concurrency": 3}
    run = stage.submit("buffered", rounds=rounds, clients_per_round=2, min_replies=2, buffered=fields, engine=LOOP)
    before = len(run.in_the_middle())
    with stopped(stage, WEST):
        run.until(before + 2)
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
    replayed = {"buffered": {**fields, "replay": str(run.out)}}
    model.require_same(stage.simulate(run, stage.files["all"], replayed))
    seen = f"nothing: {WEST}'s reply counts, and its state is {oldest} rounds old"
    return Outcome(seen, "the killed node, from then on")


BASE, BASE_MIB = "offered", 4
"""Folder and size of a base model that one node does not have."""


@register
def base_transfer(stage: Stage) -> Outcome:
    """A node is killed (-9) while it receives the base model (`limits.accept_base: true`), and started again."""
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
        run.wait(lambda: count_bytes(received, weights.name) >= BASE_MIB << 19, "base model")
        stage.made.end(NORTH)
        arrived = count_bytes(received, weights.name)
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
    return Outcome(line(output, "receives the base model"))


def count_bytes(folder: Path, name: str) -> int:
    """Return the size of the largest file of a name in the folders of a folder; 0: there is none."""
    return max((path.stat().st_size for path in folder.glob(f"*/{name}")), default=0)


LARGE, LARGE_RANK = "large", 512
"""Folder of a model whose adapter has 20 MB, and the adapter's rank."""


@register
def large_messages(stage: Stage) -> Outcome:
    """An order and a reply of 20 MB over a link of 1 Mbit/s that is cut every 4 s (a proxy; every cut is a reset)."""
    with open_large_scene(stage, 1e6 / 8, 4.0) as scene:
        run = scene.submit()
        run.end_without_loss()
    link, size = scene.link, scene.message_bytes
    messages = link.received / size  # the model for training, and after the round for its evaluation
    require(link.cuts > 50, f"the link was cut {link.cuts} times")
    require(link.up < 1.1 * size, f"{link.up} bytes for a reply of {size}")
    require(messages < 1.1 * round(messages), f"{link.received} bytes for orders of {size}")
    stage.finished(run, [], 1).require_same(scene.expected)
    return Outcome(
        f"nothing: the link was cut {link.cuts} times; {link.up / size:.2f} times the reply's bytes passed it"
    )


@register
def interrupted_reply(stage: Stage) -> Outcome:
    """A node is killed (-9) when it has sent half of a reply of 2.6 MB (1 Mbit/s), and started again."""
    return interrupt_reply(stage, 1e6 / 8, 64)


@register
def interrupted_pieces(stage: Stage) -> Outcome:
    """The fault `interrupted-reply` with a reply of 7.9 MB (4 Mbit/s), which is announced and sent in pieces."""
    return interrupt_reply(stage, 4e6 / 8, 192)


@register
def server_stopped(stage: Stage) -> Outcome:
    """`fedspan server` is stopped (SIGTERM) after half of a reply of 2.6 MB (1 Mbit/s), and started again."""
    with open_large_scene(stage, 1e6 / 8, rank=64) as scene:
        run = scene.submit()
        scene.wait_for_half(run)
        stage.made.processes["server"].send_signal(signal.SIGTERM)
        require(stage.made.processes["server"].wait(60) == 0, "the server did not end")
        (stage.made.folder / "server.log").unlink()
        stage.made.start_server()
        run.end_without_loss()
        seen = line(stage.made.log(NORTH), "next attempt in")
    stage.finished(run, [], 1).require_same(scene.expected)
    return Outcome(seen)


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
        run.end_without_loss()
        seen = line(stage.made.log(NORTH), "its reply is sent again")
    stage.finished(run, [], 1).require_same(scene.expected)
    return Outcome(seen)


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
        run.wait(lambda: self.link.up >= self.message_bytes / 2, "reply")


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


@register
def joins_and_leaves(stage: Stage) -> Outcome:
    """A fourth node is admitted after the first round; another one is stopped (SIGTERM) once it participates."""
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
    run.wait(lambda: any("joined" in json.loads(row) for row in run.rows()), "client that joined")
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
    return Outcome(line(output, f"{LATE} has joined"), f"that node, from round {left} on")


PAGE = """# Faults

This page lists faults that were injected into a deployment, and whose replies each of them cost.

A server and three nodes, with TLS and keys, train a tiny BERT on one machine. After each fault, every finished round is
there, unchanged, and the model has the bits of an undisturbed run in which the same clients replied, or of a simulation
with the same clients. If not, the fault has no row, and the command ends with an error that names it. The script
describes each fault beside its name.

Command: `python -m evidence.regression.faults --page docs/results/faults.md`. Machine: {machine}, {cores} cores,
torch {torch}. Seconds are those of the whole fault, from the start of `fedspan submit` to the exported model, beside
other work.

| fault | whose reply did not count | s | date | commit |
|---|---|---|---|---|
{rows}
{missing}"""


def call_git(*arguments: str) -> str:
    command = ["git", "-C", str(HERE.parents[1]), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def read_page(path: Path | None) -> dict[str, str]:
    """The rows of a page by fault."""
    text = path.read_text(encoding="utf-8") if path is not None and path.exists() else ""
    return {match[1]: match[0] for match in re.finditer(r"(?m)^\| `([a-z-]+)` \|.*$", text)}


def format_page(rows: Mapping[str, str]) -> str:
    """The page of the faults' rows."""
    missing = ", ".join(f"`{name}`" for name in FAULTS if name not in rows)
    return PAGE.format(
        machine=platform.machine(),
        cores=os.cpu_count(),
        torch=torch.__version__,
        rows="\n".join(rows[name] for name in FAULTS if name in rows),
        missing=f"\nNot run: {missing}.\n" if missing else "",
    )


def run_scenarios(names: Sequence[str], rows: dict[str, str], path: Path | None) -> list[str]:
    """Inject faults into one deployment, and return the names of those that failed their check.

    Args:
        names: The faults.
        rows: The page's rows, which theirs are added to.
        path: File of the page, which is written after every fault, because all of them take long; None: none.
    """
    failed: list[str] = []
    date, commit = datetime.date.today().isoformat(), call_git("rev-parse", "--short", "HEAD")
    if call_git("status", "--porcelain", "src", "evidence", "tests"):
        commit += " with changes"
    with tempfile.TemporaryDirectory(prefix="fedspan-faults-") as folder_name:
        stage = Stage(Path(folder_name))
        with stage.made:
            for site in SITES:
                stage.join(site, stage.node(site))
            for name in names:
                began = time.monotonic()
                try:
                    outcome = FAULTS[name](stage)
                except AssertionError as error:  # also of who waits for a process in vain
                    failed.append(name)
                    rows.pop(name, None)
                    print(f"FAILED {name}: {error}", flush=True)
                    stage.restore()
                else:
                    seconds = f"{time.monotonic() - began:.0f}"
                    rows[name] = f"| {' | '.join((f'`{name}`', outcome.left_out, seconds, date, commit))} |"
                    print(f"{seconds} s  {name}: {outcome.seen}", flush=True)
                if path is not None:
                    path.write_text(format_page(rows), encoding="utf-8")
    return failed


def main() -> None:
    """Do them, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="fault", help=f"of {', '.join(FAULTS)}; left out: all")
    parser.add_argument("--page", type=Path, help="write the table to this file, after every fault")
    args = parser.parse_args()
    if unknown := set(args.faults) - set(FAULTS):
        parser.error(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    rows = read_page(args.page) if args.faults else {}
    names = args.faults or list(FAULTS)
    failed = run_scenarios(names, rows, args.page)
    print(format_page(rows))
    if failed:
        sys.exit(f"{len(failed)} of {len(names)} faults had consequences: {', '.join(failed)}")


if __name__ == "__main__":
    main()
