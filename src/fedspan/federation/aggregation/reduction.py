"""The weighted mean of replies, their stack, and the noisy mean of central privacy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedspan.core.tensors import Tensors
from fedspan.core.values import Client, Contribution, Reduced, StackItem
from fedspan.federation.changes import clip_change, compute_change
from fedspan.federation.privacy import compute_private_mean, compute_sampling_rate
from fedspan.federation.settings import RoundSettings

__all__ = ["PrivateReducer", "Reducer"]


class Reducer:
    """Accumulates contributions in client-id order.

    A contribution that arrives before its turn waits. Those at the front of the order are folded into a float64 sum and
    released, so memory holds one contribution (plus those waiting), and the result does not depend on the order of
    arrival.

    Args:
        cohort: The clients selected for this round.
    """

    def __init__(self, cohort: Sequence[Client]) -> None:
        self._clients = {client.id: client for client in cohort}
        self._order = sorted(self._clients)
        self._waiting: dict[str, Contribution | None] = {}
        self._sums: dict[str, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._weights: dict[str, float] = {}
        self._stacks: dict[str, Mapping[str, Tensor]] = {}
        self._position = 0

    def add(self, client_id: str, contribution: Contribution | None) -> None:
        """Add a client's contribution, or None if the client failed and its place is skipped.

        Raises:
            ValueError: If the client is not in the cohort, was added before, or its contribution cannot be reduced; it
                is then as if it had not been added.
        """
        is_known = client_id in self._clients
        if not is_known or client_id in self._waiting or client_id in self._order[: self._position]:
            raise ValueError(f"unexpected contribution of client {client_id!r}")
        self._waiting[client_id] = None if contribution is None else self._check(contribution)
        while self._position < len(self._order) and self._order[self._position] in self._waiting:
            current = self._order[self._position]
            self._fold(self._clients[current], self._waiting.pop(current))
            self._position += 1

    def _check(self, contribution: Contribution) -> Contribution:
        """Return a contribution in the form in which it waits for its turn.

        Raises:
            ValueError: If it cannot be reduced.
        """
        return contribution

    def _fold(self, client: Client, contribution: Contribution | None) -> None:
        if contribution is None:
            return
        weight = client.weight if contribution.weight is None else contribution.weight
        self._weights[client.id] = weight
        for name, value in contribution.sum.items():
            addend = value.to(torch.float64) * weight
            if name in self._sums:
                self._sums[name] += addend
            else:
                self._sums[name] = addend
                self._dtypes[name] = value.dtype if value.is_floating_point() else torch.float64
        if contribution.stack:
            self._stacks[client.id] = contribution.stack

    def compute_result(self) -> Reduced:
        """Return the reduced round after every client of the cohort was added.

        Raises:
            ValueError: If a client is missing, or no client contributed with a positive weight.
        """
        self._require_all()
        total = sum(self._weights.values())
        if not total > 0:
            raise ValueError("no reply of positive weight in this round")
        return Reduced(
            mean={name: (value / total).to(self._dtypes[name]) for name, value in self._sums.items()},
            stack=tuple(
                StackItem(self._clients[id], self._weights[id] / total, tensors) for id, tensors in self._stacks.items()
            ),
            count=len(self._weights),
        )

    def _require_all(self) -> None:
        """Check that every client of the cohort was added.

        Raises:
            ValueError: If one is missing.
        """
        if self._position < len(self._order):
            raise ValueError(f"no contribution yet of client {self._order[self._position]!r}")


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
        self._rate, self._all, self._round = compute_sampling_rate(settings, clients), clients, round
        self._total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in origin.items()}

    def _check(self, contribution: Contribution) -> Contribution:
        change, _ = clip_change(compute_change(contribution, self._origin), self._privacy.clip)
        return Contribution(sum=change)

    def _fold(self, client: Client, contribution: Contribution | None) -> None:
        if contribution is not None:
            for name, value in contribution.sum.items():
                self._total[name] += value

    def compute_result(self) -> Reduced:
        self._require_all()
        expected = self._rate * self._all
        mean = compute_private_mean(self._total, self._origin, self._privacy, self._rate, expected, self._round)
        return Reduced(mean=mean, count=expected)
