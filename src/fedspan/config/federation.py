"""The federation of a run: rounds, cohort, weights, and the clients' ranks."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from fedspan.config.tags import Tags
from fedspan.config.validation_errors import VARIANT
from fedspan.core.method import Claims
from fedspan.crypto import require_packages
from fedspan.errors import FedspanError
from fedspan.federation.aggregation.aggregation import AggregationFactory
from fedspan.federation.aggregation.plaintext import PlaintextAggregation
from fedspan.federation.settings import BufferedSettings, Reduction, SecureSettings
from fedspan.federation.validation import ReplyRules
from fedspan.section import Section

Rank = Annotated[int, Field(ge=1)]


class FractionRanks(Section):
    """Each rank for a share of the clients."""

    assign: Literal["fractions"] = "fractions"
    of: dict[Rank, Annotated[float, Field(gt=0, le=1)]] = Field(min_length=1)
    """Shares by rank; they sum to 1."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Seed of the assignment. Default: partition.seed."""

    @field_validator("of")
    @classmethod
    def _validate_shares(cls, value: dict[int, float]) -> dict[int, float]:
        if abs(sum(value.values()) - 1) > 1e-6:
            raise ValueError(f"shares that sum to 1, not to {sum(value.values()):g}")
        return value


class RandomRanks(Section):
    """A rank drawn independently for every client."""

    assign: Literal["draw"] = "draw"
    of: list[Rank] = Field(min_length=1)
    """Ranks, each with the same probability."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Seed of the draws. Default: partition.seed."""


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


