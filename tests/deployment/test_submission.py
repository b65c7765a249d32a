"""A submitted run, its nodes between its rounds, and its status: the server passes messages within one process."""

import json
import os
import socket
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedspan
from fedspan.core.values import Client
from fedspan.deployment import participants as module
from fedspan.deployment.deploy import submit
from fedspan.deployment.handshake import build_server_config
from fedspan.deployment.node import NodeService
from fedspan.deployment.participants import NodeCallbacks, Participant, Participants, load_record
from fedspan.deployment.status import load_named_run, read_status, store_named_run
from fedspan.errors import FedspanError
from fedspan.federation.config import RoundSettings
from fedspan.federation.progress import ClientData
from fedspan.federation.protocol import Envelope
from fedspan.logs import JsonLines
from fedspan.processes import read_process_start
from fedspan.run_folder import RunFolder
from fedspan.transports.http import admissions, signing
from fedspan.transports.http import server as servers
from helpers import node_service
from helpers.node_service import values
from helpers.refusals import refused
from helpers.sites import SITES, local_values, run_values, site_files

NORTH, SOUTH, WEST = SITES
EAST = "east"
NODES = {NORTH: 1, SOUTH: 2, WEST: 3, EAST: 4}


class Changed:
    """A node whose introductions differ from the service's, by the number of its invitations."""

    def __init__(self, service: NodeService, change: Callable[[int], dict[str, Any]]) -> None:
        self.service, self.change, self.invited = service, change, 0

    def answer(self, envelope: Envelope) -> Envelope:
        answer = self.service.answer(envelope)
        if json.loads(envelope.header)["task"] != "invite":
            return answer
        self.invited += 1
        return Envelope(json.dumps({**json.loads(answer.header), **self.change(self.invited)}), answer.body)


class LocalServer:
    """A server whose nodes are in this process, and reply when they are asked for their replies."""

    limit = 2**30

    def __init__(self, services: dict[int, Any], online: set[int]) -> None:
        self.services, self.online = services, online
        self.orders: dict[str, servers.OutgoingOrder] = {}
        self.bodies: dict[str, bytes] = {"": b""}

    def list_online(self) -> dict[int, bytes]:
        return dict.fromkeys(sorted(self.online), b"")

    def store_body(self, data: bytes) -> str:
        name = f"b{len(self.bodies)}"
        self.bodies[name] = data
        return name

    def send_orders(self, orders: Sequence[servers.OutgoingOrder]) -> list[str]:
        ids = [f"m{len(self.orders) + number}" for number in range(len(orders))]
        self.orders |= dict(zip(ids, orders, strict=True))
        return ids

    def take_replies(self, ids: Collection[str], seconds: float = 1.0) -> Iterable[servers.Taken]:
        signer = signing.UnsignedSigner()
        for id in ids:
            order = self.orders[id]
            opened = signer.open_order(order.head + self.bodies[order.body], order.node)
            reply = self.services[order.node].answer(opened.envelope)
            yield servers.Taken(id, partial(signer.seal_reply, reply, order.node, opened))

    def cancel(self, ids: Collection[str]) -> None:
        pass


class Scene:
    """A server's folder, four nodes, and a config."""

    def __init__(self, tiny_folder: Path, folder: Path) -> None:
        self.files = site_files(tiny_folder / "corpus.csv", folder, (*SITES, EAST))
        services: dict[int, Any] = {
            number: NodeService(
                node_service.node(
                    tiny_folder, folder / f"{site}-state", id=site, data={"train": str(self.files[site])},
                    validation=0.0, test=0.0, device="cpu",
                )
            )
            for site, number in NODES.items()
        }  # fmt: skip
        self.server = LocalServer(services, {1, 2, 3})
        self.link = servers.prepare_folder(folder / "server", 9092, [], insecure=True)
        self.values = run_values(tiny_folder, {"name": "fedit", "r": 2}, federation={"rounds": 5})
        self.values["training"]["local_steps"] = 1
        self.values["engine"] = {"name": "loop"}  # in the batched one, the bits depend on how many clients share a pass

    def simulate(self, out: Path, present: dict[str, Any]) -> None:
        """Run the same on one machine."""
        simulated = local_values(self.values, self.files["all"], self.values["engine"])
        simulated["federation"] = {"rounds": 5}
        fedspan.run({**simulated, "simulation": {"present": present}}, out)


