"""FedAvgM: momentum on the server, with the clients' mean change as its gradient.

Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019,
arXiv:1909.06335.

    D = sum_i p_i (x_i - x);   v <- momentum v + D;   x <- x + lr v

on every transmitted tensor, factor by factor; v starts at 0. With momentum 0 and lr 1 it is the wrapped method.

Deviations: the paper has no learning rate on the server (lr = 1); Reddi et al. (arXiv:2003.00295) do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from fedspan.core.method import declare_decay_rate
from fedspan.core.tensors import Tensors
from fedspan.wrappers.server_optimizer import ServerOptimizer


@final
@dataclass(frozen=True, kw_only=True)
class FedAvgM(ServerOptimizer):
    """Momentum on the server.

    Args:
        lr: Learning rate of the server.
        momentum: Share of the last step that is retained.
    """

    paper: ClassVar[str] = (
        "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification "
        "(2019, arXiv:1909.06335)"
    )
    moments: ClassVar[tuple[str, ...]] = ("v",)

    lr: float = 1.0
    momentum: float = declare_decay_rate(0.9)

    def get_initial(self, moment: str) -> float:
        return 0.0

    def step(self, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
        v = self.momentum * moments["v"] + change
        return self.lr * v, {"v": v}
