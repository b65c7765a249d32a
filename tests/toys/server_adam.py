"""FedAdam around a method: the change of the averaged tensors is a gradient for Adam on the server.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, arXiv:2003.00295, algorithm 2:

    D = mean_i x_i - x;  m <- b1 m + (1 - b1) D;  v <- b2 v + (1 - b2) D^2;  x <- x + lr m / (sqrt(v) + tau)

on the tensors that travelled. Moments of tensors that the method re-initialised or rotated start anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from fedspan.core.tensors import is_extra
from fedspan.core.values import Reduced, ServerState
from fedspan.errors import FedspanError
from fedspan.wrappers.wrapper import Wrapper

FIRST, SECOND = "server-adam:m/", "server-adam:v/"


@final
@dataclass(frozen=True, kw_only=True)
class ServerAdam(Wrapper):
    """Adam on the server.

    Args:
        lr: server learning rate.
        betas: of both moments.
        tau: adaptivity, added to the root of the second moment.
    """

    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.99)
    tau: float = 1e-3

    def __post_init__(self) -> None:
        claims = self.declared()
        if claims.reduction == "stack" or claims.reinitialises:
            raise FedspanError(
                "method.server_optimizer",
                "adam",
                "needs replies that sum and tensors that last from round to round; choose another method",
            )

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        own = {name: value for name, value in state.memory.items() if name.startswith((FIRST, SECOND))}
        theirs = replace(state, memory={name: value for name, value in state.memory.items() if name not in own})
        reference = self.inner.start(self.inner.sync(theirs, None), None, {}).tensors
        stepped: dict[str, Tensor] = {}
        for name, mean in reduced.mean.items():
            if name not in reference:
                raise FedspanError("method.server_optimizer", "adam", f"{name} is no tensor that was sent")
            change = mean - reference[name]
            zero = torch.zeros_like(change)
            m = self.betas[0] * own.get(FIRST + name, zero) + (1 - self.betas[0]) * change
            v = self.betas[1] * own.get(SECOND + name, zero) + (1 - self.betas[1]) * change.square()
            stepped[name] = reference[name] + self.lr * m / (v.sqrt() + self.tau)
            own |= {FIRST + name: m, SECOND + name: v}
        after = self.inner.update(theirs, replace(reduced, mean=stepped))
        if after.generation != state.generation:
            own = {key: value for key, value in own.items() if is_extra(key.partition("/")[2])}
        return replace(after, memory={**after.memory, **own})
