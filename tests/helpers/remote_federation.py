"""A federation whose clients are behind a transport, in one process."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedspan.assembly.run import Prepared
from fedspan.clients.host import Host
from fedspan.clients.refusals import refuse
from fedspan.clients.store import DiskClientStore
from fedspan.errors import FedspanError
from fedspan.federation.federation import Federation
from fedspan.federation.protocol import Envelope, decode_order
from fedspan.training.loop import LoopEngine
from helpers.round_settings import with_rules

from .reply_transport import Replies, ReplyingTransport


class LocalTraining(ReplyingTransport):
    """A transport to hosts in this process; the last client asked answers first."""

    def __init__(self, hosts: Mapping[str, Host]) -> None:
        self.hosts = hosts
        self.tasks: list[str] = []

    def replies(self, envelopes: Mapping[str, Envelope], seconds: float, *, wait_for_offline: bool = False) -> Replies:
        for id in sorted(envelopes, reverse=True):
            order = decode_order(envelopes[id])
            self.tasks.append(order.task)
            try:
                answer = self.hosts[id].answer(order)
            except FedspanError as error:
                answer = refuse(order, error)
            limit = envelopes.compute_reply_bytes(id)
            assert len(answer.body) <= limit  # derived from the job, and no client sends more
            yield id, answer.to_envelope()


def remote(
    prepared: Prepared, folder: Path, make: Callable[[dict[str, Host]], Any] = LocalTraining, **rules: Any
) -> Federation:
    """The same federation with its clients behind a transport, which is made of their hosts."""
    here, engine = prepared.federation, prepared.engine
    loop = LoopEngine(engine.adapted, prepared.task, engine.settings, engine.seed, privacy=engine.privacy)
    client_store = DiskClientStore(folder)
    hosts = {
        id: Host(here.method, loop, {id: client_data}, here.examples, client_store, 32, agreed="config")
        for id, client_data in here.clients.items()
    }
    settings = with_rules(here.settings, **rules)
    return Federation(here.method, engine, here.clients, here.examples, settings, make(hosts))


def require_whole_resend(federation: Federation, folder: Path) -> None:
    """Damage the state of a client after a round: its next reply is missing, and then it is sent everything."""
    progress = federation.run_round(federation.begin()).progress
    damaged = next(path for path in folder.rglob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    result = federation.run_round(progress)
    (failure,) = result.failures
    assert "client memory" in failure.reason
    assert failure.client not in result.progress.last_rounds
    after = federation.run_round(result.progress)
    assert not after.failures
    assert set(after.progress.last_rounds.values()) == {2}
