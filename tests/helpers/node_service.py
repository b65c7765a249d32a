"""A data owner's node in this process: its config, its service, and a run on a server that reaches it directly."""

import json
from pathlib import Path
from typing import Any

from fedspan import __version__
from fedspan.assembly.run import Prepared
from fedspan.assembly.server import build_server_clients, connect, prepare_server
from fedspan.config.node import NodeConfig
from fedspan.deployment.handshake import Introduction, Invitation, build_server_config, compute_base_digest
from fedspan.deployment.node import NodeService
from fedspan.deployment.submission import explain_base
from fedspan.federation.protocol import Envelope, Reply, decode_reply, read_header

from . import tiny
from .reply_transport import ReplyingTransport

CLIENT = "clinic"
OPEN = {
    **{"approve": "auto", "min_batch": 1, "train_examples": 1, "evaluation_examples": 1, "evaluation_epsilon": None},
    **{"head_statistics": "exact", "statistics_max_length": 2, "statistics_examples": 1, "class_examples": 2},
}
"""Limits of a node with few examples that sends what a server asks for, as measured."""


def values(tiny_folder: Path, **changes: Any) -> dict[str, Any]:
    """A deployment's config."""
    made = tiny.settings(tiny_folder, **changes)
    made["data"] = {"labels": list(tiny.LABELS)}
    made["partition"] = {"partitioner": "iid", "clients": 1, "validation": 0.1, "test": 0.1}
    made["federation"] = {"rounds": 3, **changes.get("federation", {})}
    return made


def node(tiny_folder: Path, folder: Path, **changes: Any) -> NodeConfig:
    """A node's config, whose limits allow the tiny model and few examples."""
    given = {"id": CLIENT, "server": "localhost:1", "data": {"train": str(tiny_folder / "corpus.csv")}, **changes}
    limits = {"models": [f"{tiny_folder}/*"], **OPEN, **given.pop("limits", {})}
    return NodeConfig.model_validate({"folder": str(folder), "limits": limits, **given})


def invitation(config: dict[str, Any], **changes: Any) -> Invitation:
    """An invitation to a run with this config."""
    return Invitation(**{"run": "run", "version": __version__, "config": json.dumps(config), **changes})


def introduced(service: NodeService, config: dict[str, Any], **changes: Any) -> Introduction:
    """What a node answers to the invitation to such a run."""
    return read_header(Introduction, service.answer(invitation(config, **changes).to_envelope()))


class Direct(ReplyingTransport):
    """A transport to one node's service."""

    def __init__(self, service: NodeService) -> None:
        self.service = service
        self.sent: list[Envelope] = []
        self.came: list[Reply] = []

    def replies(self, envelopes: Any, seconds: float, *, wait_for_offline: bool = False) -> Any:
        for id, envelope in envelopes.items():
            self.sent.append(envelope)
            answer = self.service.answer(envelope)
            self.came.append(decode_reply(answer))
            yield id, answer


def served(tiny_folder: Path, service: NodeService, **changes: Any) -> tuple[Prepared, Direct]:
    """A server's run on the tiny model with one node."""
    return serve(values(tiny_folder, **changes), service)


def serve(given: dict[str, Any], service: NodeService) -> tuple[Prepared, Direct]:
    """A server's run of a deployment's config with one node, whose base is the server's."""
    prepared = prepare_server(build_server_config(given))
    introduction = introduced(service, given)
    assert introduction.refused is None
    assert explain_base(prepared, compute_base_digest(prepared.model), introduction) is None
    transport = Direct(service)
    clients = build_server_clients(prepared.config, prepared.engine.adapted.spec, {CLIENT: introduction.examples})
    return connect(prepared, transport, clients=clients, run="run"), transport
