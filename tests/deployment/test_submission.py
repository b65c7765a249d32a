"""A submitted run and its nodes in one process: Flower's grid is replaced by one that passes messages to the nodes."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedspan
from fedspan.deployment.deploy import submit
from fedspan.deployment.node import NodeService
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from fedspan.federation.validation import ReplyRules
from helpers import node_service
from helpers.sites import SITES, local_values, run_values, site_files

transport = pytest.importorskip(
    "fedspan.transports.flower.transport", reason="the extra fedspan[flower] is not installed"
)
adapter = pytest.importorskip("fedspan.transports.flower.adapter")
grid = pytest.importorskip("fedspan.transports.flower.grid")
messages = pytest.importorskip("fedspan.transports.flower.messages")
servers = pytest.importorskip("fedspan.transports.flower.server")
signing = pytest.importorskip("fedspan.transports.flower.signing")

NORTH, SOUTH, WEST = SITES
EAST = "east"
NODES = {NORTH: 1, SOUTH: 2, WEST: 3, EAST: 4}


class Reply:
    """As much of a Flower message as is inspected."""

    def __init__(self, order: str, content: Any) -> None:
        self.metadata, self.content = self, content
        self.reply_to_message_id = order

    def has_error(self) -> bool:
        return False


class Changed:
    """A node whose introductions differ from the service's, at its first invitations or at all of them."""

    def __init__(self, service: NodeService, fields: dict[str, Any], times: int | None = None) -> None:
        self.service, self.fields, self.times, self.invited = service, fields, times, 0

    def answer(self, envelope: Envelope) -> Envelope:
        answer = self.service.answer(envelope)
        if json.loads(envelope.header)["task"] != "invite":
            return answer
        self.invited += 1
        if self.times is not None and self.invited > self.times:
            return answer
        return Envelope(json.dumps({**json.loads(answer.header), **self.fields}), answer.body)


class NodesGrid:
    """A grid whose nodes are in this process, and reply when they are asked for their replies.

    Args:
        services: The nodes' services by Flower's id of the node.
        online: Those that are online.
    """

    def __init__(self, services: dict[int, Any], online: set[int]) -> None:
        self.services, self.online = services, online
        self.orders: dict[str, Any] = {}
        self.count = 0

    def get_node_ids(self) -> Iterable[int]:
        return sorted(self.online)

    def push_messages(self, sent: Iterable[Any]) -> list[str]:
        ids = list[str]()
        for message in sent:
            self.count += 1
            ids.append(f"m{self.count}")
            self.orders[ids[-1]] = message
        return ids

    def pull_messages(self, ids: Iterable[str]) -> list[Any]:
        replies, signer = list[Any](), signing.UnsignedSigner()
        for id in ids:
            message = self.orders.pop(id)
            node = message.metadata.dst_node_id
            sealed = messages.from_records(message.content)
            answer = signer.seal(self.services[node].answer(signer.open(sealed, node)), node, sealed.nonce)
            replies.append(Reply(id, messages.to_records(answer, messages.draw_salt())))
        return replies


class Scene:
    """A server's folder, four nodes, and a config.

    Args:
        tiny_folder: Folder of the tiny model and its corpus.
        folder: Folder for everything that is written.
    """

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
        self.grid = NodesGrid(services, {1, 2, 3})
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
    def attach(link: Any, limit: int) -> Generator[NodesGrid]:
        yield made.grid

    monkeypatch.setattr(grid, "attach", attach)
    monkeypatch.setattr("fedspan.deployment.participants._POLL", 0.05)
    adapter.set_identity(1, 1, 1)
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

    def __init__(self, grid: NodesGrid, online: dict[int, set[int]], end: int | None = None) -> None:
        self.grid, self.online, self.end = grid, online, end
        self.notes = list[str]()

    def on_note(self, text: str) -> None:
        self.notes.append(text)

    def on_round_finish(self, row: Any) -> None:
        self.grid.online = self.online.get(row["round"], self.grid.online)
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