class FederationConfig(Section):
    """Rounds, cohort, weights, ranks."""

    rounds: int = Field(default=10, ge=1)
    """Communication rounds."""
    early_stopping: int | None = Field(default=None, ge=1)
    """Stop after this many rounds without a better metric on the clients' validation parts (a lower loss if
    evaluation.best_by is loss); default: run all rounds. Baselines stop by the same rule. In a deployment, whose nodes
    add noise to their metrics, a round with equal ones restarts the count."""
    final_rounds: int = Field(default=0, ge=0)
    """Simulations: rounds after the best one in which clients train on all their examples, those of their validation
    parts included. A test set measures the model after them. Baselines have as many epochs. Not under privacy, secure
    or buffered, nor with cluster."""
    clients_per_round: int | None = Field(default=None, ge=1)
    """Number of clients selected per round; default: all."""
    weights: Literal["examples", "uniform"] = "examples"
    """Weight of a client's reply in the average."""
    ranks: Ranks | None = None
    """Ranks of the clients, for methods that support different ranks. By client id: {client-00: 4}. Cyclically: [4, 8,
    16]. By shares of the shuffled clients: {assign: fractions, of: {4: 0.5, 8: 0.3, 16: 0.2}}. Drawn for every client:
    {assign: draw, of: [4, 8, 16]}. The last two accept a seed; default: the partition's seed. All other clients have
    method.r. Not under secure."""
    scaling: Literal["by-rank", "equal"] = "by-rank"
    """Scaling of a client's B A with different ranks. by-rank: lora_alpha over its own rank. equal: lora_alpha over
    method.r for all clients."""
    max_weight_ratio: float | None = Field(default=4.0, ge=1, allow_inf_nan=False)
    """Limit of a client's weight, as a multiple of the cohort's median weight (the lower middle one of an even number),
    for numbers of examples that only the client knows. Simulated clients have the examples of the partition and are not
    limited, nor are nodes with --max-examples, which have their own limit. Limited clients are reported. null: no
    limit. Under secure, all clients agree on the largest weight that counts, which is at most that of the largest node
    with --max-examples."""
    reduction: Reduction = "mean"
    """How replies are combined: by their weighted mean, after clip_ratio; or, for methods that sum, by a rule that
    bounds the influence of a few hostile clients. See docs/robustness.md."""
    clip_ratio: float | None = Field(default=1.5, gt=0, allow_inf_nan=False)
    """mean: scale a change down to this multiple of the round's median norm, from 3 replies on, also in methods that
    stack; null: no clipping. Not under secure, which has its own clip, nor under central privacy."""
    max_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """mean: L2 norm to which a client's larger change is scaled down, instead of clip_ratio."""
    trim: float = Field(default=0.1, gt=0, lt=0.5)
    """trimmed-mean: share of the replies dropped at each end, rounded up. multi-krum: share of hostile clients that it
    tolerates, rounded up."""
    over_select: int = Field(default=0, ge=0)
    """Number of clients selected in addition to clients_per_round. The round ends after clients_per_round valid
    replies; the other clients are reported as late. In the simulator it needs simulation.speed to have an effect."""
    min_replies: int | None = Field(default=None, ge=1)
    """Number of valid replies that a round needs; default: more than half of the requested ones. In deployments, and in
    the simulator where replies can fail (simulation, secure)."""
    deadline: float = Field(default=3600.0, gt=0, allow_inf_nan=False)
    """Seconds that clients have for a round, or for each of its exchanges where it has several (secure, fedask); in the
    simulator, on the simulated clock of simulation.speed."""
    max_missed_rounds: int | None = Field(default=2, ge=1)
    """Number of consecutive missed rounds after which the server still sends orders to a client but does not wait for
    it, if the other replies suffice. It waits again after two, four, eight times as many rounds, and after a valid
    reply. null: always wait until the deadline. No effect with over_select; with buffered it counts missed
    evaluations."""
    reconnect_timeout: float = Field(default=300.0, ge=0, allow_inf_nan=False)
    """Deployments: seconds that a retry waits for offline clients; a killed node is readmitted after a minute."""
    retries: int = Field(default=2, ge=0)
    """How often a round without enough valid replies sends the order again to the missing clients; then the run stops
    and can be resumed."""
    require_tags: Tags = Field(default_factory=dict)
    """Deployments: tags that a node needs to participate, such as {site: eu, gpu: true}; partition.clients is the
    number of nodes that have them."""
    min_examples: int = Field(default=1, ge=1)
    """Deployments: number of training examples that a node needs to participate."""
    late_joiners: bool = False
    """Deployments: nodes may join, leave and come back between rounds. A round's clients are the nodes that have joined
    and are online when it begins; partition.clients nodes have to join before the first one. The quorum of min_replies
    is counted on the nodes present, and is never below that of partition.clients nodes. See docs/deployment.md."""
    message_mib: int = Field(default=1024, ge=1, le=2048)
    """Deployments: maximum size of a reply in MiB; larger ones are refused."""
    max_norm_ratio: float | None = Field(default=10.0, gt=1, allow_inf_nan=False)
    """Drop a reply whose change has a norm above this multiple of the round's median, from 3 replies on; null: drop
    none. In deployments, and in the simulator under simulation."""
    buffered: BufferedSettings | None = None
    """Asynchronous rounds (FedBuff), for methods whose replies sum and whose jobs are the same in every round; in the
    simulator, they need simulation.speed or replay. Default: synchronous rounds. See docs/asynchronous.md."""
    secure: SecureSettings | None = None
    """Secure aggregation, for methods whose replies sum, in deployments and in the simulator; needs fedspan[secagg].
    {}: with the defaults below. max_norm_ratio does not apply, because the server sees no single replies."""

    @property
    def most_rounds(self) -> int:
        """Largest number of rounds of a run, the final ones included."""
        return self.rounds + self.final_rounds

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

    def require_buffered_fit(self, title: str, reason: str | None) -> None:
        """Check that asynchronous rounds fit the method and the other settings.

        Args:
            reason: Reason why the method has no asynchronous rounds, as a clause; None: it has them.
        """
        if self.buffered is None:
            return
        if self.clients_per_round is None:
            problem = "it needs federation.clients_per_round, the number of replies after which the model is updated"
            raise FedspanError("federation.buffered", self.buffered, problem=problem)
        if reason is not None:
            problem = f"{title} has no asynchronous rounds: {reason}. Remove federation.buffered"
            raise FedspanError("federation.buffered", self.buffered, problem=problem)
        reasons = {
            "over_select": (0, "0", "asynchronous rounds wait for no client, so none has to be selected in addition"),
            "secure": (
                None,
                "null",
                "with secure aggregation all clients train from one state, and those of asynchronous rounds do not",
            ),
            "late_joiners": (False, "false", "the clients of asynchronous rounds are those that joined at the start"),
        }
        for name, (off, text, problem) in reasons.items():
            if (value := getattr(self, name)) != off:
                raise FedspanError(f"federation.{name}", value, f"{text} for federation.buffered", problem=problem)

    def require_simulated(self, *, has_speeds: bool) -> None:
        """Check that a run on this machine selects no nodes, and that its asynchronous rounds are timed."""
        if self.buffered is not None and self.buffered.replay is None and not has_speeds:
            problem = "its rounds depend on how fast the clients are. Set simulation.speed, or replay"
            raise FedspanError("federation.buffered", self.buffered, problem=problem)
        for name, off in (("require_tags", {}), ("min_examples", 1), ("late_joiners", False)):
            if (value := getattr(self, name)) != off:
                problem = "it selects nodes of a deployment; the clients of a simulation come from partition"
                if name == "late_joiners":
                    problem = "it is for deployments; in a simulation, set simulation.present"
                raise FedspanError(f"federation.{name}", value, problem=problem)

    def require_late_fit(self, mechanism: str | None, wrappers: Collection[str]) -> None:
        """Check that the rest of the run does not count on fixed clients, if nodes may join late."""
        if not self.late_joiners:
            return
        reasons = {
            "central privacy counts on the same number of clients in every round": mechanism == "central",
            "scaffold averages its control variates over a fixed number of clients": "scaffold" in wrappers,
            "federation.ranks assigns ranks to the clients that are there at the start; {assign: draw, of: [...]} "
            "draws one for each": (self.ranks is not None and not isinstance(self.ranks, RandomRanks)),
        }
        if reason := next((reason for reason, applies in reasons.items() if applies), None):
            raise FedspanError("federation.late_joiners", True, "false", problem=reason)

    def require_secure_fit(self, method: str, title: str, claims: Claims) -> None:
        """Check that the method's replies can be summed securely, if the run uses secure aggregation."""
        if self.secure is None:
            return
        reasons = {
            f"the server of {method} needs single replies, because it does not compute their mean": (
                claims.reduction != "sum"
            ),
            f"{method} sends nothing": claims.sends == "nothing",
            "with federation.ranks, clients of smaller ranks send zeros beyond them, so the sum shows parts of the "
            "largest update alone": self.ranks is not None,
            f"federation.reduction {self.reduction} compares single replies": self.reduction != "mean",
        }
        if reason := next((reason for reason, applies in reasons.items() if applies), None):
            raise FedspanError(
                "federation.secure",
                self.secure,
                problem=f"{title} cannot be aggregated securely: {reason}. Remove federation.secure",
            )

    def build_aggregation(self, clip: float | None = None) -> AggregationFactory:
        """Return the aggregation protocol.

        Args:
            clip: Norm to which contributions to a secure sum are clipped; None: that of the config.
        """
        if self.secure is None:
            return PlaintextAggregation
        require_packages()
        from fedspan.federation.aggregation.secure import SecureAggregation  # needs fedspan[secagg]

        changes = {} if clip is None else {"clip": clip}
        return partial(SecureAggregation, secure=self.secure.model_copy(update=changes))

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
