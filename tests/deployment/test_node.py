"""A data owner's service: what it agrees to, what it refuses, what it remembers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny
from fedspan import __version__
from fedspan.config.node import NodeConfig, load_node
from fedspan.deployment.handshake import Introduction, Invitation, base_digest, server_config
from fedspan.deployment.node import NodeService
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope, Order, Reply, decode_order, decode_reply, read_header
from fedspan.runs.remote import connect, prepare_server, server_clients
from fedspan.runs.setup import Prepared
from transporting import ReplyingTransport

CLIENT = "clinic"


def values(tiny_folder: Path, **changes: Any) -> dict[str, Any]:
    """A deployment's config."""
    made = tiny.settings(tiny_folder, **changes)
    made["data"] = {"labels": list(tiny.LABELS)}
    made["partition"] = {"partitioner": "iid", "clients": 1, "validation": 0.1, "test": 0.1}
    made["federation"] = {"rounds": 3}
    return made


def node(tiny_folder: Path, folder: Path, **changes: Any) -> NodeConfig:
    given = {"id": CLIENT, "server": "localhost:1", "data": {"train": str(tiny_folder / "corpus.csv")}, **changes}
    return NodeConfig.model_validate({"folder": str(folder), **given})


def invitation(config: dict[str, Any], **changes: Any) -> Invitation:
    return Invitation(**{"run": "run", "version": __version__, "config": json.dumps(config), **changes})


def introduced(holder: NodeService, config: dict[str, Any], **changes: Any) -> Introduction:
    return read_header(Introduction, holder.answer(invitation(config, **changes).envelope()))


class Direct(ReplyingTransport):
    """A transport to one holder."""

    def __init__(self, holder: NodeService) -> None:
        self.holder = holder
        self.sent: list[Envelope] = []

    def replies(self, envelopes: Any, seconds: float, *, patient: bool = False) -> Any:
        for id, envelope in envelopes.items():
            self.sent.append(envelope)
            yield id, self.holder.answer(envelope)


def served(tiny_folder: Path, holder: NodeService, **changes: Any) -> tuple[Prepared, Direct]:
    """A server's run with one node."""
    given = values(tiny_folder, **changes)
    prepared = prepare_server(server_config(given))
    told = introduced(holder, given)
    assert told.refused is None
    assert told.base == base_digest(prepared.model)
    transport = Direct(holder)
    members = server_clients(prepared.config, prepared.engine.adapted.spec, {CLIENT: told.examples})
    rules = prepared.config.federation.reply_rules()
    return connect(prepared, transport, rules, members=members, run="run"), transport


def test_a_node_trains_evaluates_and_goes_on_after_a_restart(tiny_folder: Path, tmp_path: Path) -> None:
    run, transport = served(tiny_folder, NodeService(node(tiny_folder, tmp_path)), method={"name": "fedsa-lora"})
    first = run.federation.run_round(run.federation.begin())
    assert not first.failures
    validation, test = run.evaluator.clients(first.progress)
    assert validation is not None
    assert test is not None
    assert set(test.by_client) == {CLIENT}
    (sent,) = run.federation.beside().transfers
    assert (sent.purpose, sent.client, sent.bytes) == ("evaluate", CLIENT, len(transport.sent[-1].body))
    transport.holder = NodeService(node(tiny_folder, tmp_path))  # whose process was killed
    second = run.federation.run_round(first.progress)
    assert not second.failures
    assert second.progress.held == {CLIENT: 1}
    assert run.federation.conclude(second.progress) == ()
    assert [one.purpose for one in run.federation.beside().transfers] == ["export"]
    assert list(tmp_path.glob("*/adapter/adapter_model.safetensors"))
    assert str(tiny_folder) not in "".join(envelope.header for envelope in transport.sent)


def test_what_was_sent_before_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    holder = NodeService(node(tiny_folder, tmp_path))
    run, transport = served(tiny_folder, holder)
    run.federation.run_round(run.federation.begin())
    (envelope,) = transport.sent
    for one in (holder, NodeService(node(tiny_folder, tmp_path))):
        answer = decode_reply(one.answer(envelope))
        assert answer.failed is not None
        assert "was here before" in answer.failed
    older = replace(decode_order(envelope), serial=decode_order(envelope).serial - 1)
    assert "was here before" in (decode_reply(holder.answer(older.envelope())).failed or "")


