"""The account of one server's use of one data set of a node."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from fedspan.config.node import NodeLimits
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Count
from fedspan.training.accounting import Charge, PrivacySpend

Release = tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)], Count]


class UsagePart(BaseModel):
    """A part of a node's book."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RunUse(UsagePart):
    """What one run has used of a data set.

    Args:
        orders: Digest of its last training order and, after a space, that of the last order of a second exchange since
            then; empty: none yet.
        rounds: Rounds that were trained, and second exchanges of a round beyond its first one.
        evaluations: Evaluations and exports.
        exchanges: Orders for keys or shares of secure aggregation.
    """

    orders: str = ""
    rounds: Count = 0
    evaluations: Count = 0
    exchanges: Count = 0


class Account(UsagePart):
    """What one server has used of one data set.

    Args:
        server: Host of the server.
        data: Name of the data set (``data_id`` in the node's file).
        contents: Digests of the training files that the data set had, each once, the first one first.
        invitations: Digests of the invitations that were answered.
        runs: Runs that were joined, by the digest of their names.
        has_statistics: Whether statistics for a head have left this node.
        releases: Releases under differential privacy: sampling rate, noise and number of each kind.
    """

    server: str
    data: str
    contents: tuple[str, ...] = ()
    invitations: tuple[str, ...] = ()
    runs: dict[str, RunUse] = Field(default_factory=dict)
    has_statistics: bool = False
    releases: tuple[Release, ...] = ()

    @property
    def rounds(self) -> int:
        """Number of rounds of all runs."""
        return sum(use.rounds for use in self.runs.values())

    @property
    def evaluations(self) -> int:
        """Number of evaluations and exports of all runs."""
        return sum(use.evaluations for use in self.runs.values())

    def compute_epsilon(self, delta: float, charges: tuple[Charge, ...] = ()) -> float:
        """Compute the epsilon of all releases; infinite if one had no noise.

        Args:
            delta: Delta of the guarantee.
            charges: Privacy cost that is added to theirs.

        Raises:
            FedspanError: If there are releases, and the extra ``fedspan[privacy]`` is missing.
        """
        return self._build_spend(delta).compute_worst(_remove_payers(charges))

    def add_releases(self, charges: tuple[Charge, ...], limits: NodeLimits) -> tuple[Release, ...]:
        """Return the releases with those of an order.

        Raises:
            FedspanError: If they exceed the limit on epsilon.
        """
        if limits.epsilon is not None and (cost := self.compute_epsilon(limits.delta, charges)) > limits.epsilon:
            raise FedspanError("limits.epsilon", limits.epsilon, f"at least {cost:.4g}, with this order")
        spend = self._build_spend(limits.delta)
        spend.charge(_remove_payers(charges))
        return tuple((rate, noise, int(count)) for rate, noise, count in spend.dump()[""])

    def _build_spend(self, delta: float) -> PrivacySpend:
        spend = PrivacySpend(delta, "rdp")
        spend.restore({"": [list(charge) for charge in self.releases]})
        return spend


def _remove_payers(charges: tuple[Charge, ...]) -> tuple[Charge, ...]:
    """Return charges as those of the node, whose only data set pays all of them."""
    return tuple(replace(charge, payer="") for charge in charges)
