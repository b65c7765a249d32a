"""A data owner's service: what it agrees to, what it refuses, what it remembers and shows."""

import errno
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from fedspan import __version__
from fedspan.assembly.server import prepare_server
from fedspan.clients.host import Host
from fedspan.config.node import NodeConfig
from fedspan.deployment.base_offers import BaseFile
from fedspan.deployment.console import ConsoleFormatter
from fedspan.deployment.handshake import Introduction, Invitation, build_server_config, compute_base_digest
from fedspan.deployment.last_order import LastOrder, LastOrderFile, load_last_order
from fedspan.deployment.node import NodeService
from fedspan.deployment.node_folder import get_run_folder
from fedspan.deployment.submission import explain_base
from fedspan.deployment.usage import UsageBook
from fedspan.errors import FedspanError
from fedspan.federation.protocol import (
    Envelope,
    Order,
    OrderEncoder,
    Reply,
    decode_order,
    decode_reply,
    open_reply,
    read_header,
)
from helpers import tiny
from helpers.captured_log import CapturedLog
from helpers.node_service import CLIENT, introduced, node, serve, served, values
from helpers.refusals import refused

LOCAL = {"mechanism": "local", "clip": 1.0, "noise": 4.0, "randomness": "secret"}


def test_a_node_trains_evaluates_and_continues_after_a_restart(tiny_folder: Path, tmp_path: Path) -> None:
    run, transport = served(tiny_folder, NodeService(node(tiny_folder, tmp_path)), method={"name": "fedsa-lora"})
    first = run.federation.run_round(run.federation.begin())
    assert not first.failures
    validation, test = run.evaluator.evaluate_clients(first.progress)
    assert (validation is None, set(test.by_client)) == (False, {CLIENT})
    (sent,) = run.federation.pop_events().transfers
    assert (sent.purpose, sent.client, sent.bytes) == ("evaluate", CLIENT, len(transport.sent[-1].body))
    transport.service = NodeService(node(tiny_folder, tmp_path))  # whose process was killed
    second = run.federation.run_round(first.progress)
    assert not second.failures
    assert second.progress.last_rounds == {CLIENT: 1}
    assert run.federation.conclude(second.progress) == ()
    assert [one.purpose for one in run.federation.pop_events().transfers] == ["export"]
    assert list(tmp_path.glob("*/adapter/adapter_model.safetensors"))
    assert str(tiny_folder) not in "".join(envelope.header for envelope in transport.sent)


def test_server_and_nodes_agree_that_examples_are_pairs(tiny_folder: Path, tmp_path: Path) -> None:
    rows = (tiny_folder / "corpus.csv").read_text().splitlines()
    lines = [f"{'first' if number == 0 else f'word{number % 9}'},{row}" for number, row in enumerate(rows)]
    (tmp_path / "pairs.csv").write_text("\n".join(lines) + "\n")
    data = {"train": str(tmp_path / "pairs.csv"), "text": "first", "text_pair": "text"}
    service = NodeService(node(tiny_folder, tmp_path / "node", data=data))
    given = values(tiny_folder, model={"pooling": "mean"})
    one = prepare_server(build_server_config(given))  # its head has features of one text
    reason = explain_base(one, compute_base_digest(one.model), introduced(service, given)) or ""
    assert reason.endswith("differs in: pooling or text_pair")
    service = NodeService(node(tiny_folder, tmp_path / "other", data=data))
    given["data"]["text_pair"] = "of any name"
    prepared, _ = serve(given, service)
    assert prepared.engine.adapted.spec.extras["classifier.weight"] == (len(tiny.LABELS), 3 * 16)
    assert prepared.federation.run_round(prepared.federation.begin()).loss > 0