def test_nodes_join_leave_and_come_back_and_a_killed_run_resumes_with_the_same_bits(
    scene: Scene, tmp_path: Path
) -> None:
    scene.values["federation"]["late_joiners"] = True
    events = {1: {1, 2, 3, 4}, 2: {1, 3, 4}, 3: {1, 2, 3, 4}, 4: {1, 2, 4}}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    submit(scene.values, whole, scene.link, wait=30.0, listener=Events(scene.grid, events))
    scene.grid.online = {1, 2, 3}
    with pytest.raises(KeyboardInterrupt):
        submit(scene.values, killed, scene.link, wait=30.0, listener=Events(scene.grid, events, 3))
    submit(None, killed, scene.link, resume=True, wait=30.0, listener=Events(scene.grid, events))
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
    listener = Events(scene.grid, {2: {1, 2, 3, 4}, 3: {1, 3, 4}})
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
        submit(scene.values, run, scene.link, wait=30.0, listener=Events(scene.grid, online, 2))


def test_a_resumed_run_does_not_use_a_node_that_it_refused(scene: Scene, tmp_path: Path) -> None:
    run = tmp_path / "run"
    submit_and_kill(scene, run, {})
    scene.grid.services[3] = Changed(scene.grid.services[3], {"base": "f" * 64})
    listener = Events(scene.grid, {})
    submit(None, run, scene.link, resume=True, wait=2.0, listener=listener)
    assert list_cohorts(run) == [sorted(SITES)] * 2 + [[NORTH, SOUTH]] * 2
    assert any(f"{WEST} does not participate: its base model" in note for note in listener.notes)


def test_a_node_that_waits_under_ever_other_ids_has_one_entry(scene: Scene, tmp_path: Path) -> None:
    """Its reasons are texts of its own, and all of them would be in the error at the end."""
    ids = iter(range(100))

    class Renamed(Changed):
        def answer(self, envelope: Envelope) -> Envelope:
            self.fields = {"refused": "not yet", "waiting": True, "id": f"other-{next(ids)}"}
            return super().answer(envelope)

    scene.grid.services[3] = Renamed(scene.grid.services[3], {})
    with pytest.raises(FedspanError, match="not yet") as raised:
        submit(scene.values, tmp_path / "run", scene.link, wait=12.0, listener=Events(scene.grid, {}))
    assert next(ids) > 2
    assert str(raised.value).count("not yet") == 1


def test_a_node_that_refused_is_invited_again_when_it_comes_back(scene: Scene, tmp_path: Path) -> None:
    scene.grid.services[4] = Changed(scene.grid.services[4], {"refused": "out of memory"}, times=1)
    scene.values["federation"]["late_joiners"] = True
    listener = Events(scene.grid, {1: {1, 2, 3, 4}, 3: {1, 2, 3}, 4: {1, 2, 3, 4}})
    scene.values["federation"]["rounds"] = 5
    submit(scene.values, tmp_path / "run", scene.link, wait=30.0, listener=listener)
    assert [EAST in cohort for cohort in list_cohorts(tmp_path / "run")] == [False] * 4 + [True]
    assert scene.grid.services[4].invited == 2
    assert f"{EAST} does not participate: out of memory" in listener.notes


def test_a_node_without_a_key_comes_back_under_another_flower_id(scene: Scene, tmp_path: Path) -> None:
    scene.grid.services[5] = scene.grid.services[2]
    scene.values["federation"]["late_joiners"] = True
    listener = Events(scene.grid, {1: {1, 3}, 2: {1, 3, 5}})
    submit(scene.values, tmp_path / "run", scene.link, wait=30.0, listener=listener)
    assert list_cohorts(tmp_path / "run") == [sorted(SITES), [NORTH, WEST], *[sorted(SITES)] * 3]
    assert f"{SOUTH} has come back as node 5; it was node 2" in listener.notes
    assert [(row["client"], row["node"], row["replaced"]) for row in list_audited(scene, "replaced")] == [
        (SOUTH, "5", "2")
    ]


