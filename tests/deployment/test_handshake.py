"""A run waits for nodes whose operators have not decided, and says who they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedspan import __version__
from fedspan.deployment import submission
from fedspan.deployment.handshake import Introduction, build_server_config
from fedspan.deployment.node import NodeService
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from fedspan.runs.callbacks import Listener
from fedspan.runs.remote import build_server_clients, prepare_server
from fedspan.runs.train import run
from helpers import tiny
from helpers.node_service import CLIENT, introduced, invitation, node, values

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

from fedspan.transports.flower import admissions, transport
from fedspan.transports.flower import server as servers

WAITING = "`limits.approve`: the node's operator has to approve job 3f9c first"


class Notes(Listener):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_note(self, text: str) -> None:
        self.notes.append(text)


def met(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replies: list[dict[str, Any]],
    secure: dict[str, Any] | None = None,
    **federation: Any,
) -> tuple[Any, list[str]]:
    """What the nodes of a run are after some replies of node 7, which is invited again while it has not decided."""

    def invite(grid: Any, envelope: Any, seconds: float, signer: Any, undecided: set[int]) -> Iterator[tuple[int, Any]]:
        for reply in replies:
            fields: dict[str, Any] = {"id": CLIENT, "version": __version__, **reply}
            yield 7, Introduction(**fields).to_envelope()
            if 7 not in undecided:
                return
            undecided.discard(7)

    monkeypatch.setattr(transport, "invite", invite)
    monkeypatch.setattr(submission, "compute_base_digest", lambda model: "b")
    given = values(tiny_folder)
    given["federation"].update(federation, secure=secure)
    model = SimpleNamespace(adapted=SimpleNamespace(extras={}, model=torch.nn.Module()), new_modules=())
    prepared: Any = SimpleNamespace(config=build_server_config(given), model=model)
    link = servers.prepare_folder(tmp_path / "server", 9092, [], insecure=True)
    notes = Notes()
    handshakes = submission.Handshakes(prepared, notes, link)
    submission.gather_nodes(handshakes, None, invitation({}), 1.0, None)  # type: ignore[arg-type]
    nodes = {id: one.node for id, one in handshakes.nodes.items()}
    return (nodes, {id: one.examples for id, one in handshakes.nodes.items()}), notes.notes


def test_a_run_begins_when_the_operator_has_agreed(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = [{"refused": WAITING, "waiting": True}] * 3 + [{"examples": 5, "base": "b"}]
    found, notes = met(tiny_folder, tmp_path, monkeypatch, replies)
    assert found == ({CLIENT: 7}, {CLIENT: 5})
    assert notes == [f"{CLIENT} does not participate yet: {WAITING}"]  # once, however often it was invited


def test_a_refusal_is_final_and_named(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = "`limits.approve`: the node's operator refused job 3f9c: no consent"
    with pytest.raises(FedspanError, match="refused job 3f9c: no consent"):
        met(tiny_folder, tmp_path, monkeypatch, [{"refused": WAITING, "waiting": True}, {"refused": refused}])


def test_a_node_that_declares_more_than_it_was_admitted_with_enters_no_secure_sum(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under masks it weighs its reply itself; in plaintext the server lowers the weight."""
    admitted = admissions.Admission(CLIENT, "ecdsa-sha2-nistp384 key", max_examples=5)
    monkeypatch.setattr(admissions, "read_admissions", lambda link: {7: admitted})
    replies = [{"examples": 2**53 - 1, "base": "b"}]
    with pytest.raises(FedspanError, match=r"declares \d+ examples and was admitted with at most 5 \(--max-examples\)"):
        met(tiny_folder, tmp_path, monkeypatch, replies, secure={})
    assert met(tiny_folder, tmp_path, monkeypatch, replies)[0] == ({CLIENT: 7}, {CLIENT: 2**53 - 1})
    assert met(tiny_folder, tmp_path, monkeypatch, [{"examples": 5, "base": "b"}], secure={})[0][1] == {CLIENT: 5}