def test_an_answered_order_has_the_same_reply_again_and_is_not_carried_out_again(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node may have been killed while it sent the reply. An older order, and one that differs, are refused."""
    config, replies = node(tiny_folder, tmp_path), list[Envelope]()
    run, transport = served(tiny_folder, NodeService(config), privacy=LOCAL)
    original = NodeService.answer

    def keep(service: NodeService, envelope: Envelope) -> Envelope:
        replies.append(original(service, envelope))
        return replies[-1]

    with monkeypatch.context() as patch:
        patch.setattr(NodeService, "answer", keep)
        run.federation.run_round(run.federation.begin())
    ((envelope,), (reply,)), charged = (transport.sent, replies), UsageBook(config).get_account()
    assert len(reply.body) > 100
    monkeypatch.setattr(Host, "reply", None)
    for one in (transport.service, NodeService(config)):
        assert one.answer(envelope) == reply
    assert UsageBook(config).get_account() == charged
    order = decode_order(envelope)
    for other in (replace(order, serial=order.serial - 1), replace(order, lr=0.5)):
        assert "arrived before" in (decode_reply(NodeService(config).answer(other.to_envelope())).failed or "")
    (kept,) = tmp_path.glob("*/serial-reply")
    assert kept.stat().st_mode & 0o777 == 0o600
    for damage in (lambda: kept.write_bytes(kept.read_bytes()[:-1]), kept.unlink):
        damage()
        assert "arrived before" in (decode_reply(NodeService(config).answer(envelope)).failed or "")


def test_a_reply_is_kept_until_the_next_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, order, reply = tmp_path / "serial", Envelope("{}", b"order"), Envelope('{"loss": 1}', b"\n\x00reply")
    file = LastOrderFile(path)
    assert file.begin(order, 3) is None
    file.close(reply)
    assert LastOrderFile(path).begin(order, 3) == reply
    next_order = LastOrderFile(path)
    assert next_order.begin(order, 4) is None
    assert [one.name for one in tmp_path.iterdir()] == ["serial"]

    def fill(target: Path, data: bytes, mode: int = 0o644) -> None:
        if target != path:
            raise OSError("disk full")
        target.write_bytes(data)

    monkeypatch.setattr("fedspan.deployment.last_order.write_atomic", fill)
    next_order.close(reply)
    with refused("serial", "order 4 arrived before"):
        LastOrderFile(path).begin(order, 4)


def test_a_stored_reply_leaves_the_node_by_its_present_limits_and_from_its_present_data_only(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Refused once, it is deleted: the limits that allowed it do not bring it back."""
    data = {name: tmp_path / f"{name}.csv" for name in ("train", "test")}
    rows = (tiny_folder / "corpus.csv").read_text().splitlines(keepends=True)
    for path in data.values():
        path.write_text("".join(rows))
    own = {name: str(path) for name, path in data.items()}
    folder, copied, marker = tmp_path / "node", tmp_path / "copied", Path(f"{tmp_path / 'node'}.budget")
    config = node(tiny_folder, folder, data=own)
    run, transport = served(tiny_folder, NodeService(config))
    run.federation.run_round(run.federation.begin())
    (envelope,) = transport.sent
    shutil.copytree(folder, copied)
    budget = marker.read_bytes()

    def answer(config: NodeConfig) -> str | None:
        return decode_reply(NodeService(config).answer(envelope)).failed

    limits = [{"secure_only": True}, {"private_only": True}, {"methods": ["rolora"]}, {"models": ["other"]}]
    limits += [{"train_examples": 10**6}, {"steps": 1}, {"evaluation_examples": 11}, {"approve": "ask"}]
    changes: list[dict[str, Any]] = [*({"limits": one} for one in limits), {"split_seed": 1}, {"validation": 0.2}]
    for change in [*changes, "train", "test"]:
        shutil.rmtree(folder)
        shutil.copytree(copied, folder)
        marker.write_bytes(budget)
        assert answer(config) is None
        if isinstance(change, str):  # an owner withdraws an example
            data[change].write_text("".join(rows[:-1]))
            assert "answered with other data" in (answer(config) or ""), change
            data[change].write_text("".join(rows))
        else:
            assert answer(node(tiny_folder, folder, data=own, **change)) is not None, change
        assert not list(folder.glob("*/serial-reply")), change
        assert "arrived before" in (answer(config) or ""), change


class Killed(BaseException):
    """The end of a node's process."""


def test_an_order_that_was_interrupted_is_carried_out_and_charged_once(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the order as it was delivered: one with the same serial is refused."""
    config = node(tiny_folder, tmp_path)
    run, transport = served(tiny_folder, NodeService(config), privacy=LOCAL)
    original = Host.reply

    def kill(host: Host, order: Order) -> Envelope:
        raise Killed

    monkeypatch.setattr(Host, "reply", kill)
    with pytest.raises(Killed):
        run.federation.run_round(run.federation.begin())
    (envelope,) = transport.sent
    charged = UsageBook(config).get_account()
    assert (charged.rounds, len(charged.releases)) == (1, 1)
    monkeypatch.setattr(Host, "reply", original)
    service = NodeService(config)
    other = replace(decode_order(envelope), lr=0.5).to_envelope()
    assert "arrived before" in (decode_reply(service.answer(other)).failed or "")
    reply = service.answer(envelope)
    assert decode_reply(reply).failed is None
    assert UsageBook(config).get_account() == charged
    for one in (service, NodeService(config)):
        assert one.answer(envelope) == reply


def test_an_order_that_was_refused_is_not_carried_out_later(tiny_folder: Path, tmp_path: Path) -> None:
    """The owner's limits have changed since: the server has to send another order."""
    run, transport = served(tiny_folder, NodeService(node(tiny_folder, tmp_path)))
    transport.service = NodeService(node(tiny_folder, tmp_path, limits={"methods": ["rolora"]}))
    with refused("good replies", "this node does not allow 'fedit'"):
        run.federation.run_round(run.federation.begin())
    answer = decode_reply(NodeService(node(tiny_folder, tmp_path)).answer(transport.sent[-1]))
    assert "arrived before" in (answer.failed or "")


_OTHER = [{"training": {"local_steps": 3}}, {"training": {"max_grad_norm": 1e-12}}, {"privacy": LOCAL}]


@pytest.mark.parametrize("changes", _OTHER)
def test_a_known_run_keeps_its_config(changes: dict[str, Any], tiny_folder: Path, tmp_path: Path) -> None:
    """One order under several configs would tell more than its one charge, and could leave out the masks of a sum."""
    run, transport = served(tiny_folder, NodeService(node(tiny_folder, tmp_path)))
    run.federation.run_round(run.federation.begin())
    charged = UsageBook(node(tiny_folder, tmp_path)).get_account().runs
    for service in (transport.service, NodeService(node(tiny_folder, tmp_path))):
        told = introduced(service, values(tiny_folder, **changes))
        assert told.refused == "`run`: this node knows this run with another config or base model. Start a new run."
        order = replace(decode_order(transport.sent[0]), serial=decode_order(transport.sent[0]).serial + 10**6)
        assert decode_reply(service.answer(order.to_envelope())).failed is None  # under the config that it agreed to
    assert UsageBook(node(tiny_folder, tmp_path)).get_account().runs == charged
    assert introduced(NodeService(node(tiny_folder, tmp_path)), values(tiny_folder)).refused is None
    other = introduced(NodeService(node(tiny_folder, tmp_path)), values(tiny_folder, **changes), run="another")
    assert other.refused is None


def test_a_known_run_keeps_its_base_model_which_may_be_offered_later(tiny_folder: Path, tmp_path: Path) -> None:
    first, second = (
        (
            BaseFile(name="config.json", size=2, sha256=digit * 64),
            BaseFile(name="model.safetensors", size=2, sha256=digit * 64),
        )
        for digit in "12"
    )
    service = NodeService(node(tiny_folder, tmp_path))
    for files, is_refused in (((), False), (first, False), (second, True), ((), True), (first, False)):
        told = introduced(service, values(tiny_folder), base_files=files)
        assert ((told.refused or "").startswith("`run`")) == is_refused


def test_an_order_of_a_run_to_which_it_was_not_invited_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    order = Order("train", 0, 0, 0.1, CLIENT, None, b"", run="another", serial=1)
    answer = decode_reply(NodeService(node(tiny_folder, tmp_path)).answer(order.to_envelope()))
    assert "invited" in (answer.failed or "")
    written = {path.name for path in tmp_path.iterdir()} - {"heartbeat"}
    assert written == {"audit.jsonl", "audit.jsonl.lock", "budget.json"}


@pytest.mark.parametrize(
    ("limits", "config", "why"),
    [
        ({"methods": ["rolora"]}, {}, "`limits.methods`: this node does not allow 'fedit'. It allows rolora"),
        ({"models": ["roberta-base"]}, {}, "limits.models"),
        ({"run_rounds": 2}, {}, "`limits.run_rounds`: the run's federation.rounds is 3, and this node"),
        ({}, {"method": {"name": "no such"}}, "method.name"),
        ({}, {"task": "os.system:run"}, "`task`: no task is named 'os.system:run'"),
        ({}, {"task_options": {"code": "1"}}, "`task_options.code`: sequence-classification has no such option"),
        ({}, {"unknown": 1}, "unknown"),
    ],
)
def test_limits_are_the_node_s_to_keep(
    limits: dict[str, Any], config: dict[str, Any], why: str, tiny_folder: Path, tmp_path: Path
) -> None:
    told = introduced(NodeService(node(tiny_folder, tmp_path, limits=limits)), {**values(tiny_folder), **config})
    assert told.refused is not None
    assert why in told.refused
    assert "corpus.csv" not in told.refused  # neither paths nor data go out
    assert "symptom" not in told.refused
    assert str(tmp_path) not in told.refused
    written = {path.name for path in tmp_path.iterdir()} - {"heartbeat"}
    assert written == {"audit.jsonl", "audit.jsonl.lock", "budget.json"}


@pytest.mark.parametrize("field", ["modules_to_save", "target_modules"])
def test_words_vectors_do_not_train_unless_the_owner_allows_it(field: str, tiny_folder: Path, tmp_path: Path) -> None:
    """Their changes list the words of a node's texts, whatever the number of nodes in a sum."""
    model = {**values(tiny_folder)["model"], field: ["word_embeddings"]}
    config = {**values(tiny_folder), "model": model}
    told = introduced(NodeService(node(tiny_folder, tmp_path)), config)
    assert told.refused is not None
    assert "limits.words" in told.refused
    allowed = node(tiny_folder, tmp_path / "allowed", limits={"words": True})
    assert introduced(NodeService(allowed), config).refused is None


def test_a_refusal_is_one_line_of_the_node_s_log(tiny_folder: Path, tmp_path: Path, caplog: CapturedLog) -> None:
    config = values(tiny_folder, federation={"require_tags": {"gpu": True}})
    introduction = introduced(NodeService(node(tiny_folder, tmp_path)), config)
    assert caplog.messages == [f"the invitation to run is refused: {introduction.refused}"]
    assert "this run requires the tags gpu: true" in caplog.text
    assert "Traceback" not in caplog.text


def test_an_unexpected_error_of_an_invitation_is_logged_with_its_traceback(
    tiny_folder: Path, tmp_path: Path, caplog: CapturedLog
) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("a defect")

    introduction = introduced(NodeService(node(tiny_folder, tmp_path), load=fail), values(tiny_folder))
    assert introduction.refused == "ZeroDivisionError; see the client's own log"
    assert "ZeroDivisionError: a defect" in caplog.text
    assert "not a fedspan header" not in caplog.text, "that it is no order is no error"


def test_a_node_s_log_names_its_rounds(tiny_folder: Path, tmp_path: Path, caplog: CapturedLog) -> None:
    run, _ = served(tiny_folder, NodeService(node(tiny_folder, tmp_path)))
    start = run.federation.begin()
    with caplog.at_level("INFO", "fedspan.node"):
        run.evaluator.evaluate_clients(start)
        run.evaluator.evaluate_clients(after := run.federation.run_round(start).progress)
        run.evaluator.evaluate_once(after)  # as at the end of a run whose last round is the best
    done = [line for line in caplog.messages if line.endswith("done")]
    assert done == ["before round 1: evaluate done", "round 1: train done", "after round 1: evaluate done"]


def test_another_version_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    told = introduced(NodeService(node(tiny_folder, tmp_path)), values(tiny_folder), version="0.0.1")
    assert "`version`: of the server, it runs fedspan 0.0.1, and this is" in (told.refused or "")


def test_a_message_larger_than_the_node_takes_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node(tiny_folder, tmp_path, limits={"message_mib": 1}))
    run, transport = served(tiny_folder, service)
    run.federation.run_round(run.federation.begin())
    order = replace(decode_order(transport.sent[0]), serial=2**52, body=bytes(2**20 + 1))
    answer: Reply = decode_reply(service.answer(order.to_envelope()))
    assert "1048577 bytes are more than this node's limit of 1048576" in (answer.failed or "")


def test_an_envelope_of_no_kind_is_none(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node(tiny_folder, tmp_path))
    for header in ("", "{}", "[]", '{"task": "begin"}', "\x00"):
        with pytest.raises(ValueError, match="header"):
            service.answer(Envelope(header))


def test_a_server_s_config_names_no_data(tiny_folder: Path) -> None:
    given = values(tiny_folder)
    with refused("data.train"):
        build_server_config({**given, "data": {"train": "secret.csv"}})
    with refused("data.labels"):
        build_server_config({**given, "data": {}})
    with refused("baselines", "baselines"):
        build_server_config({**given, "baselines": ["local-only"]})
    federation = {"clients_per_round": 2, "buffered": {"concurrency": 3, "replay": "runs/first"}}
    with refused("federation.buffered.replay"):
        build_server_config({**given, "federation": federation})


def test_a_node_joins_asynchronous_rounds_and_trains_an_order_of_any_round(tiny_folder: Path, tmp_path: Path) -> None:
    """Of the rounds themselves a node knows nothing: each order names the state's round and its learning rate."""
    service = NodeService(node(tiny_folder, tmp_path))
    federation = {"clients_per_round": 1, "buffered": {"concurrency": 1}}
    prepared, transport = served(tiny_folder, service, federation=federation)
    state = prepared.federation.begin()
    encoder = OrderEncoder("run")
    client = prepared.federation.clients[CLIENT].client
    for round in (0, 2):
        progress = replace(state, state=replace(state.state, round=round))
        message = prepared.federation.method.sync(progress.state, client)
        lr = prepared.federation.training.compute_lr(round, 3)
        order = replace(encoder.order("train", round, CLIENT, client, message), lr=lr).to_envelope()
        reply = open_reply(transport.service.answer(order))
        assert (reply.round, reply.task) == (round, "train")


def test_an_invitation_s_config_that_is_nested_too_deeply_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node(tiny_folder, tmp_path))
    for config in ("[" * 100_000, '{"a": ' * 50_000, "[1]"):
        asked = Invitation(run="run", version=__version__, config=config)
        assert read_header(Introduction, service.answer(asked.to_envelope())).refused is not None
        with pytest.raises(ValueError, match=r"nested too deeply|a config is an object"):
            asked.read_values()


