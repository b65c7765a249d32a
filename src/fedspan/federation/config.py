"""Options of the federation: rounds, cohort, weights and ranks (`FederationConfig`), and evaluation."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from fedspan.core.method import Claims
from fedspan.errors import FedspanError
from fedspan.federation.tags import Tags
from fedspan.section import VARIANT, Section
from fedspan.training.config import Privacy

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


Reduction = Literal["mean", "median", "trimmed-mean", "multi-krum", "geometric-median", "flame"]
"""Rules that combine replies; all but the mean are for replies that sum."""


class BufferedSettings(Section):
    """Asynchronous rounds: the server updates the model after clients_per_round replies, old and new ones."""

    concurrency: int = Field(ge=1)
    """Number of clients that train at the same time; all if fewer exist."""
    staleness_exponent: float = Field(default=0.5, ge=0, allow_inf_nan=False)
    """The change of a reply whose order is t rounds old counts (1 + t) to the power of minus this."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Age of an order in rounds beyond which its reply is dropped; null: no limit."""
    replay: str | None = None
    """Folder of a run, simulated or deployed, whose order of arrivals this simulation repeats, instead of
    simulation.speed."""

    def compute_factor(self, staleness: int) -> float:
        """Return the factor on the change of a reply to an order that is ``staleness`` rounds old."""
        return float((1 + staleness) ** -self.staleness_exponent)


MIN_SECURE_CLIENTS = 3
"""Minimum number of clients of a secure sum: of two, each learns the other's change from the next state."""

MAX_SECURE_CLIENTS = 128
"""Maximum cohort of a secure sum: each client masks with all others, and the cost of their shares grows with the
square of the cohort for every client."""


class SecureSettings(Section):
    """Secure aggregation: the server learns only the sum of a round's replies, no single one."""

    clip: float = Field(default=100.0, gt=0, allow_inf_nan=False)
    """Norm to which each client clips its whole change; the server cannot enforce it. A smaller norm gives finer
    quantization: with equal weights, an entry of the mean is off by at most about 2 * clip * clients / 2^bits, and by
    more with unequal ones. Without effect under central privacy, which has its own clip."""
    bits: Literal[32, 64] = 32
    """Bits of the integers that are sent instead of floats."""
    threshold: float = Field(default=2 / 3, gt=0.5, le=1)
    """Share of a round's clients that can open a sum, and that must remain until the end; of n clients, more than (n +
    1) / 2 can in any case. A larger share withstands more clients that collude with the server, and fewer dropouts."""

    def compute_threshold(self, clients: int) -> int:
        """Return the number t of clients that can reconstruct a secret: the fraction, and at least 2 t > clients + 1.

        With a smaller number, a server that colludes with one client could open single vectors
        (``clients.secagg``).
        """
        return min(clients, max((clients + 1) // 2 + 1, math.ceil(self.threshold * clients - 1e-9)))


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


class EvaluationConfig(Section):
    """Evaluation during the run."""

    every: int = Field(default=1, ge=1)
    """Rounds between evaluations; the last round is always evaluated."""
    batch_size: int = Field(default=64, ge=1)
    """Examples per forward pass."""
    clients: int | None = Field(default=None, ge=1)
    """Number of clients that are evaluated on their own validation and test parts (personal models also on the test
    set): the same ones in every round, drawn by the seed; default: all. Of personal models, only those of these clients
    are exported."""
    metric: str | None = None
    """Metric that selects the best round on the clients' validation parts; default: accuracy, pearson or loss, by task.
    Ties are broken by the validation loss, then by the later round. In deployments, rounds are compared by a trimmed
    mean from three nodes on; with two, the last round is the best."""
    by: str | None = Field(default=None, min_length=1)
    """Column of the held-out examples, such as domain or hospital, for each of whose values the report has the final
    scores (by_value); default: none. Not in deployments."""
    best_by: Literal["metric", "loss"] = "metric"
    """Compare rounds, for the best one and for early stopping, by the metric or by the validation loss, which is less
    noisy on small validation parts. By the loss, a round replaces the start only if its gain exceeds the standard error
    of that gain."""
    diagnostics: int | None = Field(default=None, ge=1)
    """Rounds between diagnoses of the clients' updates: the measures of fedspan diagnose for every target layer are
    written to metrics.jsonl and shown by fedspan report; default: never, because it takes time. Not in deployments,
    where no process sees both ends of an update, and not under privacy."""
    generate: bool = False
    """causal-lm: at the end, generate answers to the held-out prompts and count exact matches. seq2seq: generate texts
    for the held-out sources and compute BLEU, chrF and ROUGE (fedspan[seq2seq])."""
    max_new_tokens: int = Field(default=64, ge=1, le=2**17)
    """Maximum number of tokens of a generated answer or text."""
    answer_pattern: str | None = Field(
        default=None,
        min_length=1,
        description="A regular expression for what counts of an answer, such as '####\\s*(\\S+)' for GSM8K: its first "
        "group, or the whole match; left out: the whole text. Numbers are compared as numbers.",
    )

    def get_selection_metric(self, metric: str) -> str:
        """Return the metric by which rounds are compared."""
        return "loss" if self.best_by == "loss" else metric

    @field_validator("answer_pattern")
    @classmethod
    def _validate_pattern(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except (re.error, OverflowError, RecursionError) as error:  # the last two: for a{9999999999}, ((((...
            raise ValueError(f"a valid regular expression ({error})") from None
        return value


_RULES = ("min_replies", "deadline", "retries", "max_norm_ratio", "over_select", "max_missed_rounds")
_DEFAULT_RULES = {name: FederationConfig.model_fields[name].default for name in _RULES}
"""Defaults of the options by which replies and rounds are accepted."""

Arrivals = tuple[tuple[tuple[str, int], ...], ...]
"""Replies of asynchronous rounds in the order of arrival, round by round: the client, and the round of its order, from
0."""


class RoundSettings(FederationConfig):
    """Settings of a run's rounds: the section ``federation``, and what else they depend on."""

    seed: int = 0
    privacy: Privacy | None = None
    """Privacy settings; with ``central``, a cohort is a Poisson sample of ``clients_per_round`` clients on average."""
    agreed: str = ""
    """Digest of the config that all nodes were sent, which secure sums are bound to; empty in a simulation."""
    arrivals: Arrivals | None = None
    """Recorded arrivals that asynchronous rounds repeat; None: replies arrive as clients are fast."""
    least: int = 1
    """Number of accepted replies that a round needs in any case, unless its cohort is smaller."""
    validates: bool = True
    """Whether to check replies; without it (trusted clients in this process) all of the cohort reply, none fails, and
    each reply of a synchronous round is folded into the reduction on arrival."""

    @property
    def has_default_rules(self) -> bool:
        """Whether replies and rounds are accepted by the default rules."""
        return all(getattr(self, name) == default for name, default in _DEFAULT_RULES.items())

    def trust(self) -> RoundSettings:
        """Return the settings for trusted clients in this process: all of a cohort reply, and all replies count."""
        unused = dict.fromkeys(("max_norm_ratio", "max_missed_rounds", "secure"))
        return self.model_copy(update={**_DEFAULT_RULES, **unused, "retries": 0, "validates": False})

    @property
    def central(self) -> Privacy | None:
        """The settings of central privacy; None: the run has another mechanism, or none."""
        return self.privacy if self.privacy is not None and self.privacy.mechanism == "central" else None

    @property
    def clips(self) -> bool:
        """Whether changes are scaled down before they are combined; central privacy has a clipping norm of its own."""
        limited = self.clip_ratio is not None or self.max_norm is not None
        return self.reduction == "mean" and self.central is None and limited

    def compute_quorum(self, cohort: int) -> int:
        """Return the number of accepted replies that a round needs."""
        required = cohort // 2 + 1 if self.min_replies is None else self.min_replies
        return min(cohort, max(required, self.least))
