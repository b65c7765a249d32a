"""FedAdam: Adam on the server, with the clients' mean change as its gradient.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, arXiv:2003.00295, algorithm 2.

    D = sum_i p_i (x_i - x);   m <- beta1 m + (1 - beta1) D;   v <- beta2 v + (1 - beta2) D^2
    x <- x + lr m / (sqrt(v) + tau)

on every transmitted tensor, factor by factor; m starts at 0, v at tau^2. There is no bias correction.

Deviations: the paper averages plainly, which is ``federation.weights: uniform``. It asks for v >= tau^2 at the start;
here v = tau^2. Moments of factors that the method re-initializes (FedLoRU's accumulations) are reset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from fedspan.core.method import declare_decay_rate
from fedspan.wrappers.server_optimizer import Adaptive


@final
@dataclass(frozen=True, kw_only=True)
class FedAdam(Adaptive):
    """Adam on the server.

    Args:
        beta2: Share of the second moment that is retained.
    """

    beta2: float = declare_decay_rate(0.99)

    def compute_second(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * squared