def test_a_run_s_name_chooses_a_folder_and_leads_out_of_none(tmp_path: Path) -> None:
    """The name is the server's: no path of it is followed, and other letters are another run, on any disk."""
    names = ("a", "A", "../../home", "/etc", "", "a" * 5000, "é\0")
    folders = {get_run_folder(tmp_path, name) for name in names}
    assert len(folders) == len({folder.name.lower() for folder in folders}) == len(names)
    assert {folder.parent for folder in folders} == {tmp_path}
    assert get_run_folder(tmp_path, "a").name == hashlib.sha256(b"a").hexdigest()[:32]


ORDER, REPLY = Envelope("order", b"weights"), Envelope("reply é", b"new\nweights")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "serial"


@pytest.mark.parametrize(
    ("order", "serial"), [(ORDER, 4), (Envelope("order", b"other weights"), 5), (Envelope("orderw", b"eights"), 5)]
)
def test_older_orders_and_others_with_the_same_serial_are_refused(path: Path, order: Envelope, serial: int) -> None:
    """Also one whose bytes are the same, of another header."""
    LastOrderFile(path).begin(ORDER, 5)
    with pytest.raises(FedspanError, match=f"order {serial} arrived before, or is older than order 5"):
        LastOrderFile(path).begin(order, serial)
    assert LastOrderFile(path).begin(order, 6) is None


