"""FedAdagrad: Adagrad on the server, with the clients' mean change as its gradient.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, arXiv:2003.00295, algorithm 2.

    D = sum_i p_i (x_i - x);   m <- beta1 m + (1 - beta1) D;   v <- v + D^2;   x <- x + lr m / (sqrt(v) + tau)

on every transmitted tensor, factor by factor; m starts at 0, v at tau^2.

Deviations: as FedAdam's. beta1 is 0 unless the user says otherwise: Adagrad has no momentum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from fedspan.core.method import declare_decay_rate
from fedspan.wrappers.server_optimizer import Adaptive


@final
@dataclass(frozen=True, kw_only=True)
class FedAdagrad(Adaptive):
    """Adagrad on the server."""

    beta1: float = declare_decay_rate(0.0)

    def compute_second(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared
