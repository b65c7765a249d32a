"""The sections of the configuration of a run, and the settings of local training that are built from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from fedspan.config.federation import FederationConfig
from fedspan.config.method import MethodConfig
from fedspan.config.model import ModelConfig
from fedspan.config.rates import get_training_defaults
from fedspan.core.method import Claims, Method, RegisteredMethod
from fedspan.core.noise import derive_seed_key
from fedspan.data.catalogue import DatasetEntry, list_datasets
from fedspan.data.columns import LABELED_TEXTS, TaskColumns
from fedspan.data.config import DataConfig, PartitionConfig
from fedspan.errors import FedspanError
from fedspan.federation.conditions import Conditions, Faults, SpeedDistribution
from fedspan.federation.presence import Presence
from fedspan.methods.registry import get_method_class
from fedspan.section import Section
from fedspan.tasks.definition import TaskDefinition
from fedspan.tasks.registry import TASKS, get_task
from fedspan.training.jobs import PrefixSettings, Privacy, TrainingSettings
from fedspan.wrappers.head_rounds import HeadRounds, NewHead


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


_GIB = 2**30


class EngineConfig(Section):
    """The simulator. These settings do not change results, up to rounding."""

    name: Literal["batched", "loop"] = "batched"
    """batched: several clients in each forward and backward pass over the frozen base. loop: one client after another,
    the reference."""
    clients_per_pass: int | None = Field(default=None, ge=1, le=1024)
    """Clients per pass of batched; default: measured at the start, 1 if more would be slower."""
    workers: int | None = Field(default=None, ge=1, le=1024)
    """batched: threads that train clients in parallel on one base and share torch's own threads; default: measured."""
    padding_free: bool = True
    """Concatenate the tokens of a batch between the first block and the last, with attention in bins of whole texts;
    batched only, for models with Transformers' eager or sdpa attention."""
    prefix_cache: bool = True
    """Compute the hidden states that enter the first trainable layer once per example, if layers_to_transform excludes
    the first layers."""
    prefix_memory: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """GiB of memory for these hidden states."""
    prefix_folder: str | None = Field(default=None, min_length=1)
    """Folder on a local disk for hidden states beyond prefix_memory, in a memory-mapped file that is removed with the
    process; default: compute them every time."""

    def build_prefix_settings(self, batch_size: int) -> PrefixSettings | None:
        """Return the settings of the prefix cache for the engines; None: no cache."""
        if not self.prefix_cache:
            return None
        folder = None if self.prefix_folder is None else Path(self.prefix_folder)
        return PrefixSettings(int(self.prefix_memory * _GIB), folder, batch_size)


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


