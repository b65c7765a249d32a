"""Conditions of a simulated federation: dropouts, client speeds on a simulated clock, faulty replies.

Every draw is keyed by the run's seed and its purpose, so that it does not depend on any other draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from fedspan.core.tensors import create_generator
from fedspan.core.values import Message
from fedspan.federation.presence import Presence
from fedspan.section import Section

PHASES = ("keys", "shares", "train", "confirm", "unmask")
"""Exchanges of a round under secure aggregation, in order; a round in plaintext has only the third."""


class SpeedDistribution(Section):
    """Speeds of the clients, on a simulated clock; nothing sleeps."""

    distribution: Literal["lognormal", "uniform", "constant"] = "lognormal"
    """Distribution from which each client's speed is drawn once. lognormal: the median, times or over spread at one
    standard deviation. uniform: between the median over spread and the median times spread. constant: the median for
    all."""
    median: float = Field(default=100.0, gt=0, allow_inf_nan=False)
    """Median speed, in training examples a second."""
    spread: float = Field(default=2.0, ge=1, allow_inf_nan=False)
    """Factor between slow and median clients."""


class Faults(Section):
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


_Round = Annotated[int, Field(ge=1)]
_Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class SimulationConfig(Section):
    """Conditions that the simulator imposes on its clients, drawn from the run's seed."""

    dropout: _Probability | dict[str, _Probability] = 0.0
    """Probability that a client does not reply to an order to train; or probabilities by client id, and 0 for the
    others. Under secure aggregation a client may drop out before any of the protocol's messages."""
    speed: SpeedDistribution | None = None
    """Speeds of the clients, for federation.deadline and federation.over_select; default: no client is late."""
    faults: Faults | None = None
    """Clients with bad replies; default: none."""
    present: dict[str, tuple[_Round, _Round | None]] = Field(default_factory=dict)
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
        return Conditions(**dict(self), seed=seed)


class Conditions(SimulationConfig):
    """Conditions of a simulated federation: their section, and the seed of their draws."""

    seed: int

    def draw_silence(self, client: str, round: int, attempt: int, phases: Sequence[str]) -> str | None:
        """Draw the exchange at which a client stops replying in an attempt of a round; None: it replies to all of them.

        Args:
            phases: Exchanges of an attempt, in their order.
        """
        rate = self.dropout if isinstance(self.dropout, float | int) else self.dropout.get(client, 0.0)
        rng = create_generator(self.seed, "dropout", round, attempt, client)
        if not float(torch.rand((), generator=rng, dtype=torch.float64)) < rate:
            return None
        return phases[int(torch.randint(len(phases), (), generator=rng))]

    def compute_seconds(self, client: str, examples: int) -> float:
        """Return the time that a client takes to train, in simulated seconds.

        Args:
            examples: Number of examples that it trains on, each as often as it is used.
        """
        speed = self.speed
        if speed is None:
            return 0.0
        rng = create_generator(self.seed, "speed", client)
        if speed.distribution == "lognormal":
            factor = speed.spread ** float(torch.randn((), generator=rng, dtype=torch.float64))
        elif speed.distribution == "uniform":
            low, high = 1 / speed.spread, speed.spread
            factor = low + (high - low) * float(torch.rand((), generator=rng, dtype=torch.float64))
        else:
            factor = 1.0
        return examples / (speed.median * factor)

    def draw_faulty(self, ids: Sequence[str]) -> frozenset[str]:
        """Draw the faulty clients."""
        if self.faults is None:
            return frozenset()
        count = round(self.faults.share * len(ids))
        order: list[int] = torch.randperm(len(ids), generator=create_generator(self.seed, "faults")).tolist()
        return frozenset(ids[index] for index in order[:count])


def corrupt_reply(faults: Faults, reply: Message, honest_start: Message, *key: int | str) -> Message:
    """Return the reply of a faulty client.

    Args:
        honest_start: Reply of the same client if training had changed nothing; changes are measured from it.
        key: Seed and label of the noise's draw.
    """
    if faults.kind == "label-flip":
        return reply
    factor = faults.factor or (10.0 if faults.kind == "scale" else 1.0)
    tensors: dict[str, Tensor] = {}
    for name, value in reply.tensors.items():
        if not value.is_floating_point():
            tensors[name] = value
            continue
        start = honest_start.tensors.get(name)
        if start is None or start.shape != value.shape:
            start = torch.zeros_like(value)
        if faults.kind == "nan":
            tensors[name] = torch.full_like(value, math.nan)
            continue
        change = value.double() - start.double().nan_to_num(0.0, 0.0, 0.0)
        if faults.kind == "noise":
            seed, *label = key
            rng = create_generator(int(seed), "noise", *label, name)
            scale = factor * float(change.square().mean().sqrt())
            change = scale * torch.randn(change.shape, generator=rng, dtype=torch.float64)
        else:
            change = change * (-factor if faults.kind == "sign-flip" else factor)
        tensors[name] = (start.double() + change).to(value.dtype)
    return replace(reply, tensors=tensors)
