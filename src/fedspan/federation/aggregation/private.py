"""Noisy mean of clipped changes: central differential privacy (see ``federation.privacy``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedspan.core.tensors import Tensors
from fedspan.core.values import Client, Contribution, Reduced
from fedspan.federation.aggregation.reduction import Reducer
from fedspan.federation.changes import change_of, clip_change
from fedspan.federation.privacy import private_mean, sampling_rate
from fedspan.federation.settings import RoundSettings

__all__ = ["PrivateReducer"]


class PrivateReducer(Reducer):
    """Noisy mean of clipped changes, divided by the expected number of clients.

    Args:
        cohort: The clients selected for this round, possibly none.
        origin: Contribution of a client that trained nothing.
        settings: Round settings of the run.
        clients: Number of clients in the federation.
        round: Number of the round, from 0.
    """

    def __init__(
        self, cohort: Sequence[Client], origin: Tensors, settings: RoundSettings, clients: int, round: int
    ) -> None:
        super().__init__(cohort)
        assert settings.privacy is not None
        self._origin, self._privacy = origin, settings.privacy
        self._rate, self._all, self._round, self._count = sampling_rate(settings, clients), clients, round, 0
        self._total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in origin.items()}

    def _fold(self, client: Client, contribution: Contribution | None) -> None:
        if contribution is None:
            return
        self._count += 1
        for name, value in clip_change(change_of(contribution, self._origin), self._privacy.clip).items():
            self._total[name] += value

    def result(self) -> Reduced:
        if self._position < len(self._order):
            raise ValueError(f"no contribution yet of client {self._order[self._position]!r}")
        expected = self._rate * self._all
        mean = private_mean(self._total, self._origin, self._privacy, self._rate, expected, self._round)
        return Reduced(mean=mean, count=max(1, self._count))
