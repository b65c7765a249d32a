"""The transport of the simulator: one host in this process, which has all clients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fedspan.clients.data import OverlayMapping, overlay
from fedspan.clients.host import Host, refuse_any
from fedspan.clients.store import ClientState
from fedspan.core.method import Memory, Method
from fedspan.core.values import OptimizerState, ServerState
from fedspan.federation.aggregation.aggregation import AggregationFactory
from fedspan.federation.aggregation.plaintext import PlaintextAggregation
from fedspan.federation.federation import Federation, clients_by_id
from fedspan.federation.orders import OnReply, OnTrained, Orders, Transport
from fedspan.federation.progress import ClientData, Progress
from fedspan.federation.protocol import Order, Reply, decode_order
from fedspan.federation.secagg.messages import decode_phase
from fedspan.federation.settings import RoundSettings
from fedspan.federation.validation import ReplyRules
from fedspan.tasks.task import Examples
from fedspan.training.engine import Engine

__all__ = ["InProcess", "ProgressStore", "simulate"]


class ProgressStore:
    """The client store of a simulation: a progress, and on top of it what the round changes.

    Args:
        progress: The progress before the round, which stays as it is.
    """

    def __init__(self, progress: Progress) -> None:
        self.memories = overlay(progress.memories)
        self.optimizers = overlay(progress.optimizers)

    def load(self, client: str, round: int) -> ClientState:
        """``ClientStore.load``; a progress has one version of each client, the accepted one."""
        return ClientState(self.memories.get(client, {}), _Phases(self.optimizers, client))

    def store(self, client: str, round: int, kept: ClientState, needed: frozenset[int]) -> None:
        """``ClientStore.store``; what the phases of this round did not change stays where it is."""
        self.memories[client] = kept.memory
        changed = kept.moments.changes if isinstance(kept.moments, OverlayMapping) else kept.moments
        for phase, moments in changed.items():
            self.optimizers[f"{client}/{phase}"] = moments


class _Phases(Mapping[str, tuple[OptimizerState, int]]):
    """A client's moments by phase: those of a probe mean nothing to the training after it."""

    def __init__(self, optimizers: Mapping[str, tuple[OptimizerState, int]], client: str) -> None:
        self._optimizers, self._prefix = optimizers, f"{client}/"

    def __getitem__(self, phase: str) -> tuple[OptimizerState, int]:
        return self._optimizers[self._prefix + phase]

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(self._prefix) for key in self._optimizers if key.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _LazyOrders(Mapping[str, Order]):
    """Orders to train, opened as they are taken."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders

    def __getitem__(self, id: str) -> Order:
        return decode_order(self._orders[id])

    def __iter__(self) -> Iterator[str]:
        return iter(self._orders)

    def __len__(self) -> int:
        return len(self._orders)


class InProcess(Transport):
    """Hands orders to a host in this process.

    What goes wrong in training stops the round, with its own error: in a simulation it is a mistake of the run.

    Args:
        host: The host of all clients.
    """

    def __init__(self, host: Host) -> None:
        self.host = host

    def begin(self, progress: Progress, on_trained: OnTrained | None = None) -> None:
        """``Transport.begin``."""
        self.host.store = ProgressStore(progress)
        self.host.on_trained = on_trained
        self.host.share_base(progress.state.base)

    def stored(self) -> tuple[Mapping[str, Memory], Mapping[str, tuple[OptimizerState, int]]]:
        """``Transport.stored``."""
        store = self.host.store
        assert isinstance(store, ProgressStore)
        return store.memories, store.optimizers

    def exchange(self, orders: Orders, on_reply: OnReply, seconds: float, *, patient: bool = False) -> None:
        """``Transport.exchange``."""
        enough = False

        def answered(answer: Reply) -> None:
            nonlocal enough
            enough = enough or on_reply(answer.id, answer.envelope())

        if orders.task == "train":
            self.host.train(_LazyOrders(orders), answered)
            return
        for id in orders:
            phase = decode_phase(orders[id])
            try:
                back = self.host.reply(phase)
            except Exception as error:
                back = refuse_any(phase, error)
            if on_reply(id, back):
                return


def simulate(
    method: Method,
    engine: Engine,
    members: Sequence[ClientData] | Mapping[str, ClientData],
    examples: Examples,
    settings: RoundSettings,
    rules: ReplyRules | None = None,
    aggregating: AggregationFactory = PlaintextAggregation,
) -> Federation:
    """A federation whose clients are all in this process, on one host.

    Args:
        method: The method, with its wrappers.
        engine: Trains the clients, and has the model.
        members: The clients in any order, or by id in the ids' order (``LazyMapping``).
        examples: What the members' indices point into.
        settings: Rounds, cohort, reduction, privacy, seed.
        rules: When a round stands; None: every selected client has to reply.
        aggregating: Makes the aggregation of a round.
    """
    clients = clients_by_id(members)
    store = ProgressStore(Progress(ServerState()))
    host = Host(method, engine, clients, examples, store, batch_size=1, reveals_losses=True)
    return Federation(method, engine, clients, examples, settings, InProcess(host), rules, aggregating)