@pytest.mark.parametrize("online", [{1, 3, 5}, pytest.param({1, 2, 3, 5}, marks=pytest.mark.slow)])
def test_a_recorded_id_is_taken_over_only_from_a_node_that_is_gone(
    online: set[int], scene: Scene, tmp_path: Path
) -> None:
    """Node 2 is online in one of the cases, and has not introduced itself to the resumed run when node 5 does."""
    run = tmp_path / "run"
    submit_and_kill(scene, run, {})
    scene.grid.services[5] = scene.grid.services[2]
    if 2 in online:
        scene.grid.services[2] = Changed(scene.grid.services[2], {"refused": "busy"})
    scene.grid.online = online
    listener = Events(scene.grid, {})
    submit(None, run, scene.link, resume=True, wait=2.0, listener=listener)
    taken = 2 not in online
    assert [SOUTH in cohort for cohort in list_cohorts(run)] == [True, True, taken, taken]
    assert len(list_audited(scene, "replaced")) == taken


def test_a_new_key_takes_over_only_the_name_under_which_it_was_admitted(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admissions = pytest.importorskip("fedspan.transports.flower.admissions")
    names = {5: SOUTH, 6: ""}
    monkeypatch.setattr(
        admissions,
        "read_admissions",
        lambda link: {id: admissions.Admission(name, "key") for id, name in names.items()},
    )
    scene.grid.services |= {5: scene.grid.services[2], 6: Changed(scene.grid.services[2], {"id": NORTH})}
    scene.values["federation"]["late_joiners"] = True
    listener = Events(scene.grid, {1: {3, 5, 6}})
    submit(scene.values, tmp_path / "run", scene.link, wait=30.0, listener=listener)
    assert list_cohorts(tmp_path / "run") == [sorted(SITES), *[[SOUTH, WEST]] * 4]
    assert f"{NORTH} does not participate: another node has this id" in listener.notes


class Renamed:
    """A node that introduces itself under its own id at first, and under another one at each further invitation."""

    def __init__(self, service: NodeService) -> None:
        self.service, self.invited = service, 0

    def answer(self, envelope: Envelope) -> Envelope:
        answer = self.service.answer(envelope)
        if json.loads(envelope.header)["task"] != "invite":
            return answer
        self.invited += 1
        id = EAST if self.invited == 1 else f"{EAST}-{self.invited}"
        return Envelope(json.dumps({**json.loads(answer.header), "id": id}), answer.body)


def test_a_node_that_comes_back_under_another_id_is_no_further_client(scene: Scene, tmp_path: Path) -> None:
    scene.grid.services[4] = Renamed(scene.grid.services[4])
    scene.values["federation"] |= {"late_joiners": True, "rounds": 6}
    listener = Events(scene.grid, {1: {1, 2, 3, 4}, 2: {1, 2, 3}, 3: {1, 2, 3, 4}, 4: {1, 2, 3}, 5: {1, 2, 3, 4}})
    submit(scene.values, tmp_path / "run", scene.link, wait=30.0, listener=listener)
    assert scene.grid.services[4].invited == 3
    everybody, others = sorted(NODES), sorted(SITES)
    assert list_cohorts(tmp_path / "run") == [others, everybody, *[others] * 4]
    assert f"{EAST}-3 does not participate: this node has joined this run as {EAST}. Set id: {EAST} in its file" in (
        listener.notes
    )


def test_the_quorum_of_a_round_is_that_of_all_clients_at_least() -> None:
    rules = ReplyRules(least=3)
    assert [rules.compute_quorum(cohort) for cohort in (2, 3, 4, 5, 6)] == [2, 3, 3, 3, 4]
