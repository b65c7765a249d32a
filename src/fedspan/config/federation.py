"""The federation of a run: rounds, cohort, weights, and the clients' ranks."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from fedspan.config.section import Section
from fedspan.config.validation_errors import VARIANT
from fedspan.core.method import Claims
from fedspan.errors import FedspanError
from fedspan.federation.settings import Reduction, SecureSettings
from fedspan.federation.validation import ReplyRules

__all__ = ["FederationConfig", "FractionRanks", "RandomRanks", "Ranks", "SecureConfig"]

Rank = Annotated[int, Field(ge=1)]


class FractionRanks(Section):
    """Each rank for a share of the clients."""

    assign: Literal["fractions"] = "fractions"
    of: dict[Rank, Annotated[float, Field(gt=0, le=1)]] = Field(
        min_length=1, description="Shares by rank; they sum to 1."
    )
    seed: int | None = Field(default=None, ge=0, lt=2**63, description="Of which client gets which.")

    @field_validator("of")
    @classmethod
    def _validate_shares(cls, value: dict[int, float]) -> dict[int, float]:
        if abs(sum(value.values()) - 1) > 1e-6:
            raise ValueError(f"shares that sum to 1, not to {sum(value.values()):g}")
        return value


class RandomRanks(Section):
    """A rank drawn independently for every client."""

    assign: Literal["draw"] = "draw"
    of: list[Rank] = Field(min_length=1, description="To draw from, all alike.")
    seed: int | None = Field(default=None, ge=0, lt=2**63, description="Of the draws.")


def _select_variant(value: object) -> str | None:
    """Return which of the four ways to write ranks was used."""
    if isinstance(value, list):
        return VARIANT + "turns"
    if isinstance(value, FractionRanks | RandomRanks):
        return VARIANT + value.assign
    if isinstance(value, dict):
        assign = value.get("assign", "clients")
        return VARIANT + (assign if isinstance(assign, str) else "clients")
    return None


Ranks = Annotated[
    Annotated[dict[str, Rank], Tag(VARIANT + "clients")]
    | Annotated[list[Rank], Tag(VARIANT + "turns")]
    | Annotated[FractionRanks, Tag(VARIANT + "fractions")]
    | Annotated[RandomRanks, Tag(VARIANT + "draw")],
    Discriminator(
        _select_variant,
        custom_error_type="ranks",
        custom_error_message="ranks by client {client-00: 4}, in turn [4, 8], or {assign: fractions, of: {4: 0.5, "
        "8: 0.5}} or {assign: draw, of: [4, 8]}",
    ),
]
"""Ranks by client id, assigned in turn, by shares of the clients, or drawn at random."""


class SecureConfig(Section):
    """Secure aggregation: the server learns only the sum of a round's replies, no single one."""

    clip: float = Field(
        default=100.0,
        gt=0,
        allow_inf_nan=False,
        description="A client's change of all that it sends is scaled down to this norm, if it has a greater one. "
        "The smaller, the finer the steps: an entry of the mean is off by about clip times clients over 2^bits.",
    )
    bits: Literal[32, 64] = Field(default=32, description="Of the integers that are sent up in place of floats.")
    threshold: float = Field(
        default=2 / 3,
        gt=0.5,
        le=1,
        description="Share of a client and its neighbours that can open its masks: so many must still be there in the "
        "end, and no fewer can open them without the client's leave.",
    )
    neighbours: int | None = Field(
        default=None, ge=2, le=1000, description="Clients that each masks with; left out: all, up to 100."
    )


