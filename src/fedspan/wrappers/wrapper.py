"""What a wrapper is: a method around a method, passing through whatever it does not change."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedspan.core.method import Claims, Memory, Method, Traffic
from fedspan.core.tensors import Tensors
from fedspan.core.values import (
    Client,
    Contribution,
    Job,
    LayerSpec,
    Message,
    OptimizerSpec,
    Reduced,
    ServerState,
    Spec,
    Trained,
    Weights,
)

__all__ = ["RegisteredWrapper", "Wrapper", "common_start", "with_prefix", "without_prefix"]


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

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        return self.inner.start(message, client, memory, round)

    def finish(
        self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
    ) -> tuple[Job | Message, Memory]:
        return self.inner.finish(job, trained, client, memory, round)

    def contribute(self, message: Message, client: Client) -> Contribution:
        return self.inner.contribute(message, client)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        return self.inner.update(state, reduced)

    def traffic(self, layer: LayerSpec, rank: int, cohort: Sequence[int], round: int) -> Traffic:
        return self.inner.traffic(layer, rank, cohort, round)

    def upload(self, elements: int) -> int:
        return self.inner.upload(elements)


@dataclass(frozen=True, kw_only=True)
class RegisteredWrapper(Wrapper):
    """Base of the wrappers in the registry, which the user's config puts around a method.

    Args:
        inner: the wrapped method.
        seed: of the wrapper's own draws.
    """

    paper: ClassVar[str]
    kind: ClassVar[str]
    """What it does to a method; two wrappers of one kind don't go around one method."""

    seed: int = 0

    @abstractmethod
    def refusal(self, claims: Claims) -> str | None:
        """Why it cannot go around a method with such claims, as a clause; None if it can."""

    def training_refusal(self, optimizer: OptimizerSpec, max_grad_norm: float) -> str | None:
        """Why it cannot go with such local training, as a clause; None if it can."""
        return None


def common_start(method: Method, state: ServerState) -> Tensors:
    """What the clients of a round start from, as far as it is the same for all: that of the global model."""
    return method.start(method.sync(state, None), None, {}, state.round).tensors


def with_prefix(prefix: str, tensors: Tensors) -> Tensors:
    """Tensors under names that begin with a wrapper's own prefix, so that nobody takes them for the model's."""
    return {prefix + name: value for name, value in tensors.items()}


def without_prefix(prefix: str, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """``(those whose names begin with the prefix, without it; all others)``."""
    own = {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}
    return own, {name: value for name, value in tensors.items() if not name.startswith(prefix)}