@pytest.mark.parametrize("damage", [b"", b"reply \xff\n", b"reply\nother weights"])
def test_a_damaged_reply_is_none(path: Path, damage: bytes) -> None:
    order = LastOrderFile(path)
    order.begin(ORDER, 5)
    order.close(REPLY)
    path.with_name("serial-reply").write_bytes(damage)
    with refused("serial", "order 5 arrived before"):
        LastOrderFile(path).begin(ORDER, 5)


def test_an_interrupted_order_is_started_again_but_not_for_ever(path: Path) -> None:
    for number in range(16):
        order = LastOrderFile(path)
        assert order.begin(ORDER, 5) is None
        assert order.is_recorded is (number > 0)
        order.mark_recorded()
    with refused("serial", "order 5 was interrupted 16 times"):
        LastOrderFile(path).begin(ORDER, 5)
    assert load_last_order(path).starts == 16
    assert LastOrderFile(path).begin(ORDER, 6) is None


def test_a_run_in_which_the_node_does_not_participate_leaves_nothing(tmp_path: Path) -> None:
    order = LastOrderFile(tmp_path / "missing" / "serial")
    assert order.begin(ORDER, 5) is None
    order.close(REPLY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"serial": -1}', b'{"serial": 1, "more": 2}', b"\xff"])
