"""The base of wrappers: a method around a method, to which it delegates everything that it does not change."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from fedspan.core.method import Claims, Memory, Method
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


@dataclass(frozen=True, kw_only=True)
class Wrapper(Method):
    """Delegates everything to ``inner``.

    Args:
        inner: The wrapped method.
    """

    inner: Method

    @property
    def spec(self) -> Spec:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Spec of the inner method."""
        return self.inner.spec

    def declare_claims(self) -> Claims:
        return self.inner.declare_claims()

    def get_rank(self, client: Client | None) -> int:
        return self.inner.get_rank(client)

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

    def build_second_order(self, state: ServerState, reduced: Reduced) -> Message:
        return self.inner.build_second_order(state, reduced)

    def build_second_reply(self, order: Message, tensors: Tensors, client: Client, round: int) -> Message:
        return self.inner.build_second_reply(order, tensors, client, round)

    def list_added_epochs(self) -> tuple[int, ...]:
        return self.inner.list_added_epochs()

    def estimate_messages(self, layer: LayerSpec, rank: int, round: int) -> tuple[Message, Message] | None:
        return self.inner.estimate_messages(layer, rank, round)


@dataclass(frozen=True, kw_only=True)
class RegisteredWrapper(Wrapper):
    """Base of the wrappers in the registry, which the user's config adds around a method.

    Args:
        inner: The wrapped method.
        seed: Seed of the wrapper's own random draws.
    """

    paper: ClassVar[str]
    kind: ClassVar[str]
    """Effect on a method; a method cannot have two wrappers of one kind."""

    seed: int = 0

    @abstractmethod
    def explain_refusal(self, claims: Claims) -> str | None:
        """Explain why it cannot wrap a method with these claims, as a clause; None if it can."""

    def explain_training_refusal(self, optimizer: OptimizerSpec, max_grad_norm: float) -> str | None:
        """Explain why it does not work with such local training, as a clause; None if it does."""
        return None


def compute_common_start(method: Method, state: ServerState) -> Tensors:
    """Return the initial tensors that all clients of a round share: those of the global model."""
    return method.start(method.sync(state, None), None, {}, state.round).tensors


def add_prefix(prefix: str, tensors: Tensors) -> Tensors:
    """Prefix tensor names with a wrapper's own prefix, which distinguishes them from the model's."""
    return {prefix + name: value for name, value in tensors.items()}


def split_prefix(prefix: str, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Split tensors into ``(tensors with the prefix, which is removed; all others)``."""
    selected = {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}
    return selected, {name: value for name, value in tensors.items() if not name.startswith(prefix)}
