"""Base of FedAdagrad, FedAdam and FedYogi: algorithm 2 of "Adaptive Federated Optimization".

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, arXiv:2003.00295.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedspan.core.method import declare_decay_rate
from fedspan.core.tensors import Tensors
from fedspan.wrappers.server_optimizer import ServerOptimizer


@dataclass(frozen=True, kw_only=True)
class Adaptive(ServerOptimizer):
    """``m <- beta1 m + (1 - beta1) D;  v <- ...;  x <- x + lr m / (sqrt(v) + tau)``, from m = 0 and v = tau^2.

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