def test_a_damaged_file_is_named_with_the_remedy(path: Path, content: bytes) -> None:
    assert load_last_order(path) == LastOrder()
    path.write_bytes(content)
    with refused(str(path)):
        load_last_order(path)


ESCAPES = "\x1b]0;title\x07\x1b[2J\u202e"
FORGED = "00:00:00 round 1: train done"


@pytest.fixture
def log() -> Iterator[StringIO]:
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(ConsoleFormatter())
    logger, level = logging.getLogger("fedspan"), logging.getLogger("fedspan").level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)


def lines(log: StringIO) -> list[str]:
    text = log.getvalue()
    assert not set(text) & {"\x1b", "\x07", "\u202e", "\r"}, text
    return text.splitlines()


@pytest.mark.parametrize(
    "config",
    [
        {ESCAPES: 1},
        {"training": {f"{ESCAPES}\n{FORGED}": 1}},
        {"model": {"name": f"{ESCAPES}\n{FORGED}"}},
        {"model": {"name": "builtin:all-minilm-l6-v2", "adapter": f"{ESCAPES}\n{FORGED}"}},
        {"method": {"name": f"{ESCAPES}\n{FORGED}"}},
    ],
)
def test_the_config_of_an_invitation_is_shown_as_text(
    config: dict[str, object], log: StringIO, tiny_folder: Path, tmp_path: Path
) -> None:
    invitation = Invitation(run="run", version=__version__, config=json.dumps(config))
    NodeService(node(tiny_folder, tmp_path)).answer(invitation.to_envelope())
    (line,) = lines(log)
    assert re.fullmatch(r"\d\d:\d\d:\d\d the invitation to run is refused: `.+", line)


