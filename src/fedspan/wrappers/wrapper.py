"""The base of the wrappers in the registry, and what several of them share."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from fedspan.core.method import Claims, Method, Wrapper
from fedspan.core.tensors import Tensors
from fedspan.core.values import (
    OptimizerSpec,
    ServerState,
)


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