def test_an_order_of_a_run_to_which_it_was_not_invited_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    order = Order("train", 0, 0, 0.1, CLIENT, None, b"", run="another", serial=1)
    answer = decode_reply(NodeService(node(tiny_folder, tmp_path)).answer(order.envelope()))
    assert "invited" in (answer.failed or "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("limits", "config", "why"),
    [
        ({"methods": ["rolora"]}, {}, "limits.methods: 'fedit'; one that this node allows: rolora"),
        ({"models": ["roberta-base"]}, {}, "limits.models"),
        ({"rounds": 2}, {}, "limits.rounds: 3; at most 2 on this node"),
        ({}, {"method": {"name": "no such"}}, "method.name"),
        ({}, {"data": {"labels": ["admin", "billing"]}}, "data.train; see"),
        ({}, {"unknown": 1}, "unknown"),
    ],
)
def test_limits_and_labels_are_the_node_s_to_keep(
    limits: dict[str, Any], config: dict[str, Any], why: str, tiny_folder: Path, tmp_path: Path
) -> None:
    told = introduced(NodeService(node(tiny_folder, tmp_path, limits=limits)), {**values(tiny_folder), **config})
    assert told.refused is not None
    assert why in told.refused
    assert "corpus.csv" not in told.refused  # neither paths nor data go out
    assert "symptom" not in told.refused
    assert str(tmp_path) not in told.refused
    assert not list(tmp_path.iterdir())


def test_another_version_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    told = introduced(NodeService(node(tiny_folder, tmp_path)), values(tiny_folder), version="0.0.1")
    assert "version: '0.0.1'" in (told.refused or "")


def test_a_message_larger_than_the_node_takes_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    holder = NodeService(node(tiny_folder, tmp_path, limits={"message_mib": 1}))
    run, transport = served(tiny_folder, holder)
    run.federation.run_round(run.federation.begin())
    order = replace(decode_order(transport.sent[0]), serial=2**52, body=bytes(2**20 + 1))
    answer: Reply = decode_reply(holder.answer(order.envelope()))
    assert "at most 1048576 bytes" in (answer.failed or "")


def test_a_parcel_of_no_kind_is_none(tiny_folder: Path, tmp_path: Path) -> None:
    holder = NodeService(node(tiny_folder, tmp_path))
    for header in ("", "{}", "[]", '{"task": "begin"}', "\x00"):
        with pytest.raises(ValueError, match="header"):
            holder.answer(Envelope(header))


def test_a_server_s_config_names_no_data(tiny_folder: Path) -> None:
    given = values(tiny_folder)
    with pytest.raises(FedspanError, match=r"data\.train"):
        server_config({**given, "data": {"train": "secret.csv"}})
    with pytest.raises(FedspanError, match=r"data\.labels"):
        server_config({**given, "data": {}})
    with pytest.raises(FedspanError, match="baselines"):
        server_config({**given, "baselines": ["local"]})


def test_a_node_s_file_names_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    good = {"id": "a", "server": "h:1", "data": {"train": "own.csv"}, "key": "node.key"}
    (tmp_path / "own.csv").write_text("text,label\n")
    path.write_text(yaml.safe_dump(good))
    found = load_node(path)
    assert found.key == str(tmp_path / "node.key")
    assert found.data["train"] == str(tmp_path / "own.csv")
    path.write_text(yaml.safe_dump({**good, "data": {"train": "{ward}/own.csv", "test": "hub/data"}}))
    assert load_node(path).data == {"train": str(tmp_path / "{ward}" / "own.csv"), "test": "hub/data"}
    for change, field in (({"id": ""}, "id"), ({"limits": {"rounds": 0}}, "limits.rounds"), ({"servr": 1}, "servr")):
        path.write_text(yaml.safe_dump({**good, **change}))
        with pytest.raises(FedspanError) as wrong:
            load_node(path)
        assert wrong.value.field == field
