"""The weighted mean of replies, their stack, and a reduction under central privacy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedspan.core.tensors import Tensors
from fedspan.core.values import Client, Contribution, Reduced, StackItem
from fedspan.federation.privacy import CentralPrivacy


class Reducer:
    """Accumulates contributions in client-id order.

    A contribution that arrives before its turn waits. Those at the front of the order are folded into a float64 sum and
    released, so memory holds one contribution (plus those waiting), and the result does not depend on the order of
    arrival.
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
        """Return a contribution in the form in which it waits for its turn."""
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
        sums, total = self.compute_sum(), sum(self._weights.values())
        if not total > 0:
            raise ValueError("no reply of positive weight in this round")
        return Reduced(
            mean={name: (value / total).to(self._dtypes[name]) for name, value in sums.items()},
            stack=tuple(
                StackItem(self._clients[id], self._weights[id] / total, tensors) for id, tensors in self._stacks.items()
            ),
            count=len(self._weights),
        )

    def compute_sum(self) -> Tensors:
        """Return the weighted sum of the replies, float64, after every client of the cohort was added.

        Raises:
            ValueError: If a client is missing, or the reduction sums nothing.
        """
        self._require_all()
        return self._sums

    def _require_all(self) -> None:
        """Check that every client of the cohort was added."""
        if self._position < len(self._order):
            raise ValueError(f"no contribution yet of client {self._order[self._position]!r}")


class PrivateReducer:
    """A reduction whose sum is released under central privacy.

    Args:
        reducer: Sums the clipped changes of the cohort, which may be empty.
    """

    def __init__(self, reducer: Reducer, privacy: CentralPrivacy) -> None:
        self._reducer, self._privacy = reducer, privacy

    def add(self, client_id: str, contribution: Contribution | None) -> None:
        """``Reducer.add``, with the contribution's clipped change; all clients have the same weight."""
        if contribution is not None:
            contribution = Contribution(sum=self._privacy.clip_contribution(contribution), weight=1.0)
        self._reducer.add(client_id, contribution)

    def compute_result(self) -> Reduced:
        """``Reducer.compute_result``."""
        return self._privacy.release(self._reducer.compute_sum())