class FederationConfig(Section):
    """Rounds, cohort, weights, ranks."""

    rounds: int = Field(default=10, ge=1, description="Communication rounds.")
    early_stopping: int | None = Field(
        default=None,
        ge=1,
        description="Stop after this many rounds without a better score on the clients' validation parts; left out: "
        "run all rounds. Baselines stop by the same rule.",
    )
    clients_per_round: int | None = Field(default=None, ge=1, description="Clients asked each round; left out: all.")
    weights: Literal["examples", "uniform"] = Field(
        default="examples", description="Weight of a client's reply in the average."
    )
    ranks: Ranks | None = Field(
        default=None,
        description="Ranks of the clients, for methods that allow different ones. By client id: {client-00: 4}. In "
        "turn: [4, 8, 16]. By shares of the clients, who are shuffled: {assign: fractions, of: {4: 0.5, 8: 0.3, 16: "
        "0.2}}. Drawn for every client: {assign: draw, of: [4, 8, 16]}. The last two take a seed; left out: that of "
        "the partition of the data. Whom nothing names has method.r.",
    )
    scaling: Literal["by-rank", "equal"] = Field(
        default="by-rank",
        description="Factor on a client's B A under different ranks. by-rank: lora_alpha over its own rank. equal: "
        "lora_alpha over method.r for all, as if each had its own alpha.",
    )
    max_weight_ratio: float | None = Field(
        default=4.0,
        ge=1,
        allow_inf_nan=False,
        description="No client weighs more than this many times the cohort's median by a number of examples that only "
        "the client knows. Simulated clients have the examples of the partition and are not limited, nor are nodes "
        "with --max-examples, which have a limit of their own. Clients that it limits are named. null: no limit. Not "
        "under secure.",
    )
    reduction: Reduction = Field(
        default="mean",
        description="How replies are combined: their weighted mean, after clip_ratio; or, for methods that sum, by a "
        "rule that a few hostile clients cannot move far. See docs/robustness.md.",
    )
    clip_ratio: float | None = Field(
        default=1.5,
        gt=0,
        allow_inf_nan=False,
        description="mean: a reply whose change has a norm of more than this many times the round's median is scaled "
        "down to that norm, from 3 replies on, also in methods that stack; null: none is. Not under secure, which has "
        "a clip of its own, nor under central privacy.",
    )
    max_norm: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="mean: L2 norm to which a larger change of a client is scaled down, in place of clip_ratio.",
    )
    trim: float = Field(
        default=0.1,
        gt=0,
        lt=0.5,
        description="trimmed-mean: share of the replies dropped at each end, rounded up. multi-krum: share of hostile "
        "clients that it withstands, rounded up.",
    )
    over_select: int = Field(
        default=0,
        ge=0,
        description="Number of clients that are asked in a round beyond clients_per_round. The round goes on as "
        "soon as clients_per_round good replies are there; the other clients are late, and named. In "
        "the simulator it needs simulation.speed to have an effect.",
    )
    min_replies: int | None = Field(
        default=None,
        ge=1,
        description="Good replies without which a round does not stand; left out: more than half of the clients "
        "wanted. Between machines, and in the simulator where replies can fail (simulation, secure).",
    )
    deadline: float = Field(
        default=3600.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that clients have for a round; in the simulator, on the clock of simulation.speed.",
    )
    max_missed_rounds: int | None = Field(
        default=2,
        ge=1,
        description="A client whose reply did not count in this many of its rounds in a row is still sent orders, but "
        "not waited for if the other clients' replies suffice, except after twice, four times, eight times as many "
        "rounds. It is waited for again once a reply of it counts. null: every client is waited for until the "
        "deadline. Without effect under over_select.",
    )
    reconnect_timeout: float = Field(
        default=300.0,
        ge=0,
        allow_inf_nan=False,
        description="On Flower: seconds that a round which asks again waits for clients that are offline; a node that "
        "was killed is let in again after a minute.",
    )
    retries: int = Field(
        default=2,
        ge=0,
        description="How often the missing clients of a round are asked again where there are too few good "
        "replies; after that the run stops, to be resumed.",
    )
    message_mib: int = Field(
        default=1024, ge=1, le=2048, description="On Flower: MiB of a reply, at most; a larger one is not taken."
    )
    max_norm_ratio: float | None = Field(
        default=10.0,
        gt=1,
        allow_inf_nan=False,
        description="A reply whose change has a norm of more than this many times the round's median is dropped, "
        "from 3 replies on; null: none is. Between machines, and in the simulator under simulation.",
    )
    secure: SecureConfig | None = Field(
        default=None,
        description="Secure aggregation, for methods whose replies sum; between machines and in the simulator; "
        "needs fedspan[secagg]. {}: with the defaults below. max_norm_ratio does not apply then: "
        "nobody sees single replies.",
    )

    @model_validator(mode="after")
    def _validate_over_select(self) -> Self:
        if self.over_select and self.clients_per_round is None:
            problem = "it needs federation.clients_per_round, because otherwise every round selects all clients"
            raise FedspanError("federation.over_select", self.over_select, problem=problem)
        if self.over_select and self.secure is not None:
            problem = (
                "it cannot be combined with federation.secure, whose clients must all stay until the sum is unmasked"
            )
            raise FedspanError("federation.over_select", self.over_select, problem=problem)
        return self

    def require_secure_fit(self, method: str, title: str, claims: Claims) -> None:
        """Check that the method's replies can be summed securely, if the run uses secure aggregation.

        Args:
            method: The method's registry key.
            title: Title of the method with its wrappers.
            claims: Claims of the method.

        Raises:
            FedspanError: If they can't, with the reason.
        """
        if self.secure is None:
            return
        reasons = {
            f"the server of {method} needs single replies, because it does not compute their mean": (
                claims.reduction != "sum"
            ),
            f"{method} sends nothing": claims.sends == "nothing",
            f"federation.reduction {self.reduction} compares single replies": self.reduction != "mean",
        }
        if reason := next((reason for reason, applies in reasons.items() if applies), None):
            raise FedspanError(
                "federation.secure",
                self.secure,
                problem=f"{title} cannot be aggregated securely: {reason}. Remove federation.secure",
            )

    def build_secure_settings(self) -> SecureSettings | None:
        """Return the settings of secure aggregation for the engines."""
        return None if self.secure is None else SecureSettings(**self.secure.model_dump())

    def build_reply_rules(self) -> ReplyRules:
        """Return the rules by which a round between machines is accepted."""
        return ReplyRules(
            min_replies=self.min_replies,
            deadline=self.deadline,
            retries=self.retries,
            norm_factor=self.max_norm_ratio,
            over_select=self.over_select,
            max_missed_rounds=self.max_missed_rounds,
        )
