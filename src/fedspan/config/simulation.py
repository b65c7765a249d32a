"""Simulated conditions: clients that join late or leave, drop out, are slow, or send bad replies."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from fedspan.federation.conditions import Conditions, Faults, SpeedDistribution
from fedspan.federation.presence import Presence
from fedspan.section import Section

Round = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class SimulationConfig(Section):
    """Conditions that the simulator imposes on its clients, drawn from the run's seed."""

    dropout: Probability | dict[str, Probability] = 0.0
    """Probability that a client does not reply to an order to train; or probabilities by client id, and 0 for the
    others. Under secure aggregation a client may drop out before any of the protocol's messages."""
    speed: SpeedDistribution | None = None
    """Speeds of the clients, for federation.deadline and federation.over_select; default: no client is late."""
    faults: Faults | None = None
    """Clients with bad replies; default: none."""
    present: dict[str, tuple[Round, Round | None]] = Field(default_factory=dict)
    """First and last round of clients that join late or leave, by client id, such as {client-03: [2, null], client-01:
    [1, 4]}; all other clients are present in every round."""
    validation: bool = True
    """Validate replies as in a deployment: form, finite numbers, federation.max_norm_ratio. false: every reply counts,
    to study aggregation rules alone."""

    @field_validator("present")
    @classmethod
    def _validate_present(cls, value: dict[str, tuple[int, int | None]]) -> dict[str, tuple[int, int | None]]:
        for id, (first, last) in value.items():
            if last is not None and last < first:
                raise ValueError(f"a last round that is not before the first one (for {id}: {first} and {last})")
        return value

    def build_presence(self) -> Presence:
        """Return the rounds in which clients are present."""
        return Presence({id: ((first - 1, last),) for id, (first, last) in self.present.items()})

    def build_conditions(self, seed: int) -> Conditions:
        """Return the conditions for the transport."""
        return Conditions(seed, self.dropout, self.speed, self.faults)