@pytest.mark.parametrize("field", ["run", "version"])
def test_a_run_with_an_unprintable_name_is_no_invitation(field: str, tiny_folder: Path, tmp_path: Path) -> None:
    header = {"task": "invite", "run": "run", "version": __version__, "config": "{}", field: f"{ESCAPES}\n{FORGED}"}
    with pytest.raises(ValueError, match="invisible characters") as caught:
        NodeService(node(tiny_folder, tmp_path)).answer(Envelope(json.dumps(header)))
    assert "\x1b" not in str(caught.value)


def test_a_message_is_one_line_whatever_it_quotes(log: StringIO) -> None:
    try:
        raise ValueError(f"{ESCAPES}\n{FORGED}")
    except ValueError:
        logging.getLogger("fedspan.x").exception("failed: %s", f"{ESCAPES}\r\n{FORGED}")
    first, *rest = lines(log)
    assert first.endswith(f"\\r\\n{FORGED}")
    assert f"  {FORGED}" in rest
    assert all(line.startswith("  ") for line in rest)


MARKER = "zebrawort"
QUOTING = [
    KeyError(MARKER),
    ValueError(f"no number: {MARKER}"),
    UnicodeDecodeError("utf-8", MARKER.encode(), 0, 1, f"in {MARKER}"),
    OSError(errno.EACCES, f"no access to {MARKER}", f"/patients/{MARKER}"),
    OSError(MARKER),
    FedspanError("data.train", MARKER, f"a text other than {MARKER}", problem=MARKER),
    FedspanError(f"/patients/{MARKER}", MARKER, problem=f"{MARKER} is damaged"),
    FedspanError(f"{MARKER} ", MARKER),
]
"""Errors that quote an example, a label or a path of the owner's."""
PLACES = {
    "fedspan.tasks.classification.SequenceClassification.collate": ("train", "evaluate"),
    "fedspan.deployment.joined_run.DiskClientStore.store": ("train",),
    "fedspan.clients.metric_noise.add_noise": ("evaluate",),
    "fedspan.deployment.joined_run.write_model": ("export",),
}
"""What carries out orders of these kinds."""


