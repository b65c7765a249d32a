"""Differential privacy, as written in the config."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from fedspan.config.federation import FederationConfig
from fedspan.core.method import Claims
from fedspan.core.noise import derive_seed_key
from fedspan.errors import FedspanError
from fedspan.section import Section
from fedspan.training.jobs import Privacy


class PrivacyConfig(Section):
    """Clipping, noise and the privacy budget; needs fedspan[privacy]."""

    mechanism: Literal["central", "local", "dp-sgd"]
    """central: the server clips every client's change and adds noise to the sum; protects a client from anyone who sees
    the models, except the server. local: every client clips its change and adds noise to it; also protects from the
    server, with much more noise. dp-sgd: every client clips the gradient of each example and adds noise to the sum;
    protects an example from everyone except its data owner."""
    clip: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Maximum L2 norm of a client's change (central, local) or of an example's gradient (dp-sgd)."""
    noise: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Standard deviation of the noise divided by clip; default: the smallest that epsilon allows for all rounds."""
    epsilon: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Privacy budget: the run ends before a round that would exceed it; default: no budget."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """Probability with which the guarantee may fail: well below 1 over the number of clients or examples."""
    accountant: Literal["rdp", "prv"] = "rdp"
    """Accountant of Opacus. rdp: fast and slightly loose. prv: tight, and slow if clients differ."""
    randomness: Literal["seed", "secret"] | None = None
    """Source of the noise. seed: the run's seed; reproducible, without protection from anyone who knows the seed.
    secret: a random key that never leaves its machine. Default: seed in simulations; secret in deployments, where seed
    is refused."""

    @model_validator(mode="after")
    def _require_noise(self) -> Self:
        if self.noise is None and self.epsilon is None:
            raise ValueError("noise, or an epsilon from which the noise follows")
        return self

    def require_fit(self, method: str, claims: Claims, federation: FederationConfig) -> None:
        """Check that a run's replies can be privatized."""
        reasons = {
            "it transmits nothing": claims.sends == "nothing",
            "what a client chooses to send tells of its data": claims.budgets and self.mechanism != "dp-sgd",
            "its server combines replies one by one": claims.reduction != "sum" and self.mechanism == "central",
            "its rounds have two exchanges, each of which would need noise of its own": claims.second_exchange
            and self.mechanism != "dp-sgd",
            "noise would spoil what it sends beside tensors that all clients start from": claims.sends != "values"
            and self.mechanism == "local",
        }
        if reason := next((reason for reason, applies in reasons.items() if applies), None):
            raise FedspanError(
                "privacy.mechanism",
                self.mechanism,
                problem=f"{method} cannot be combined with {self.mechanism} privacy: {reason}",
            )
        if self.mechanism == "central":
            for field, value, right in (
                ("reduction", federation.reduction, "mean"),
                ("weights", federation.weights, "uniform"),
                ("ranks", federation.ranks, None),
                ("over_select", federation.over_select, 0),
                ("clients_per_round", federation.secure and federation.clients_per_round, None),
            ):
                if value != right:
                    beside = " and federation.secure" if field == "clients_per_round" else ""
                    problem = f"{value!r} cannot be combined with privacy.mechanism: central{beside}"
                    remedy = "Leave it out" if right is None else f"Set it to {right}"
                    raise FedspanError(f"federation.{field}", value, problem=f"{problem}. {remedy}")

    def build_settings(self, rounds: int, seed: int, key: bytes | None = None) -> Privacy:
        """Return the privacy settings for the engines.

        Args:
            key: A secret key of the noise; None: a key derived from the seed.
        """
        return Privacy(
            mechanism=self.mechanism,
            clip=self.clip,
            noise=self.noise,
            epsilon=self.epsilon,
            delta=self.delta,
            accounting=self.accountant,
            rounds=rounds,
            key=derive_seed_key(seed) if key is None else key,
            secret=key is not None,
        )
