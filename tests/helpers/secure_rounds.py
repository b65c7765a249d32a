"""Federations under secure aggregation in one process, with clients that come and go between the phases."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedspan.assembly.run import Prepared
from fedspan.clients.host import Host
from fedspan.clients.refusals import refuse_any
from fedspan.clients.secagg import SecureClient
from fedspan.clients.secagg_store import DiskSessionStore
from fedspan.clients.store import DiskClientStore
from fedspan.core.method import Wrapper
from fedspan.core.values import Reduced, ServerState
from fedspan.crypto.masks import Ring
from fedspan.federation.config import SecureSettings
from fedspan.federation.federation import Federation
from fedspan.federation.progress import Progress, RoundResult
from fedspan.federation.protocol import Envelope, Order
from fedspan.federation.secagg.messages import Phase, decode_request
from fedspan.federation.transport import Orders
from fedspan.training.loop import LoopEngine
from fedspan.transports.in_process import simulate
from helpers.round_settings import with_rules

from .reply_transport import Replies, ReplyingTransport

Lose = Callable[[Order | Phase], bool]
Spoil = Callable[[Order | Phase, Envelope], Envelope | str]
GONE = "its node is not online"


def nobody(_: Order | Phase) -> bool:
    """No client is lost."""
    return False


def good(_: Order | Phase, back: Envelope) -> Envelope:
    """Every reply arrives as it was sent."""
    return back


def gone_at(phase: str, *ids: str, attempts: int = 99) -> Lose:
    """Clients that do not answer a phase, nor what comes after it, in the first attempts."""
    order = ("keys", "shares", "train", "second", "confirm", "unmask")

    def lose(asked: Order | Phase) -> bool:
        return asked.to in ids and asked.attempt < attempts and order.index(asked.task) >= order.index(phase)

    return lose


class Stage(ReplyingTransport):
    """A transport to hosts, each re-created from its disk for every envelope, as after a restart.

    Args:
        make: Function that makes a host of one client, given its id.
        lose: Clients that do not answer, by phase.
        spoil: Function that alters an answer.
    """

    def __init__(self, make: Callable[[str], Host], lose: Lose, spoil: Spoil) -> None:
        self.make, self.lose, self.spoil = make, lose, spoil
        self.asked: list[tuple[str, int, str]] = []
        self.sent: list[tuple[Order | Phase, Envelope]] = []
        self.came: list[tuple[Order | Phase, Envelope]] = []

    def replies(self, envelopes: Orders, seconds: float, *, wait_for_offline: bool = False) -> Replies:
        for id in sorted(envelopes, reverse=True):
            envelope, limit = envelopes[id], envelopes.compute_reply_bytes(id)
            asked = decode_request(envelope)
            self.asked.append((asked.task, asked.attempt, id))
            self.sent.append((asked, envelope))
            if self.lose(asked):
                yield id, GONE
                continue
            try:
                back = self.make(id).reply(asked)
            except Exception as error:
                back = refuse_any(asked, error)
            assert limit is None or len(back.body) <= limit
            self.came.append((asked, back))
            yield id, self.spoil(asked, back)


@dataclass(frozen=True, kw_only=True)
class Noted(Wrapper):
    """A method that keeps what its updates were given."""

    reduced: list[Reduced] = field(default_factory=list)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        self.reduced.append(reduced)
        return self.inner.update(state, reduced)


def secured(
    prepared: Prepared,
    folder: Path,
    *,
    lose: Lose = nobody,
    spoil: Spoil = good,
    settings: SecureSettings | None = None,
    least: int = 3,
    method: Any = None,
    **rules: Any,
) -> tuple[Federation, Stage]:
    """Return a prepared run's federation with masked replies, and the transport to its clients.

    Args:
        folder: Folder of the clients' session stores.
        least: Smallest number of clients in whose sum a client hides.
        method: The clients' method; None: the server's.
    """
    here, engine = prepared.federation, prepared.engine
    loop = LoopEngine(engine.adapted, prepared.task, engine.settings, engine.seed, privacy=engine.privacy)
    client_store = DiskClientStore(folder)

    def make(id: str) -> Host:
        secure = SecureClient(id, DiskSessionStore(folder), least)
        known = method or here.method
        return Host(known, loop, {id: here.clients[id]}, here.examples, client_store, 32, secure={id: secure})

    stage = Stage(make, lose, spoil)
    federation = Federation(
        here.method,
        engine,
        here.clients,
        here.examples,
        with_rules(here.settings, secure=settings or SecureSettings(), **rules),
        stage,
    )
    return federation, stage


def among(federation: Federation, *ids: str) -> Federation:
    """The federation in one process, of some clients alone."""
    clients = [federation.clients[id] for id in ids]
    return simulate(federation.method, federation.engine, clients, federation.examples, federation.settings.trust())


def bound(federation: Federation, asked: Collection[str], survivors: Collection[str]) -> float:
    """What an entry of a mean may be off by, of clients who were asked to train and of those who did."""
    weights = {id: federation.clients[id].client.weight for id in asked}
    secure = federation.settings.secure
    assert secure is not None
    ring = Ring(secure.bits, secure.clip, len(weights))
    return ring.bound_error(len(survivors)) * max(weights.values()) / sum(weights[id] for id in survivors)


def require_close(one: Mapping[str, Tensor], other: Mapping[str, Tensor], limit: float) -> float:
    """Check that means differ by no more than a bound and two roundings of their format; gives by how much."""
    assert one.keys() == other.keys()
    worst = 0.0
    for name, value in one.items():
        assert (value.dtype, value.shape) == (other[name].dtype, other[name].shape), name
        apart = (value.double() - other[name].double()).abs()
        rounding = 2 * torch.finfo(value.dtype).eps * other[name].double().abs()
        assert bool((apart <= limit + rounding).all()), (name, float(apart.max()), limit)
        worst = max(worst, float(apart.max())) if value.numel() else worst
    return worst


def require_same_round(secure: RoundResult, plain: RoundResult) -> None:
    """Check that two rounds have the same clients and losses."""
    assert secure.loss == plain.loss or abs(secure.loss - plain.loss) < 1e-9 * abs(plain.loss)
    assert set(plain.cohort) == {
        id for id, round in secure.progress.last_rounds.items() if round == last(secure.progress)
    }


def last(progress: Progress) -> int:
    """Number of the round that ended last."""
    return progress.state.round - 1