def test_an_error_while_an_order_runs_tells_the_server_nothing_of_data_or_paths(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: CapturedLog
) -> None:
    config = node(tiny_folder, tmp_path, limits={"evaluation_epsilon": 0.1})
    run, transport = served(tiny_folder, NodeService(config), method={"name": "fedsa-lora"})
    trained = run.federation.run_round(run.federation.begin())
    run.evaluator.evaluate_clients(trained.progress)
    run.federation.conclude(trained.progress)
    orders = {order.task: order for order in map(decode_order, transport.sent)}
    serial = max(order.serial for order in orders.values())
    for place, tasks in PLACES.items():
        for task in tasks:
            for error in QUOTING:

                def fail(*_: Any, error: Exception = error, **__: Any) -> Any:
                    try:
                        raise RuntimeError(MARKER)
                    except RuntimeError as cause:
                        raise error from cause

                caplog.clear()
                serial += 1
                with monkeypatch.context() as patch:
                    patch.setattr(place, fail)
                    reply = transport.service.answer(replace(orders[task], serial=serial).to_envelope())
                assert MARKER in caplog.text, f"{place} was not called"
                failed = decode_reply(reply).failed
                if place.endswith(".collate") and task == "evaluate" and not isinstance(error, FedspanError):
                    assert failed is None, "noise hides whether an evaluation fails"
                else:
                    assert (failed or "").endswith("; see the client's own log"), reply
                assert MARKER not in reply.header
                assert reply.body == b""