@pytest.fixture
def scene(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene(tiny_folder, tmp_path)

    @contextmanager
    def attach(_: Any, limit: int) -> Generator[LocalServer]:
        yield made.server

    monkeypatch.setattr(servers, "attach", attach)
    monkeypatch.setattr("fedspan.deployment.participants._POLL", 0.05)
    return made


def read_rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def require_same(one: Path, other: Path) -> None:
    mine, theirs = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (one, other))
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


class Events(fedspan.Listener):
    """Changes who is online after rounds, and interrupts the run after one."""

    def __init__(self, server: LocalServer, online: dict[int, set[int]], end: int | None = None) -> None:
        self.server, self.online, self.end = server, online, end
        self.notes = list[str]()

    def on_note(self, text: str) -> None:
        self.notes.append(text)

    def on_round_finish(self, row: Any) -> None:
        self.server.online = self.online.get(row["round"], self.server.online)
        if row["round"] == self.end:
            raise KeyboardInterrupt


def test_a_run_with_fixed_nodes_is_the_simulation(scene: Scene, tmp_path: Path) -> None:
    submit(scene.values, tmp_path / "run", scene.link, wait=30.0)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert not (tmp_path / "run" / "participants.json").exists()
    assert all(row["cohort"] == list(SITES) for row in read_rows(tmp_path / "run"))
    (tmp_path / "all").mkdir()
    scene.files = site_files(scene.files["all"], tmp_path / "all", SITES)
    scene.simulate(tmp_path / "simulated", {})
    require_same(tmp_path / "run", tmp_path / "simulated")


def test_nodes_join_leave_and_come_back_and_a_killed_run_resumes_to_the_bit(scene: Scene, tmp_path: Path) -> None:
    scene.values["federation"]["late_joiners"] = True
    events = {1: {1, 2, 3, 4}, 2: {1, 3, 4}, 3: {1, 2, 3, 4}, 4: {1, 2, 4}}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    submit(scene.values, whole, scene.link, wait=30.0, listener=Events(scene.server, events))
    scene.server.online = {1, 2, 3}
    with pytest.raises(KeyboardInterrupt):
        submit(scene.values, killed, scene.link, wait=30.0, listener=Events(scene.server, events, 3))
    submit(None, killed, scene.link, resume=True, wait=30.0, listener=Events(scene.server, events))
    everybody = sorted(NODES)
    for run in (whole, killed):
        rows = read_rows(run)
        assert [row["cohort"] for row in rows] == [
            sorted(SITES), everybody, [EAST, NORTH, WEST], everybody, [EAST, NORTH, SOUTH]
        ]  # fmt: skip
        assert [row.get("joined") for row in rows] == [None, [EAST], None, [SOUTH], None]
        assert [row.get("left") for row in rows] == [None, None, [SOUTH], None, [WEST]]
        assert not any("failures" in row for row in rows)
    weights = [(run / "adapter" / "adapter_model.safetensors").read_bytes() for run in (whole, killed)]
    assert weights[0] == weights[1]
    named = json.loads((scene.link.folder / "run.json").read_text())["nodes"]
    assert named == {site: str(number) for site, number in NODES.items()}


@pytest.mark.slow
def test_a_run_in_which_nodes_join_and_leave_is_the_simulation(scene: Scene, tmp_path: Path) -> None:
    scene.values["federation"]["late_joiners"] = True
    listener = Events(scene.server, {2: {1, 2, 3, 4}, 3: {1, 3, 4}})
    submit(scene.values, tmp_path / "run", scene.link, wait=30.0, listener=listener)
    assert len(read_rows(tmp_path / "run")[2]["cohort"]) == 4
    scene.simulate(tmp_path / "simulated", {EAST: [3, None], SOUTH: [1, 3]})
    require_same(tmp_path / "run", tmp_path / "simulated")


def list_cohorts(run: Path) -> list[list[str]]:
    return [row["cohort"] for row in read_rows(run)]


def list_audited(scene: Scene, event: str) -> list[dict[str, Any]]:
    rows = map(json.loads, (scene.link.folder / "audit.jsonl").read_text().splitlines())
    return [row for row in rows if row["event"] == event]


def submit_and_kill(scene: Scene, run: Path, online: dict[int, set[int]]) -> None:
    scene.values["federation"] |= {"rounds": 4, "late_joiners": True, "reconnect_timeout": 0.2}
    with pytest.raises(KeyboardInterrupt):
        submit(scene.values, run, scene.link, wait=30.0, listener=Events(scene.server, online, 2))


