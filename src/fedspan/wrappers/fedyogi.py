"""FedYogi: Yogi on the server, whose second moment falls no faster than it grows.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, arXiv:2003.00295, algorithm 2.

    D = sum_i p_i (x_i - x);   m <- beta1 m + (1 - beta1) D;   v <- v - (1 - beta2) D^2 sign(v - D^2)
    x <- x + lr m / (sqrt(v) + tau)

on every transmitted tensor, factor by factor; m starts at 0, v at tau^2.

Deviations: as FedAdam's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from fedspan.core.method import declare_decay_rate
from fedspan.wrappers.server_optimizer import Adaptive


@final
@dataclass(frozen=True, kw_only=True)
class FedYogi(Adaptive):
    """Yogi on the server.

    Args:
        beta2: 1 - beta2 is the share of the squared change by which the second moment moves.
    """

    beta2: float = declare_decay_rate(0.99)

    def compute_second(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta2) * squared * (v - squared).sign()
