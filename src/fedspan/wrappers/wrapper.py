"""What a wrapper is: a method around a method, passing through whatever it does not change."""

from __future__ import annotations

from dataclasses import dataclass

from fedspan.core.method import Claims, Memory, Method, Traffic
from fedspan.core.values import (
    Client,
    Contribution,
    Job,
    LayerSpec,
    Message,
    Reduced,
    ServerState,
    Spec,
    Trained,
    Weights,
)

__all__ = ["Wrapper"]


@dataclass(frozen=True, kw_only=True)
class Wrapper(Method):
    """Delegates everything to ``inner``.

    Args:
        inner: the wrapped method.
    """

    inner: Method

    @property
    def spec(self) -> Spec:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The inner method's."""
        return self.inner.spec

    def declared(self) -> Claims:
        return self.inner.declared()

    def rank(self, client: Client | None) -> int:
        return self.inner.rank(client)

    def init(self, weights: Weights) -> ServerState:
        return self.inner.init(weights)

    def sync(self, state: ServerState, client: Client | None) -> Message:
        return self.inner.sync(state, client)

    def start(self, message: Message, client: Client | None, memory: Memory) -> Job:
        return self.inner.start(message, client, memory)

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory) -> tuple[Job | Message, Memory]:
        return self.inner.finish(job, trained, client, memory)

    def contribute(self, message: Message, client: Client) -> Contribution:
        return self.inner.contribute(message, client)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        return self.inner.update(state, reduced)

    def traffic(self, layer: LayerSpec, rank: int, clients: int, round: int) -> Traffic:
        return self.inner.traffic(layer, rank, clients, round)
