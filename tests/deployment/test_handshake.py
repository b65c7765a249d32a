"""A run waits for nodes whose operators have not decided, and says who they are."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedspan import __version__
from fedspan.assembly.server import build_server_clients, prepare_server
from fedspan.deployment import handshake, submission
from fedspan.deployment.handshake import Introduction, build_server_config
from fedspan.deployment.node import NodeService
from fedspan.deployment.usage import UsageBook
from fedspan.errors import FedspanError
from fedspan.federation.progress import TooFewReplies
from fedspan.federation.protocol import Envelope
from fedspan.runs.train import run
from fedspan.transports.http import admissions, invitations
from fedspan.transports.http import server as servers
from helpers import refusals, tiny
from helpers.captured_log import CapturedLog
from helpers.listeners import Notes
from helpers.node_service import CLIENT, introduced, invitation, node, serve, values

Meet = Callable[..., tuple[Any, list[str]]]
WAITING = "`limits.approve`: the node's operator has to approve job 3f9c first"


@pytest.fixture(autouse=True)
def same_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node has the base of the run; no model is loaded."""
    monkeypatch.setattr(submission, "compute_base_digest", lambda model: "b")
    monkeypatch.setattr(submission, "explain_base", lambda *_: None)


@pytest.fixture
def meet(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Meet:
    """What the nodes of a run are after some replies of node 7, which is invited again while it has not decided."""

    def met(replies: list[dict[str, Any]], **federation: Any) -> tuple[Any, list[str]]:
        def invite(server: Any, envelope: Any, seconds: float, signer: Any, undecided: set[int]) -> Iterator[Any]:
            for reply in replies:
                fields: dict[str, Any] = {"id": CLIENT, "version": __version__, **reply}
                yield 7, Introduction(**fields).to_envelope()
                if 7 not in undecided:
                    return
                undecided.discard(7)

        monkeypatch.setattr(invitations, "invite", invite)
        given = values(tiny_folder)
        given["federation"].update(federation)
        model = SimpleNamespace(adapted=SimpleNamespace(extras={}, model=torch.nn.Module()), new_modules=())
        prepared: Any = SimpleNamespace(config=build_server_config(given), model=model)
        link = servers.prepare_folder(tmp_path / "server", 9092, [], insecure=True)
        notes = Notes()
        handshakes = submission.Handshakes(prepared, notes, link)
        submission.gather_nodes(handshakes, None, invitation({}), 1.0, None)
        nodes = {id: one.node for id, one in handshakes.nodes.items()}
        return (nodes, {id: one.examples for id, one in handshakes.nodes.items()}), notes.notes

    return met


class Keyed:
    """The handshakes of a run with keys, and what it noted; nodes 2, 7 and 8 are online."""

    def __init__(self, tiny_folder: Path, folder: Path, **federation: Any) -> None:
        given = values(tiny_folder)
        given["federation"].update(federation)
        prepared: Any = SimpleNamespace(config=build_server_config(given), model=None)
        link: Any = SimpleNamespace(authority=folder / "ca.crt", folder=folder)
        self.listener, self.server = Notes(), SimpleNamespace(list_online=lambda: [2, 7, 8])
        self.handshakes = submission.Handshakes(prepared, self.listener, link)

    def introduce(self, node: int, id: str = CLIENT, **changes: Any) -> dict[str, int]:
        """Process an introduction; returns the nodes of the run."""
        introduction = Introduction(id=id, version=__version__, examples=5, base="b", **changes)
        self.handshakes.process(node, introduction.to_envelope(), self.server)
        return {id: one.node for id, one in self.handshakes.nodes.items()}


def test_a_run_begins_with_an_agreement(meet: Meet) -> None:
    replies = [{"refused": WAITING, "waiting": True}] * 3 + [{"examples": 5, "base": "b"}]
    found, notes = meet(replies)
    assert found == ({CLIENT: 7}, {CLIENT: 5})
    assert notes == [f"{CLIENT} does not participate yet: {WAITING}"]  # once, however often it was invited


@pytest.mark.parametrize("version", ["9", "0.2.0", "0.1", "1.1.0", "0.1.1", "0.1.0rc1"])
def test_only_nodes_of_other_minor_releases_are_refused(
    version: str, meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "__version__", "0.1.7")
    replies = [{"examples": 5, "base": "b", "version": version}]
    if version.startswith("0.1"):
        assert meet(replies)[0] == ({CLIENT: 7}, {CLIENT: 5})
        return
    with refusals.refused("nodes", r"and this is 0\.1\.7: install fedspan 0\.1"):
        meet(replies)


def test_a_refusal_is_final_and_named(meet: Meet) -> None:
    refused = "`limits.approve`: the node's operator refused job 3f9c: no consent"
    with refusals.refused("nodes", "refused job 3f9c: no consent"):
        meet([{"refused": WAITING, "waiting": True}, {"refused": refused}])


def test_a_node_that_declares_more_than_it_was_admitted_with_enters_no_secure_sum(
    meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under masks it weighs its reply itself; in plaintext the server lowers the weight."""
    admitted = admissions.Admission(CLIENT, "ecdsa-sha2-nistp384 key", max_examples=5)
    monkeypatch.setattr(admissions, "read_admissions", lambda link: {7: admitted})
    replies = [{"examples": 2**53 - 1, "base": "b"}]
    with refusals.refused("nodes", r"declares \d+ examples and was admitted with at most 5 \(--max-examples\)"):
        meet(replies, secure={})
    assert meet(replies)[0] == ({CLIENT: 7}, {CLIENT: 2**53 - 1})
    assert meet([{"examples": 5, "base": "b"}], secure={})[0][1] == {CLIENT: 5}


def test_a_new_key_takes_over_its_name(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revoked = dict[int, Any]()
    monkeypatch.setattr(admissions, "read_admissions", lambda link: {8: admissions.Admission(CLIENT, "key")})
    monkeypatch.setattr(admissions, "read_revocations", lambda link: revoked)
    run = Keyed(tiny_folder, tmp_path, late_joiners=True)
    run.handshakes.owners[CLIENT] = 7
    assert run.introduce(8) == {}
    assert run.handshakes.undecided == {8}  # it is invited again
    assert run.listener.notes == [
        f"{CLIENT} does not participate yet: another node has this id, and is online (node 7)"
    ]
    revoked[7] = admissions.Admission(CLIENT, "old key")
    assert run.introduce(8) == run.handshakes.owners == {CLIENT: 8}


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
    required: dict[str, Any], reply: dict[str, Any], reason: str, meet: Meet
) -> None:
    replies = [{"examples": 5, "base": "b", **reply}]
    with pytest.raises(FedspanError, match=reason):
        meet(replies, **required)
    fit = [{"examples": 6, "base": "b", "tags": {"gpu": "true", "site": "eu", "more": "x"}}]
    assert meet(fit, **required)[0] == ({CLIENT: 7}, {CLIENT: 6})


def test_a_simulation_selects_no_nodes(tiny_folder: Path, tmp_path: Path) -> None:
    for federation in ({"require_tags": {"site": "eu"}}, {"min_examples": 2}):
        with pytest.raises(FedspanError, match="selects nodes of a deployment"):
            run(tiny.config(tiny_folder, federation=federation), tmp_path / "run")


def test_a_node_sends_the_tags_of_its_file(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node(tiny_folder, tmp_path, tags={"site": "eu", "gpu": True, "cores": 8}))
    assert introduced(service, values(tiny_folder)).tags == {"site": "eu", "gpu": "true", "cores": "8"}


def test_a_node_without_the_run_s_tags_loads_nothing(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = NodeService(node(tiny_folder, tmp_path, tags={"site": "us"}))
    monkeypatch.setattr(service, "_build", lambda *_: pytest.fail("the run was built"))
    given = values(tiny_folder)
    given["federation"]["require_tags"] = {"site": "eu"}
    assert "requires the tags site: eu" in (introduced(service, given).refused or "")


@pytest.mark.parametrize("tags", [{"a": "x" * 65}, {"": "x"}, {f"t{at}": "x" for at in range(33)}, {"a": "\x1b[2J"}])
def test_tags_are_few_and_short(tags: dict[str, str]) -> None:
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
    field: str, meet: Meet, monkeypatch: pytest.MonkeyPatch
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
        meet([{"examples": 0, "base": "b"}])
    assert noted
    assert all(text.isprintable() for text in (*noted, str(refused.value))), noted


def test_a_node_neither_refuses_nor_waits_in_the_name_of_another(meet: Meet, monkeypatch: pytest.MonkeyPatch) -> None:
    admitted = admissions.Admission("twin", "ecdsa-sha2-nistp384 key")
    monkeypatch.setattr(admissions, "read_admissions", lambda link: {7: admitted})
    with refusals.refused("nodes", "this node was admitted as twin") as refused:
        meet([{"refused": "clinic has left the study"}])
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
    run = Keyed(tiny_folder, tmp_path)
    for changes in ({}, {"refused": "has left the study", "waiting": True}):
        run.introduce(7, **changes)
    assert run.handshakes.nodes == run.handshakes.owners == {}
    assert (list(run.handshakes.refused), run.handshakes.undecided) == (["node 7"], set())
    assert run.listener.notes == [
        f"node 7 does not participate: it calls itself {CLIENT}, a name under which another key was admitted (--as)"
    ]
    run.introduce(7, "another")
    if not is_revoked:
        run.introduce(8)
    assert run.handshakes.owners == {"another": 7} | ({} if is_revoked else {CLIENT: 8})


@pytest.mark.parametrize("late_joiners", [False, True])
def test_a_node_has_one_id_in_a_run(
    late_joiners: bool, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes 2 and 7 were admitted without a name; node 7 is invited again, since it was offline for a moment."""
    admitted = {7: admissions.Admission("", "key 7"), 2: admissions.Admission("", "key 2")}
    monkeypatch.setattr(admissions, "read_admissions", lambda link: admitted)
    monkeypatch.setattr(admissions, "read_revocations", lambda link: {})
    run = Keyed(tiny_folder, tmp_path, late_joiners=late_joiners)
    assert run.introduce(7, "x1") == {"x1": 7}
    for id in ("x2", "another", "x3"):
        assert run.introduce(7, id) == {}
    assert run.handshakes.owners == {"x1": 7}
    assert run.listener.notes == [
        f"{id} does not participate: this node has joined this run as x1. Set id: x1 in its file"
        for id in ("x2", "another", "x3")
    ]
    assert run.introduce(2, "another") == {"another": 2}  # the id that node 7 tried to take
    assert run.introduce(7, "x1") == {"another": 2, "x1": 7}


def test_a_node_that_declares_no_examples_takes_no_part(meet: Meet) -> None:
    """Where it alone replied, the round would have no weight at all."""
    with refusals.refused("nodes", "declares no training examples"):
        meet([{"examples": 0, "base": "b"}])


LIMITS = {"approve": "auto", "min_batch": 1, "train_examples": 8, "evaluation_epsilon": None, "evaluation_examples": 1}
OTHERS = ["one that no example has", "another"]


def answer(tiny_folder: Path, folder: Path, labels: list[str], **data: Any) -> dict[str, Any]:
    """What a new node replies to a run with these labels, but for the digests of the model, which the server knows."""
    given = {"train": str(tiny_folder / "corpus.csv"), **data}
    service = NodeService(node(tiny_folder, folder, limits=LIMITS, data=given))
    config = values(tiny_folder)
    config["data"] = {"labels": labels}
    return introduced(service, config).model_dump(exclude={"base", "extras"})


@pytest.mark.parametrize("data", [{}, {"invalid": "skip"}, {"keep_only": True}])
def test_a_handshake_does_not_depend_on_labels(data: dict[str, Any], tiny_folder: Path, tmp_path: Path) -> None:
    known = answer(tiny_folder, tmp_path / "known", list(tiny.LABELS), **data)
    assert known["refused"] is None
    for number, labels in enumerate((list(tiny.LABELS)[:2], [tiny.LABELS[0], OTHERS[0]], OTHERS)):
        assert answer(tiny_folder, tmp_path / str(number), labels, **data) == known


def test_examples_with_other_labels_are_left_out_and_the_owner_learns_it(
    tiny_folder: Path, tmp_path: Path, caplog: CapturedLog
) -> None:
    config = values(tiny_folder)
    config["data"] = {"labels": [tiny.LABELS[0], OTHERS[0]]}
    service = NodeService(node(tiny_folder, tmp_path, limits=LIMITS))
    run, _ = serve(config, service)
    assert not run.federation.run_round(run.federation.begin()).failures
    (warning,) = [message for message in caplog.messages if "are left out" in message]
    assert "training examples have labels that run does not have" in warning
    validation, test = run.evaluator.evaluate_clients(run.federation.begin())
    assert None not in (validation, test)


def test_a_node_without_the_labels_refuses_to_train_at_the_price_of_a_round(tiny_folder: Path, tmp_path: Path) -> None:
    config = {**values(tiny_folder), "data": {"labels": OTHERS}}
    limits = {**LIMITS, "evaluation_epsilon": 1000.0}
    run, _ = serve(config, NodeService(node(tiny_folder, tmp_path, limits=limits)))
    with pytest.raises(TooFewReplies, match=r"fewer training examples with labels of the run"):
        run.federation.run_round(run.federation.begin())
    assert UsageBook(node(tiny_folder, tmp_path, limits=limits)).get_account().rounds >= 1
    validation, _ = run.evaluator.evaluate_clients(run.federation.begin())
    assert validation is not None, "a missing part would tell that the node lacks the labels"
    assert validation.pooled["accuracy"] < 0.01, "every example counts as wrong"
    known, _ = serve(values(tiny_folder), NodeService(node(tiny_folder, tmp_path / "known", limits=limits)))
    scores, _ = known.evaluator.evaluate_clients(known.federation.begin())
    assert scores is not None
    assert set(scores.pooled) == set(validation.pooled)
    assert scores.pooled["examples"] == validation.pooled["examples"]
