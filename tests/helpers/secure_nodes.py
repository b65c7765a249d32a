"""Three data owners under secure aggregation, their nodes in one process with the server."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedspan import __version__
from fedspan.assembly.run import Prepared
from fedspan.assembly.server import build_server_clients, connect, prepare_server
from fedspan.config.node import NodeConfig
from fedspan.deployment.handshake import Introduction, Invitation, build_server_config
from fedspan.deployment.node import NodeService
from fedspan.federation.protocol import Envelope, read_header
from fedspan.federation.secagg.messages import decode_request

from . import tiny
from .node_service import OPEN
from .reply_transport import Replies, ReplyingTransport

CLINICS = ("clinic-a", "clinic-b", "clinic-c")


def values(tiny_folder: Path, **federation: Any) -> dict[str, Any]:
    """Values of a config of three clients under secure aggregation, unless they are changed."""
    made = tiny.settings(tiny_folder, method={"name": "fedsa-lora"})
    made["data"] = {"labels": list(tiny.LABELS)}
    made["partition"] = {"partitioner": "iid", "clients": 3, "validation": 0.1, "test": 0.1}
    made["federation"] = {"rounds": 3, "retries": 0, **federation}
    return made


def node(id: str, tiny_folder: Path, folder: Path, **limits: Any) -> NodeConfig:
    """The config of a data owner, whose limits allow the tiny model."""
    given = {"id": id, "server": "localhost:1", "data": {"train": str(tiny_folder / "corpus.csv")}}
    limits = {"models": [f"{tiny_folder}/*"], **OPEN, **limits}
    return NodeConfig.model_validate({"folder": str(folder / id), "limits": limits, **given})


class Direct(ReplyingTransport):
    """A transport to nodes, which ``make`` returns for each envelope."""

    def __init__(self, make: Callable[[str], NodeService], lost: Callable[[Any], bool]) -> None:
        self.make, self.lost = make, lost
        self.sent: list[Envelope] = []
        self.came: list[Envelope] = []

    def replies(self, envelopes: Mapping[str, Envelope], seconds: float, *, wait_for_offline: bool = False) -> Replies:
        for id, envelope in envelopes.items():
            self.sent.append(envelope)
            if self.lost(decode_request(envelope)):
                yield id, "its node is not online"
                continue
            self.came.append(self.make(id).answer(envelope))
            yield id, self.came[-1]


def served(
    tiny_folder: Path,
    folder: Path,
    lost: Callable[[Any], bool] = lambda asked: False,
    secure: Mapping[str, Any] | None = None,
    restarts: bool = False,
    **limits: Any,
) -> tuple[Prepared, Direct]:
    """A server's run with three nodes, which start again for each envelope, or when ``make``'s cache is cleared."""
    given = values(tiny_folder, secure=secure or {})
    prepared = prepare_server(build_server_config(given))

    def start(id: str) -> NodeService:
        return NodeService(node(id, tiny_folder, folder, **limits))

    make = start if restarts else functools.cache(start)
    invitation = Invitation(run="run", version=__version__, config=json.dumps(given))
    told = {id: read_header(Introduction, make(id).answer(invitation.to_envelope())) for id in CLINICS}
    assert [one.refused for one in told.values()] == [None] * 3
    clients = build_server_clients(
        prepared.config, prepared.engine.adapted.spec, {id: one.examples for id, one in told.items()}
    )
    transport = Direct(make, lost)
    agreed = invitation.digest
    return connect(prepared, transport, clients=clients, run="run", agreed=agreed), transport