def test_a_new_key_takes_over_its_name_while_the_revoked_one_is_online(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revoked = dict[int, Any]()
    monkeypatch.setattr(admissions, "read_admissions", lambda link: {8: admissions.Admission(CLIENT, "key")})
    monkeypatch.setattr(admissions, "read_revocations", lambda link: revoked)
    monkeypatch.setattr(submission, "compute_base_digest", lambda model: "b")
    given = values(tiny_folder)
    given["federation"]["late_joiners"] = True
    prepared: Any = SimpleNamespace(config=build_server_config(given), model=None)
    link: Any = SimpleNamespace(authority=tmp_path / "authority.pem", folder=tmp_path)
    grid: Any = SimpleNamespace(get_node_ids=lambda: [7, 8])
    notes = Notes()
    handshakes = submission.Handshakes(prepared, notes, link)
    handshakes.owners[CLIENT] = 7
    reply = Introduction(id=CLIENT, version=__version__, examples=5, base="b").to_envelope()
    handshakes.process(8, reply, grid)
    assert (handshakes.nodes, handshakes.undecided) == ({}, {8})  # it is invited again
    assert notes.notes == [f"{CLIENT} does not participate yet: another node has this id, and is online (node 7)"]
    revoked[7] = admissions.Admission(CLIENT, "old key")
    handshakes.process(8, reply, grid)
    assert {id: one.node for id, one in handshakes.nodes.items()} == handshakes.owners == {CLIENT: 8}


@pytest.mark.parametrize(
    ("required", "reply", "reason"),
    [
        ({"require_tags": {"gpu": True}}, {"tags": {"site": "eu"}}, "this run requires the tags gpu: true"),
        ({"require_tags": {"gpu": True}}, {"tags": {"gpu": "false"}}, "this run requires the tags gpu: true"),
        ({"require_tags": {"site": "eu"}}, {}, "this run requires the tags site: eu"),
        ({"min_examples": 6}, {}, "it has 5 training examples, and this run requires 6"),
    ],
)
def test_a_run_selects_nodes_by_tags_and_examples(
    required: dict[str, Any],
    reply: dict[str, Any],
    reason: str,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replies = [{"examples": 5, "base": "b", **reply}]
    with pytest.raises(FedspanError, match=reason):
        met(tiny_folder, tmp_path, monkeypatch, replies, **required)
    fit = [{"examples": 6, "base": "b", "tags": {"gpu": "true", "site": "eu", "more": "x"}}]
    assert met(tiny_folder, tmp_path, monkeypatch, fit, **required)[0] == ({CLIENT: 7}, {CLIENT: 6})


def test_a_simulation_selects_no_nodes(tiny_folder: Path, tmp_path: Path) -> None:
    for federation in ({"require_tags": {"site": "eu"}}, {"min_examples": 2}):
        with pytest.raises(FedspanError, match="selects nodes of a deployment"):
            run(tiny.config(tiny_folder, federation=federation), tmp_path / "run")


def test_a_node_sends_the_tags_of_its_file(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node(tiny_folder, tmp_path, tags={"site": "eu", "gpu": True, "cores": 8}))
    assert introduced(service, values(tiny_folder)).tags == {"site": "eu", "gpu": "true", "cores": "8"}


def test_a_node_without_the_tags_of_a_run_loads_nothing(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = NodeService(node(tiny_folder, tmp_path, tags={"site": "us"}))
    monkeypatch.setattr(service, "_build", lambda *_: pytest.fail("the run was built"))
    given = values(tiny_folder)
    given["federation"]["require_tags"] = {"site": "eu"}
    assert "requires the tags site: eu" in (introduced(service, given).refused or "")


@pytest.mark.parametrize("tags", [{"a": "x" * 65}, {"": "x"}, {f"t{at}": "x" for at in range(33)}, {"a": "\x1b[2J"}])
def test_tags_are_few_and_short(tags: dict[str, str], tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tags"):
        node(tiny_folder, tmp_path, tags=tags)
    with pytest.raises(ValueError, match="tags"):
        Introduction(id=CLIENT, version=__version__, tags=tags)


def test_a_limit_of_an_admission_reaches_the_round(tiny_folder: Path) -> None:
    config = build_server_config(values(tiny_folder))
    spec = prepare_server(config).engine.adapted.spec
    examples = {"clinic": 2**53 - 1, "practice": 80}
    clients = build_server_clients(config, spec, examples, {"clinic": 100}, {"clinic": "ecdsa-sha2-nistp384 key"})
    assert {id: one.identity for id, one in clients.items()} == {"clinic": "ecdsa-sha2-nistp384 key", "practice": ""}
    assert {id: one.max_weight for id, one in clients.items()} == {"clinic": 100, "practice": None}
    # the order has the number that the node declared, since the node compares it with its own
    assert clients["clinic"].client.examples == clients["clinic"].client.weight == 2**53 - 1


@pytest.mark.parametrize("field", ["id", "version", "base", "extras", "refused", "more"])
def test_nothing_in_an_introduction_is_obeyed_by_a_terminal(
    field: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Id, version and digest are the node's words, and so are names of fields that do not exist."""
    escapes, envelope = "\x1b]0;title\x07\x1b[2J", Introduction.to_envelope

    def lie(introduction: Introduction) -> Envelope:
        header = json.loads(envelope(introduction).header)
        header[field + escapes if field == "more" else field] = escapes
        return Envelope(json.dumps(header))

    monkeypatch.setattr(Introduction, "to_envelope", lie)
    noted: list[str] = []
    monkeypatch.setattr(Notes, "on_note", lambda self, text: noted.append(text))
    with pytest.raises(FedspanError) as refused:
        met(tiny_folder, tmp_path, monkeypatch, [{"examples": 0, "base": "b"}])
    assert noted
    assert all(text.isprintable() for text in (*noted, str(refused.value))), noted


def test_a_node_neither_refuses_nor_waits_in_the_name_of_another(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admitted = admissions.Admission("twin", "ecdsa-sha2-nistp384 key")
    monkeypatch.setattr(admissions, "read_admissions", lambda link: {7: admitted})
    with pytest.raises(FedspanError, match="this node was admitted as twin") as refused:
        met(tiny_folder, tmp_path, monkeypatch, [{"refused": "clinic has left the study"}])
    assert "left the study" not in str(refused.value)
    assert f"{CLIENT}:" not in str(refused.value)


@pytest.mark.parametrize("is_revoked", [False, True])
@pytest.mark.parametrize("is_listed", [False, True])
def test_the_name_of_an_admitted_node_is_no_other_node_s(
    is_listed: bool, is_revoked: bool, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 7 was admitted without a name, or not by ``fedspan admit``; it is the first to introduce itself."""
    named = admissions.Admission(CLIENT, "key 8")
    admitted = {7: admissions.Admission("", "key 7")} if is_listed else {}
    monkeypatch.setattr(admissions, "read_admissions", lambda link: admitted if is_revoked else {**admitted, 8: named})
    monkeypatch.setattr(admissions, "read_revocations", lambda link: {8: named} if is_revoked else {})
    monkeypatch.setattr(submission, "compute_base_digest", lambda model: "b")
    prepared: Any = SimpleNamespace(config=build_server_config(values(tiny_folder)), model=None)
    link: Any = SimpleNamespace(authority=tmp_path / "ca.crt", folder=tmp_path)
    grid: Any = SimpleNamespace(get_node_ids=lambda: [7, 8])
    notes = Notes()
    handshakes = submission.Handshakes(prepared, notes, link)
    reply = Introduction(id=CLIENT, version=__version__, examples=5, base="b")
    for changes in ({}, {"refused": "has left the study", "waiting": True}):
        handshakes.process(7, reply.model_copy(update=changes).to_envelope(), grid)
    assert handshakes.nodes == handshakes.owners == {}
    assert (list(handshakes.refused), handshakes.undecided) == (["node 7"], set())
    assert notes.notes == [
        f"node 7 does not participate: it calls itself {CLIENT}, a name under which another key was admitted (--as)"
    ]
    handshakes.process(7, reply.model_copy(update={"id": "another"}).to_envelope(), grid)
    if not is_revoked:
        handshakes.process(8, reply.to_envelope(), grid)
    assert handshakes.owners == {"another": 7} | ({} if is_revoked else {CLIENT: 8})


@pytest.mark.parametrize("late_joiners", [False, True])
def test_a_node_has_one_id_in_a_run(
    late_joiners: bool, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes 2 and 7 were admitted without a name; node 7 is invited again, since it was offline for a moment."""
    admitted = {7: admissions.Admission("", "key 7"), 2: admissions.Admission("", "key 2")}
    monkeypatch.setattr(admissions, "read_admissions", lambda link: admitted)
    monkeypatch.setattr(admissions, "read_revocations", lambda link: {})
    monkeypatch.setattr(submission, "compute_base_digest", lambda model: "b")
    given = values(tiny_folder)
    given["federation"]["late_joiners"] = late_joiners
    prepared: Any = SimpleNamespace(config=build_server_config(given), model=None)
    link: Any = SimpleNamespace(authority=tmp_path / "ca.crt", folder=tmp_path)
    grid: Any = SimpleNamespace(get_node_ids=lambda: [2, 7])
    notes = Notes()
    handshakes = submission.Handshakes(prepared, notes, link)

    def introduce(node: int, id: str) -> dict[str, int]:
        introduction = Introduction(id=id, version=__version__, examples=5, base="b")
        handshakes.process(node, introduction.to_envelope(), grid)
        return {id: one.node for id, one in handshakes.nodes.items()}

    assert introduce(7, "x1") == {"x1": 7}
    for id in ("x2", "another", "x3"):
        assert introduce(7, id) == {}
    assert handshakes.owners == {"x1": 7}
    assert notes.notes == [
        f"{id} does not participate: this node has joined this run as x1. Set id: x1 in its file"
        for id in ("x2", "another", "x3")
    ]
    assert introduce(2, "another") == {"another": 2}  # the id that node 7 tried to take
    assert introduce(7, "x1") == {"another": 2, "x1": 7}


def test_a_node_that_declares_no_examples_takes_no_part(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it alone replied, the round would have no weight at all."""
    with pytest.raises(FedspanError, match="declares no training examples"):
        met(tiny_folder, tmp_path, monkeypatch, [{"examples": 0, "base": "b"}])