def test_a_resumed_run_does_not_use_a_node_that_it_refused(scene: Scene, tmp_path: Path) -> None:
    run = tmp_path / "run"
    submit_and_kill(scene, run, {})
    scene.server.services[3] = Changed(scene.server.services[3], lambda _: {"base": "f" * 64})
    listener = Events(scene.server, {})
    submit(None, run, scene.link, resume=True, wait=2.0, listener=listener)
    assert list_cohorts(run) == [sorted(SITES)] * 2 + [[NORTH, SOUTH]] * 2
    assert any(f"{WEST} does not participate: its base model" in note for note in listener.notes)


def test_a_node_that_waits_under_ever_other_ids_has_one_entry(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reasons are texts of its own, and all of them would be in the error at the end."""
    monkeypatch.setattr("fedspan.transports.http.invitations._REINVITE_SECONDS", 0.2)
    scene.server.services[3] = Changed(
        scene.server.services[3], lambda number: {"refused": "not yet", "waiting": True, "id": f"other-{number}"}
    )
    with refused("nodes", "not yet") as raised:
        submit(scene.values, tmp_path / "run", scene.link, wait=3.0, listener=Events(scene.server, {}))
    assert scene.server.services[3].invited > 2
    assert str(raised.value).count("not yet") == 1


def test_a_node_that_refused_is_invited_again_when_it_comes_back(scene: Scene, tmp_path: Path) -> None:
    scene.server.services[4] = Changed(
        scene.server.services[4], lambda number: {"refused": "out of memory"} if number == 1 else {}
    )
    scene.values["federation"]["late_joiners"] = True
    listener = Events(scene.server, {1: {1, 2, 3, 4}, 3: {1, 2, 3}, 4: {1, 2, 3, 4}})
    scene.values["federation"]["rounds"] = 5
    submit(scene.values, tmp_path / "run", scene.link, wait=30.0, listener=listener)
    assert [EAST in cohort for cohort in list_cohorts(tmp_path / "run")] == [False] * 4 + [True]
    assert scene.server.services[4].invited == 2
    assert f"{EAST} does not participate: out of memory" in listener.notes


def test_a_node_without_a_key_comes_back_under_another_flower_id(scene: Scene, tmp_path: Path) -> None:
    scene.server.services[5] = scene.server.services[2]
    scene.values["federation"]["late_joiners"] = True
    listener = Events(scene.server, {1: {1, 3}, 2: {1, 3, 5}})
    submit(scene.values, tmp_path / "run", scene.link, wait=30.0, listener=listener)
    assert list_cohorts(tmp_path / "run") == [sorted(SITES), [NORTH, WEST], *[sorted(SITES)] * 3]
    assert f"{SOUTH} has come back as node 5; it was node 2" in listener.notes
    assert [(row["client"], row["node"], row["replaced"]) for row in list_audited(scene, "replaced")] == [
        (SOUTH, "5", "2")
    ]


@pytest.mark.parametrize("online", [{1, 3, 5}, pytest.param({1, 2, 3, 5}, marks=pytest.mark.slow)])
def test_a_recorded_id_is_taken_over_from_a_gone_node_only(online: set[int], scene: Scene, tmp_path: Path) -> None:
    """Node 2 is online in one of the cases, and has not introduced itself to the resumed run when node 5 does."""
    run = tmp_path / "run"
    submit_and_kill(scene, run, {})
    scene.server.services[5] = scene.server.services[2]
    if 2 in online:
        scene.server.services[2] = Changed(scene.server.services[2], lambda _: {"refused": "busy"})
    scene.server.online = online
    listener = Events(scene.server, {})
    submit(None, run, scene.link, resume=True, wait=2.0, listener=listener)
    taken = 2 not in online
    assert [SOUTH in cohort for cohort in list_cohorts(run)] == [True, True, taken, taken]
    assert len(list_audited(scene, "replaced")) == taken


def test_a_new_key_takes_over_its_own_name_only(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {5: SOUTH, 6: ""}
    monkeypatch.setattr(
        admissions,
        "read_admissions",
        lambda link: {id: admissions.Admission(name, "key") for id, name in names.items()},
    )
    scene.server.services |= {
        5: scene.server.services[2],
        6: Changed(scene.server.services[2], lambda _: {"id": NORTH}),
    }
    scene.values["federation"]["late_joiners"] = True
    listener = Events(scene.server, {1: {3, 5, 6}})
    submit(scene.values, tmp_path / "run", scene.link, wait=30.0, listener=listener)
    assert list_cohorts(tmp_path / "run") == [sorted(SITES), *[[SOUTH, WEST]] * 4]
    assert f"{NORTH} does not participate: another node has this id" in listener.notes


def test_a_node_that_comes_back_under_another_id_is_no_further_client(scene: Scene, tmp_path: Path) -> None:
    scene.server.services[4] = Changed(
        scene.server.services[4], lambda number: {"id": EAST if number == 1 else f"{EAST}-{number}"}
    )
    scene.values["federation"] |= {"late_joiners": True, "rounds": 6}
    listener = Events(scene.server, {1: {1, 2, 3, 4}, 2: {1, 2, 3}, 3: {1, 2, 3, 4}, 4: {1, 2, 3}, 5: {1, 2, 3, 4}})
    submit(scene.values, tmp_path / "run", scene.link, wait=30.0, listener=listener)
    assert scene.server.services[4].invited == 3
    everybody, others = sorted(NODES), sorted(SITES)
    assert list_cohorts(tmp_path / "run") == [others, everybody, *[others] * 4]
    assert f"{EAST}-3 does not participate: this node has joined this run as {EAST}. Set id: {EAST} in its file" in (
        listener.notes
    )


def test_the_quorum_of_a_round_is_that_of_all_clients_at_least() -> None:
    rules = RoundSettings(least=3)
    assert [rules.compute_quorum(cohort) for cohort in (2, 3, 4, 5, 6)] == [2, 3, 3, 3, 4]


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
    with refused("nodes", r"`nodes`: 1 nodes are online before round 1: b\. Expected at least 2"):
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
    with refused("federation.late_joiners"):
        config.require_simulated()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("federation: {rounds: 7}\n")
    return folder


def rows(run: Path, *made: dict[str, object]) -> None:
    with JsonLines(run / "metrics.jsonl") as lines:
        for row in made:
            lines.append(row)
        lines.commit()


def test_a_run_that_has_started(run: Path) -> None:
    found = read_status(run)
    assert (found.state, found.round, found.rounds, found.finished) == ("stopped", 0, 7, None)


def test_a_run_at_work_and_what_failed_in_it(run: Path) -> None:
    failure = {"client": "a", "attempt": 0, "reason": "no reply within 5 s"}
    rows(run, {"round": 1, "failures": [failure]}, {"round": 2, "failures": [failure, {"client": "b"}], "late": ["c"]})
    (run / "run.lock").write_text(f"{os.getpid()}\n{socket.gethostname()}\n")
    (run / "checkpoints" / "round-00002").mkdir(parents=True)
    os.utime(run / "checkpoints" / "round-00002", (1000, 1000))
    found = read_status(run)
    assert (found.state, found.round, found.finished) == ("at work", 2, 1000)
    assert found.failures == {"a": {"count": 2, "round": 2, "reason": "no reply within 5 s"}}
    assert found.late == {"c": 1}


def test_a_run_whose_process_is_gone(run: Path) -> None:
    (run / "run.lock").write_text(f"999999999\n{socket.gethostname()}\n")
    assert read_status(run).state == "stopped"
    (run / "run.lock").write_text(f"{os.getpid()}\n{socket.gethostname()}\n1\n")  # its id belongs to another one now
    assert read_status(run).state == ("at work" if read_process_start(os.getpid()) is None else "stopped")
    with RunFolder.resume(run):
        assert read_status(run).state == "at work"
    (run / "run.lock").write_text("1\nanother-machine\n")
    assert read_status(run).state == "at work"
    (run / "report.json").write_text("{}")
    assert read_status(run).state == "finished"


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with refused("run folder", "holds no run"):
        read_status(tmp_path)


def test_a_server_knows_its_newest_run(tmp_path: Path) -> None:
    assert load_named_run(tmp_path) is None
    store_named_run(tmp_path, tmp_path / "first", {"a": 1})
    store_named_run(tmp_path, tmp_path / "second", {"a": 2**63})
    found = load_named_run(tmp_path)
    assert (found.folder, found.nodes) == (tmp_path / "second", {"a": str(2**63)})
    for content in ("", "[]", '{"run": 3}', "[" * 10_000):
        (tmp_path / "run.json").write_text(content)
        assert load_named_run(tmp_path) is None
