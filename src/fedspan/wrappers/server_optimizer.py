"""Base of server optimizers: the mean change of transmitted tensors is a gradient for an optimizer on the server.

D = sum_i p_i (x_i - x);   x <- x + step(D),   for every transmitted tensor x, entry by entry
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedspan.core.method import Claims, declare_decay_rate
from fedspan.core.tensors import Tensors, is_extra
from fedspan.core.values import Reduced, ServerState
from fedspan.errors import FedspanError
from fedspan.wrappers.wrapper import RegisteredWrapper, add_prefix, compute_common_start, split_prefix


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer(RegisteredWrapper):
    """Replaces the mean of the clients' tensors with an optimizer step, before the method's own update.

    Moments of tensors that the method re-initialized are reset; moments of the extras persist.
    """

    kind: ClassVar[str] = "server optimizer"
    moments: ClassVar[tuple[str, ...]]
    """Moments that the optimizer stores for every tensor."""

    @abstractmethod
    def get_initial(self, moment: str) -> float:
        """Return the initial value of a moment's entries."""

    @abstractmethod
    def step(self, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
        """Compute the step that is added to a tensor, given its mean change, and its new moments by kind."""

    def declare_claims(self) -> Claims:
        return replace(self.inner.declare_claims(), exact=False)

    def explain_refusal(self, claims: Claims) -> str | None:
        if claims.reduction == "stack":
            return "steps along the mean of the replies, and this method's server needs a stack of them"
        if claims.reinitializes:
            return "needs tensors that persist between rounds, and this method re-initializes them in every round"
        if claims.moves_base:
            return "changes the average of the factors, and this method moves the base by what the same replies give"
        if claims.sends != "values":
            other = claims.describe_other_replies()
            return f"needs replies with the tensors from which clients start, and this method's {other}"
        return None

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        prefix = f"{type(self).__name__}/"
        moments, inner_memory = split_prefix(prefix, state.memory)
        inner_state = replace(state, memory=inner_memory)
        start = compute_common_start(self.inner, inner_state)
        stored, stepped = dict(moments), dict[str, Tensor]()
        for name, mean in reduced.mean.items():
            if name not in start:
                field = "method.wrappers"
                raise FedspanError(field, type(self).__name__, problem=f"clients do not start from the tensor {name}")
            before = {
                kind: moments.get(f"{kind}/{name}", torch.full_like(mean, self.get_initial(kind)))
                for kind in self.moments
            }
            step, after = self.step(mean - start[name], before)
            stepped[name] = start[name] + step
            stored.update({f"{kind}/{name}": value for kind, value in after.items()})
        result = self.inner.update(inner_state, replace(reduced, mean=stepped))
        if result.generation != state.generation:
            stored = {key: value for key, value in stored.items() if is_extra(key.partition("/")[2])}
        return replace(result, memory={**result.memory, **add_prefix(prefix, stored)})


@dataclass(frozen=True, kw_only=True)
class Adaptive(ServerOptimizer):
    """Base of FedAdagrad, FedAdam and FedYogi: algorithm 2 of "Adaptive Federated Optimization" (arXiv:2003.00295).

    ``m <- beta1 m + (1 - beta1) D;  v <- ...;  x <- x + lr m / (sqrt(v) + tau)``, from m = 0 and v = tau^2.

    Args:
        lr: Learning rate of the server.
        beta1: Share of the first moment that is retained.
        tau: Adaptivity: added to the root of the second moment, which starts at tau^2.
    """

    paper: ClassVar[str] = "Adaptive Federated Optimization (ICLR 2021, arXiv:2003.00295)"
    moments: ClassVar[tuple[str, ...]] = ("m", "v")

    lr: float = 1e-2
    beta1: float = declare_decay_rate(0.9)
    tau: float = 1e-3

    @abstractmethod
    def compute_second(self, v: Tensor, squared: Tensor) -> Tensor:
        """Compute the second moment from the old one and the squared mean change."""

    def get_initial(self, moment: str) -> float:
        return self.tau**2 if moment == "v" else 0.0

    def step(self, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
        m = self.beta1 * moments["m"] + (1 - self.beta1) * change
        v = self.compute_second(moments["v"], change.square())
        return self.lr * m / (v.sqrt() + self.tau), {"m": m, "v": v}
