"""Settings of a federation's rounds, and the config sections that are settings as they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from fedspan.section import Section
from fedspan.training.jobs import Privacy

Reduction = Literal["mean", "median", "trimmed-mean", "multi-krum", "geometric-median", "flame"]
"""Rules that combine replies; all but the mean are for replies that sum."""

Arrivals = tuple[tuple[tuple[str, int], ...], ...]
"""Replies of asynchronous rounds in the order of arrival, round by round: the client, and the round of its order, from
0."""


class BufferedSettings(Section):
    """Asynchronous rounds: the server updates the model after clients_per_round replies, old and new ones."""

    concurrency: int = Field(ge=1)
    """Number of clients that train at the same time; all if fewer exist."""
    staleness_exponent: float = Field(default=0.5, ge=0, allow_inf_nan=False)
    """The change of a reply whose order is t rounds old counts (1 + t) to the power of minus this."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Age of an order in rounds beyond which its reply is dropped; null: no limit."""
    replay: str | None = None
    """Folder of a run, simulated or deployed, whose order of arrivals this simulation repeats, instead of
    simulation.speed."""

    def compute_factor(self, staleness: int) -> float:
        """Return the factor on the change of a reply to an order that is ``staleness`` rounds old."""
        return float((1 + staleness) ** -self.staleness_exponent)


@dataclass(frozen=True)
class RoundSettings:
    """Settings of the rounds: those of the config section ``federation``, if they have no description here."""

    rounds: int
    cohort: int | None = None
    seed: int = 0
    reduction: Reduction = "mean"
    trim: float = 0.1
    clip_ratio: float | None = None
    max_norm: float | None = None
    max_weight_ratio: float | None = None
    """Limit of weights in means of replies, losses and metrics; None: no limit."""
    privacy: Privacy | None = None
    """Privacy settings; with ``central``, a cohort is a Poisson sample of ``cohort`` clients on average."""
    agreed: str = ""
    """Digest of the config that all nodes were sent, which secure sums are bound to; empty in a simulation."""
    buffered: BufferedSettings | None = None
    """Settings of asynchronous rounds, which end after ``cohort`` replies; None: rounds are synchronous."""
    arrivals: Arrivals | None = None
    """Recorded arrivals that asynchronous rounds repeat; None: replies arrive as clients are fast."""

    @property
    def central(self) -> Privacy | None:
        """The settings of central privacy; None: the run has another mechanism, or none."""
        return self.privacy if self.privacy is not None and self.privacy.mechanism == "central" else None

    @property
    def clips(self) -> bool:
        """Whether changes are scaled down before they are combined; central privacy has a clipping norm of its own."""
        limited = self.clip_ratio is not None or self.max_norm is not None
        return self.reduction == "mean" and self.central is None and limited


MIN_SECURE_CLIENTS = 3
"""Minimum number of clients of a secure sum: of two, each learns the other's change from the next state."""

MAX_SECURE_CLIENTS = 128
"""Maximum cohort of a secure sum: each client masks with all others, and the cost of their shares grows with the
square of the cohort for every client."""


class SecureSettings(Section):
    """Secure aggregation: the server learns only the sum of a round's replies, no single one."""

    clip: float = Field(default=100.0, gt=0, allow_inf_nan=False)
    """Norm to which each client clips its whole change; the server cannot enforce it. A smaller norm gives finer
    quantization: with equal weights, an entry of the mean is off by at most about 2 * clip * clients / 2^bits, and by
    more with unequal ones. Without effect under central privacy, which has its own clip."""
    bits: Literal[32, 64] = 32
    """Bits of the integers that are sent instead of floats."""
    threshold: float = Field(default=2 / 3, gt=0.5, le=1)
    """Share of a round's clients that can open a sum, and that must remain until the end; of n clients, more than (n +
    1) / 2 can in any case. A larger share withstands more clients that collude with the server, and fewer dropouts."""

    def compute_threshold(self, clients: int) -> int:
        """Return the number t of clients that can reconstruct a secret: the fraction, and at least 2 t > clients + 1.

        With a smaller number, a server that colludes with one client could open single vectors
        (``clients.secagg``).
        """
        return min(clients, max((clients + 1) // 2 + 1, math.ceil(self.threshold * clients - 1e-9)))