class PrivacyConfig(Section):
    """Clipping, noise and the privacy budget; needs fedspan[privacy]."""

    mechanism: Literal["central", "local", "dp-sgd"]
    """central: the server clips every client's change and adds noise to the sum; protects a client from anyone who sees
    the models, except the server. local: every client clips its change and adds noise to it; also protects from the
    server, with much more noise. dp-sgd: every client clips the gradient of each example and adds noise to the sum;
    protects an example from everyone except its data owner."""
    clip: float = Field(default=1.0, ge=1e-6, le=1e6)
    """Maximum L2 norm of a client's change (central, local) or of an example's gradient (dp-sgd)."""
    noise: float | None = Field(default=None, ge=1e-9, le=1e9)
    """Standard deviation of the noise divided by clip, from 1e-9 to 1e9: accountants do not finish where its square
    under- or overflows. Default: the smallest that epsilon allows for all rounds."""
    epsilon: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Privacy budget: the run ends before a round that would exceed it; default: no budget."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """Probability with which the guarantee may fail: well below 1 over the number of clients or examples."""
    accountant: Literal["rdp", "prv"] = "rdp"
    """Accountant of Opacus. rdp: fast and slightly loose. prv: tight, and slow if clients differ;
    rdp where prv would take minutes, as in long runs or at sampling rates near 0.5."""
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


_SMALLEST_SHARE = 0.0001  # Ray's
_ADDRESS = re.compile(r"(ray://)?[^\s/:]+:\d{1,5}")


class ClusterConfig(Section):
    """Workers that train the clients, each in a process of its own with the engine of ``engine``."""

    address: str = "local"
    """local: a temporary Ray on this machine, which no other machine can reach. auto: the cluster that this machine
    belongs to (RAY_ADDRESS, or ray start). HOST:PORT or ray://HOST:PORT: another cluster. Anyone who can reach a
    cluster can run code on it: see docs/security.md."""
    workers: int = Field(ge=1, le=4096)
    """Number of workers. Clients are distributed among them by tokens; with engine.name: loop the results do not depend
    on the number, with batched they agree to rounding."""
    threads_per_worker: int = Field(default=1, ge=1, le=1024)
    """CPU threads per worker, instead of threads."""
    gpus_per_worker: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    """Share of a GPU per worker; 0.5: two workers share one. 0: workers train on the CPU."""
    start_timeout: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    """Seconds that workers may take to start, or to restart after all have failed."""

    @field_validator("gpus_per_worker")
    @classmethod
    def _validate_share(cls, value: float) -> float:
        if 0 < value < _SMALLEST_SHARE:
            raise ValueError(f"0, or a share from {_SMALLEST_SHARE} to 1")
        return value

    @field_validator("address")
    @classmethod
    def _validate_address(cls, value: str) -> str:
        if value not in ("local", "auto") and not _ADDRESS.fullmatch(value):
            raise ValueError("local, auto, HOST:PORT or ray://HOST:PORT")
        return value


class RunSections(Section):
    """The sections of a run's configuration, each valid by itself."""

    task: str = "sequence-classification"
    """sequence-classification: a label for a text or a pair. image-classification: a label for an image. regression: a
    number. causal-lm: an answer to a prompt (instruction tuning). token-classification: a tag for each word (named
    entities). multi-label-classification: any number of labels for a text. masked-lm: masked words, without labels.
    text-embedding: a vector for a text. seq2seq: a text for a text (translation, summaries). preference: the better of
    two answers to a prompt (DPO). trainer: what the trainers of fedspan.simulate define. Or a task of your own
    (docs/your-task.md). Default: the task of data.dataset, if set."""
    task_options: dict[str, str | bool | int | float | None] = Field(default_factory=dict)
    """The task's own options; docs/tasks.md leads to those of each task."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of every random draw."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of torch; default: torch's choice."""
    deterministic: bool = False
    """On a GPU, use only deterministic algorithms (torch.use_deterministic_algorithms): reruns are bitwise equal. Some
    are slower, and an operation without one fails. It lasts in a process until the next run without it. In a deployment
    it applies to the server and the nodes. It has no effect on a CPU, where reruns are bitwise equal anyway."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig
    partition: PartitionConfig = Field(default_factory=PartitionConfig)
    method: MethodConfig = Field(default_factory=MethodConfig)
    federation: FederationConfig = Field(default_factory=FederationConfig)
    training: TrainingSettings = Field(default_factory=TrainingSettings)
    privacy: PrivacyConfig | None = None
    """Differential privacy; default: none. See docs/privacy.md."""
    simulation: SimulationConfig | None = None
    """Conditions that the simulator imposes on its clients: dropouts, speeds, faults. See docs/simulation.md."""
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    cluster: ClusterConfig | None = None
    """Train the clients in several processes, on one machine or many, with Ray; needs fedspan[cluster]. Default: in
    this process. See docs/cluster.md."""
    baselines: list[Literal["local-only", "centralized"]] = Field(default_factory=list)
    """Baselines to train in addition, for comparison, with the same number of passes."""
    centralized_lr: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Learning rate of the centralized baseline. It takes as many steps per epoch as all clients together and usually
    needs a smaller rate. Default: training.lr, or with auto its own range test."""

    @field_validator("task")
    @classmethod
    def _require_known_task(cls, value: str) -> str:
        try:
            get_task(value)
        except FedspanError as error:
            raise PydanticCustomError("unknown", "{problem}", {"problem": error.problem, "error": error}) from None
        return value

    @model_validator(mode="before")
    @classmethod
    def _fill_dataset_defaults(cls, values: object) -> object:
        return fill_dataset_defaults(values)

    @property
    def task_definition(self) -> TaskDefinition:
        """The definition of the task."""
        return get_task(self.task)

    @property
    def task_columns(self) -> TaskColumns:
        """The columns that the task reads."""
        return self.task_definition.columns or LABELED_TEXTS

    def build_privacy_settings(self, key: bytes | None = None) -> Privacy | None:
        """Return the settings of differential privacy for the engines.

        Args:
            key: A secret key of the noise; None: a key derived from the seed.
        """
        return None if self.privacy is None else self.privacy.build_settings(self.federation.rounds, self.seed, key)

    @property
    def default_lr(self) -> float:
        """Default learning rate of the task and the method."""
        return get_training_defaults(self.task, self.method.name).lr

    def build_training_settings(self) -> TrainingSettings:
        """Return the settings of local training for the engines.

        With ``training.lr: auto``, the rate is the default; ``runs.learning_rate`` replaces it.
        """
        changes = {"lr": self.default_lr} if self.training.lr == "auto" else {}
        return self.training.model_copy(update=changes)

    def wrap_method(self, method: RegisteredMethod, head: NewHead | None = None) -> Method:
        """Wrap a method with the run's policy for the extras (by default the method's own) and the run's wrappers.

        Args:
            head: The model's head, if it is new and rounds may train it alone.

        Raises:
            FedspanError: If a wrapper is unknown, or does not fit the method or the training.
        """
        training = self.build_training_settings()
        policy, lr_scale = self.model.extras, self.model.extras_lr_scale
        wrapped = self.method.wrap(method, policy, lr_scale, training.optimizer_spec, training.max_grad_norm)
        if head is None or (policy or method.claims.extras) != "average":  # a baseline's method may have its own
            return wrapped
        # Epochs on stored features take little time, and three without a backward pass through the model no longer than
        # one with it. The planned charges of privacy are those of the run's own epochs.
        epochs = None if training.local_steps or self.privacy else (10 if head.is_alone else 3) * training.local_epochs
        return HeadRounds(inner=wrapped, rounds=self.head_rounds, head=head, epochs=epochs)

    @property
    def head_rounds(self) -> int:
        """Number of rounds, the first ones, that train the head alone if it is new and starts at random."""
        model, requested = self.model, self.model.head_rounds
        if requested != "auto":
            return requested
        if self.task_definition.target_type != "label" or model.is_from_scratch or model.head_init != "auto":
            return 0
        if (model.extras or get_method_class(self.method.name).claims.extras) != "average":
            return 0
        if self.privacy or self.federation.buffered or self.federation.rounds < 5:
            return 0
        return min(5, self.federation.rounds // 3)


def fill_dataset_defaults(values: object) -> object:
    """Fill a run's configuration with what ``data.dataset`` implies for the values that the user left out.

    Args:
        values: Values that are not validated yet; their other mistakes are reported later.
    """
    if not isinstance(values, Mapping):
        return values
    key = _get_field(values.get("data"), "dataset")
    if not isinstance(key, str):
        return values
    entry = next((entry for entry in list_datasets() if entry.key == key), None)
    if entry is None:
        return values
    task = values.get("task", entry.task)
    if task != entry.task and isinstance(task, str) and task in TASKS:
        raise FedspanError("task", task, f"{entry.task}, the task of data.dataset {entry.key}")
    content = {**values, "task": task, "evaluation": _fill_evaluation(values.get("evaluation", {}), entry)}
    if entry.prompt is not None and _get_field(values["data"], "messages") is None:
        # The prompt is needed long after the data were read.
        content["data"] = _fill_section(values["data"], {"prompt": entry.prompt})
    return content


def _fill_evaluation(section: Any, entry: DatasetEntry) -> Any:
    defaults = {"answer_pattern": entry.answer_pattern, "max_new_tokens": entry.max_new_tokens}
    if entry.metric in get_task(entry.task).metric_names:
        defaults["metric"] = entry.metric  # exact_match is only measured at the end
    return _fill_section(section, {name: value for name, value in defaults.items() if value is not None})


def _get_field(section: Any, name: str) -> Any:
    return section.get(name) if isinstance(section, Mapping) else getattr(section, name, None)


def _fill_section(section: Any, defaults: Mapping[str, Any]) -> Any:
    """Fill a section, given as values or a model, with defaults for what it leaves out."""
    if isinstance(section, BaseModel):
        missing = {name: value for name, value in defaults.items() if name not in section.model_fields_set}
        return section.model_copy(update=missing)
    if isinstance(section, Mapping):
        return {**defaults, **section}
    return section
