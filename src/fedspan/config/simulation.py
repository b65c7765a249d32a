"""Simulated conditions: clients that join late or leave, drop out, are slow, or send bad replies."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from fedspan.config.section import Section
from fedspan.federation.conditions import Conditions, Faults, SpeedDistribution
from fedspan.federation.presence import Presence

Round = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class SpeedConfig(Section):
    """Speeds of the clients, on a simulated clock; nothing sleeps."""

    distribution: Literal["lognormal", "uniform", "constant"] = "lognormal"
    """Distribution from which each client's speed is drawn once. lognormal: the median, times or over spread at one
    standard deviation. uniform: between the median over spread and the median times spread. constant: the median for
    all."""
    median: float = Field(default=100.0, gt=0, allow_inf_nan=False)
    """Median speed, in training examples a second."""
    spread: float = Field(default=2.0, ge=1, allow_inf_nan=False)
    """Factor between slow and median clients."""


class FaultsConfig(Section):
    """Clients whose replies are bad in every round."""

    share: float = Field(gt=0, le=1, allow_inf_nan=False)
    """Share of the clients, rounded to a whole number."""
    kind: Literal["nan", "noise", "sign-flip", "scale", "label-flip"]
    """nan: every number of the reply is NaN. noise: Gaussian noise replaces the client's change. sign-flip: the change
    with the opposite sign. scale: the change times a factor. label-flip: honest training on flipped labels (label k of
    K becomes K - 1 - k); for classifiers."""
    factor: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Factor on the change, or standard deviation of the noise over the change's root mean square; left out: 1, and 10
    for scale."""


class SimulationConfig(Section):
    """Conditions that the simulator imposes on its clients, drawn from the run's seed."""

    dropout: Probability | dict[str, Probability] = 0.0
    """Probability that a client does not reply to an order to train; or probabilities by client id, and 0 for the
    others. Under secure aggregation a client may drop out before any of the protocol's messages."""
    speed: SpeedConfig | None = None
    """Speeds of the clients, for federation.deadline and federation.over_select; default: no client is late."""
    faults: FaultsConfig | None = None
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
        speed, faults = self.speed, self.faults
        return Conditions(
            seed=seed,
            dropout=self.dropout,
            speed=None if speed is None else SpeedDistribution(**speed.model_dump()),
            faults=None if faults is None else Faults(faults.share, faults.kind, faults.factor),
        )
