"""The configuration of a run, made of its sections, and what engines and methods are built from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Self, cast

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from fedspan.config.cluster import ClusterConfig
from fedspan.config.defaults import fill_dataset_defaults
from fedspan.config.engine import EngineConfig
from fedspan.config.evaluation import EvaluationConfig
from fedspan.config.federation import FederationConfig
from fedspan.config.method import MethodConfig
from fedspan.config.model import ModelConfig
from fedspan.config.privacy import PrivacyConfig
from fedspan.config.rates import get_training_defaults
from fedspan.config.section import Section
from fedspan.config.simulation import SimulationConfig
from fedspan.config.training import TrainingConfig
from fedspan.core.factors import require_rank
from fedspan.core.heads import HeadKind
from fedspan.core.method import Method, RegisteredMethod
from fedspan.core.values import OptimizerSpec, Spec
from fedspan.data.columns import LABELLED_TEXTS, TaskColumns
from fedspan.data.config import DataConfig, PartitionConfig
from fedspan.data.files import FROM_TRAINERS
from fedspan.errors import FedspanError, suggest_nearest
from fedspan.federation.settings import RoundSettings
from fedspan.federation.validation import ReplyRules
from fedspan.tasks.definition import TaskDefinition
from fedspan.tasks.registry import get_task
from fedspan.training.jobs import Privacy, TrainingSettings

__all__ = ["RunConfig"]


class RunConfig(Section):
    """The configuration of one run."""

    task: str = Field(
        default="sequence-classification",
        description="sequence-classification: a label for a text or a pair. image-classification: a label for an "
        "image. regression: a number. causal-lm: an answer to a prompt (instruction tuning). "
        "token-classification: a tag for each word (named entities). multi-label-classification: any number of "
        "labels for a text. masked-lm: masked words, without labels. text-embedding: a vector for a text. preference: "
        "the better of two answers to a prompt (DPO). trainer: what the trainers of fedspan.simulate define. Or a task "
        "of your own (docs/your-task.md). Default: the task of data.dataset, if set.",
    )
    task_options: dict[str, str | bool | int | float | None] = Field(
        default_factory=dict, description="The task's own options; docs/tasks.md has those of each task."
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of every random draw.")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, mps.")
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="CPU threads of torch; default: torch's choice."
    )
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig
    partition: PartitionConfig = Field(default_factory=PartitionConfig)
    method: MethodConfig = Field(default_factory=MethodConfig)
    federation: FederationConfig = Field(default_factory=FederationConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    privacy: PrivacyConfig | None = Field(
        default=None, description="Differential privacy; default: none. See docs/privacy.md."
    )
    simulation: SimulationConfig | None = Field(
        default=None,
        description="Conditions that the simulator imposes on its clients: dropouts, speeds, faults. See "
        "docs/simulation.md.",
    )
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    cluster: ClusterConfig | None = Field(
        default=None,
        description="Train the clients in several processes, on one machine or many, with Ray; needs "
        "fedspan[cluster]. Default: in this process. See docs/cluster.md.",
    )
    baselines: list[Literal["local", "centralized"]] = Field(
        default_factory=list,
        description="Baselines to train in addition, for comparison, with the same number of passes.",
    )
    centralized_lr: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Learning rate of the centralized baseline. It takes as many steps per epoch as all clients "
        "together and usually needs a smaller rate. Default: training.lr, or with auto its own range "
        "test.",
    )

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

    @model_validator(mode="after")
    def _validate_combination(self) -> Self:
        method = self.wrap_method(self.method.build(Spec(()), self.seed))
        if self.federation.reduction != "mean" and method.declare_claims().reduction != "sum":
            problem = (
                f"{self.federation.reduction} cannot be combined with {self.method.name}, whose server needs "
                "single replies"
            )
            raise FedspanError("federation.reduction", self.federation.reduction, "mean", problem=problem)
        if self.privacy is not None:
            self.privacy.require_fit(self.method.title, method.declare_claims(), self.federation)
            if self.evaluation.diagnostics is not None:
                problem = "it cannot be combined with privacy, because diagnostics inspect updates without noise"
                raise FedspanError("evaluation.diagnostics", self.evaluation.diagnostics, problem=problem)
        self._require_simulation_fit()
        self._require_cluster_fit()
        self._require_head_fit()
        self.federation.require_secure_fit(self.method.name, self.method.title, method.declare_claims())
        self._require_trainers()
        self._require_training_fit()
        self._require_offload_fit()
        self.task_definition.parse_options(self.task_options)
        self._require_columns()
        metrics = self.task_definition.metric_names
        if self.evaluation.metric is not None and self.evaluation.metric not in metrics:
            expected = f"a metric of {self.task}: {', '.join(metrics)}"
            raise FedspanError("evaluation.metric", self.evaluation.metric, expected)
        return self

    @property
    def task_definition(self) -> TaskDefinition:
        """The definition of the task."""
        return get_task(self.task)

    @property
    def task_columns(self) -> TaskColumns:
        """The columns that the task reads."""
        return self.task_definition.columns or LABELLED_TEXTS

    def _require_columns(self) -> None:
        """Check that the task has the roles and lists of labels that the section ``data`` names.

        Raises:
            FedspanError: If it does not.
        """
        roles = self.task_columns.roles
        for role, column in self.data.roles.items():
            if role not in roles:
                advice = suggest_nearest(role, roles) if roles else f"{self.task} has no further roles."
                problem = f"{self.task} has no columns with the role {role!r}. {advice}"
                raise FedspanError(f"data.roles.{role}", column, problem=problem)
        for option in ("label_separator", "label_columns"):
            value = getattr(self.data, option)
            if value is not None and not self.task_columns.is_multi_label:
                expected = "task: multi-label-classification, or no such option"
                raise FedspanError(f"data.{option}", value, expected, problem=f"{self.task} has no lists of labels")

    @property
    def head_kind(self) -> tuple[HeadKind | None, str | None]:
        """Kind of start of the head (None: random), and the reason if ``auto`` does without statistics."""
        requested = self.model.head_init
        if requested == "random":
            return None, None
        starts = self.task_definition.head_inits
        if not starts or self.model.is_from_scratch:
            return None, None
        if reason := self._explain_random_head():
            return None, reason
        if requested != "auto":
            return requested, None
        return cast("HeadKind", starts[-1]), None

    def _explain_random_head(self) -> str | None:
        """Return the reason why the head of this run cannot start from statistics; None if it can."""
        reasons = {
            f"statistics of features are not privatized ({'' if self.privacy is None else self.privacy.mechanism})": (
                self.privacy is not None
            ),
            f"federation.reduction: {self.federation.reduction} does not apply to statistics": (
                self.federation.reduction != "mean"
            ),
            "a secure sum needs bounded numbers, and those of a regression have no bound": (
                self.task_definition.target_type == "number" and self.federation.secure is not None
            ),
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

    def _require_head_fit(self) -> None:
        """Check that pooling and head_init fit the task and the model.

        Raises:
            FedspanError: If they do not.
        """
        if self.model.pooling not in ("auto", "stock") and not self.task_definition.can_pool:
            problem = f"{self.model.pooling} cannot be combined with {self.task}, which pools no texts"
            raise FedspanError("model.pooling", self.model.pooling, "auto", problem=problem)
        if self.model.pooling == "stock" and self.task_definition.is_embedding:
            problem = f"{self.task} has no classifier, whose pooling stock is"
            raise FedspanError("model.pooling", "stock", "auto, mean, cls, max or last", problem=problem)
        requested = self.model.head_init
        if requested in ("auto", "random"):
            return
        allowed = self.task_definition.head_inits
        if requested not in allowed:
            expected = " or ".join((*allowed, "random", "auto"))
            raise FedspanError("model.head_init", requested, expected, problem=f"{requested} does not fit {self.task}")
        if self.model.is_from_scratch:
            problem = f"{requested} needs a pretrained model, and this one is from scratch"
            raise FedspanError("model.head_init", requested, "random", problem=problem)
        if reason := self._explain_random_head():
            raise FedspanError("model.head_init", requested, "random", problem=f"the head cannot start: {reason}")

    def _require_offload_fit(self) -> None:
        """Check that the rest of the run can use a base that is offloaded.

        Raises:
            FedspanError: If it cannot.
        """
        if self.model.device_map is None:
            return
        if self.engine.name != "loop":
            problem = (
                f"the engine {self.engine.name} shares a base among threads or processes, and offloaded weights are on "
                "the device only while one call uses them"
            )
            raise FedspanError("model.device_map", "auto", "engine.name: loop", problem=problem)
        if self.privacy is not None and self.privacy.mechanism == "dp-sgd":
            problem = "it cannot be combined with privacy.mechanism: dp-sgd, which stacks examples over the base"
            raise FedspanError("model.device_map", "auto", "null", problem=problem)

    def _require_trainers(self) -> None:
        """Check that the task is the trainers' only if the examples are, and that nothing needs their examples.

        Raises:
            FedspanError: If it is not, or an option of the run needs examples that fedspan can read.
        """
        if self.data.train != FROM_TRAINERS:
            if self.task == "trainer":
                expected = "a task that fedspan computes itself, or fedspan.simulate(config, folder, trainers=...)"
                raise FedspanError("task", "trainer", expected)
            return
        problem = "it needs examples that fedspan can read, and those of this run are the trainers' own"
        options: dict[str, object] = {
            "training.lr": "auto" if self.training.lr == "auto" else None,
            "baselines": self.baselines or None,
            "evaluation.diagnostics": self.evaluation.diagnostics,
            "cluster": None if self.cluster is None else self.cluster.workers,
            "engine.name": "flower-sim" if self.engine.name == "flower-sim" else None,
        }
        for field, value in options.items():
            if value is not None:
                raise FedspanError(field, value, problem=problem)

    def _require_head_updates_fit(self) -> None:
        """Check that ``training.head_updates`` fits the rest of the run.

        Raises:
            FedspanError: If it does not.
        """
        updates = self.training.head_updates
        reasons = {
            f"{self.task} has no classes": not self.task_definition.is_classifier,
            "dp-sgd does not protect which classes a client has": self.privacy is not None
            and self.privacy.mechanism == "dp-sgd",
            "model.extras: frozen trains no row of the head": self.model.extras == "frozen",
            "scaffold would count the rows that a client does not train as corrected": any(
                wrapper.name == "scaffold" for wrapper in self.method.wrappers
            ),
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        if updates != "all" and reason is not None:
            problem = f"{updates} does not apply, because {reason}"
            raise FedspanError("training.head_updates", updates, "all", problem=problem)

    def _require_training_fit(self) -> None:
        """Check that options of local training, and those that need validation parts, fit the rest of the run.

        Raises:
            FedspanError: If they do not.
        """
        training, adjustment = self.training, self.training.logit_adjustment
        if adjustment and not self.task_definition.is_classifier:
            problem = f"logits cannot be adjusted to classes, because {self.task} has no classes"
            raise FedspanError("training.logit_adjustment", adjustment, "0", problem=problem)
        if adjustment and self.privacy is not None and self.privacy.mechanism == "dp-sgd":
            problem = "it cannot be combined with dp-sgd, which does not protect a client's class counts"
            raise FedspanError("training.logit_adjustment", adjustment, "0", problem=problem)
        for name in ("checkpoint_steps", "checkpoint_minutes"):
            value = getattr(training, name)
            if value is not None and self.privacy is not None and self.privacy.mechanism == "dp-sgd":
                problem = "a round of dp-sgd has no checkpoints: its noise is drawn anew when its training starts over"
                raise FedspanError(f"training.{name}", value, "null", problem=problem)
        self._require_loss_fit()
        self._require_head_updates_fit()
        self._require_reference_fit()
        if training.lr == "auto" and self.privacy is not None:
            problem = "auto cannot be combined with privacy, because every trial would cost privacy budget"
            raise FedspanError("training.lr", "auto", "a number", problem=problem)
        if self.partition.validation:
            return
        problem = "it needs a partition.validation above 0, because it decides by validation scores"
        if training.lr == "auto":
            raise FedspanError("training.lr", "auto", problem=problem)
        if self.federation.early_stopping is not None:
            raise FedspanError("federation.early_stopping", self.federation.early_stopping, problem=problem)

    def _require_loss_fit(self) -> None:
        """Check that label smoothing and class weights fit the task and the rest of the run.

        Raises:
            FedspanError: If they do not.
        """
        reasons = {
            f"{self.task} has no classes, of which each example has one": not self.task_definition.is_classifier,
            "training.logit_adjustment corrects for shares of classes already, and leaves out classes": (
                self.training.logit_adjustment > 0
            ),
            "dp-sgd bounds each example's gradient, which weights would change": self.privacy is not None
            and self.privacy.mechanism == "dp-sgd",
        }
        reason = next((reason for reason, applies in reasons.items() if applies), None)
        for option, off in (("label_smoothing", 0), ("class_weights", "none")):
            value = getattr(self.training, option)
            if reason is not None and value != off:
                raise FedspanError(f"training.{option}", value, str(off), problem=reason)

    def _require_reference_fit(self) -> None:
        """Check that a task that compares the model with the pretrained one can do so.

        Raises:
            FedspanError: If it cannot.
        """
        if not self.task_definition.has_reference:
            return
        reference = f"{self.task} compares the model with its reference, the pretrained model"
        if self.training.lora_dropout:
            problem = f"{reference}, and dropout would change one of the two alone"
            raise FedspanError("training.lora_dropout", self.training.lora_dropout, "0", problem=problem)
        if self.model.adapter is not None:
            expected = "model.name: the folder of the merged model (fedspan export --form merged)"
            problem = f"{reference}, and an adapter would be missing there"
            raise FedspanError("model.adapter", self.model.adapter, expected, problem=problem)

    def _require_simulation_fit(self) -> None:
        """Check that simulated conditions fit the engine and the task.

        Raises:
            FedspanError: If they do not.
        """
        conditions = self.simulation
        if conditions is None:
            return
        if self.engine.name == "flower-sim":
            problem = "engine.name: flower-sim cannot simulate conditions. Use engine.name: batched or loop"
            raise FedspanError("simulation", self.engine.name, problem=problem)
        flips = conditions.faults is not None and conditions.faults.kind == "label-flip"
        if flips and not self.task_definition.is_classifier:
            raise FedspanError(
                "simulation.faults.kind", "label-flip", problem=f"label-flip needs labels, and {self.task} has none"
            )

    def _require_cluster_fit(self) -> None:
        """Check that a cluster fits the rest of the run.

        Raises:
            FedspanError: If it does not.
        """
        cluster = self.cluster
        if cluster is None:
            return
        if self.engine.name == "flower-sim":
            problem = "it has processes of its own, which cannot be combined with cluster"
            raise FedspanError("engine.name", "flower-sim", "batched or loop", problem=problem)
        if self.evaluation.diagnostics is not None:
            problem = "it cannot be combined with cluster, because no process sees both ends of an update"
            raise FedspanError("evaluation.diagnostics", self.evaluation.diagnostics, problem=problem)
        if cluster.gpus_per_worker and (self.baselines or self.training.lr == "auto"):
            field = "baselines" if self.baselines else "training.lr"
            problem = "it trains in the driver's process, which leaves the GPUs to the workers. Run it without cluster"
            raise FedspanError(field, self.baselines or "auto", problem=problem)
        if self.model.device_map is not None:
            problem = "it cannot be combined with cluster, each of whose workers has the whole base"
            raise FedspanError("model.device_map", self.model.device_map, "null", problem=problem)
        requested = "cuda" if cluster.gpus_per_worker else "cpu"
        if self.device not in ("auto", requested):
            expected = f"auto or {requested}, because cluster.gpus_per_worker is {cluster.gpus_per_worker:g}"
            raise FedspanError("device", self.device, expected)

    @property
    def active_workers(self) -> int:
        """Number of a cluster's workers that a round can occupy; 1 without a cluster."""
        cohort = self.federation.clients_per_round or self.partition.clients
        return 1 if self.cluster is None else max(1, min(self.cluster.workers, cohort or self.cluster.workers))

    def build_simulation_rules(self) -> ReplyRules | None:
        """Return the rules by which a simulated round is accepted; None: every selected client has to reply.

        A simulation has rules if it has conditions or secure aggregation, or if one of the rules in ``federation`` is
        not the default.
        """
        rules, conditions = self.federation.build_reply_rules(), self.simulation
        if conditions is None and self.federation.secure is None and rules == FederationConfig().build_reply_rules():
            return None
        return rules if conditions is None else replace(rules, validate=conditions.validation)

    @property
    def data_seed(self) -> int:
        """Seed of the partition."""
        return self.seed if self.partition.seed is None else self.partition.seed

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

    def build_training_settings(self, key: bytes | None = None) -> TrainingSettings:
        """Return the settings of local training for the engines; ``key`` as in ``build_privacy_settings``.

        With ``training.lr: auto``, the rate is the default; ``runs.learning_rate`` replaces it.
        """
        t = self.training
        return TrainingSettings(
            optimizer=OptimizerSpec(
                name=t.optimizer,
                lr=self.default_lr if t.lr == "auto" else t.lr,
                momentum=t.momentum,
                betas=t.betas,
                eps=t.eps,
                weight_decay=t.weight_decay,
            ),
            schedule=t.schedule,
            warmup_rounds=t.warmup_rounds,
            min_lr=t.min_lr,
            cycle_rounds=t.cycle_rounds,
            batch_size=t.batch_size,
            accumulate=t.gradient_accumulation_steps,
            epochs=t.local_epochs,
            steps=t.local_steps,
            max_grad_norm=t.max_grad_norm,
            keep_optimizer=t.optimizer_state == "keep",
            dropout=t.lora_dropout,
            group_by_length=t.group_by_length,
            logit_adjustment=t.logit_adjustment,
            label_smoothing=t.label_smoothing,
            class_weights=t.class_weights if isinstance(t.class_weights, str) else tuple(t.class_weights.items()),
            head_updates=t.head_updates,
            privacy=self.build_privacy_settings(key),
        )

    def build_round_settings(self, key: bytes | None = None) -> RoundSettings:
        """Return the settings of rounds for the engines; ``key`` as in ``build_privacy_settings``."""
        f, privacy = self.federation, self.build_privacy_settings(key)
        return RoundSettings(
            rounds=f.rounds,
            cohort=f.clients_per_round,
            seed=self.seed,
            reduction=f.reduction,
            trim=f.trim,
            clip_ratio=f.clip_ratio,
            max_norm=f.max_norm,
            max_weight_ratio=f.max_weight_ratio,
            privacy=privacy,
        )

    def build_method(self, spec: Spec) -> RegisteredMethod:
        """Build the method, bound to a model's target layers.

        Raises:
            FedspanError: If its rank is larger than a layer.
        """
        method = self.method.build(spec, self.seed)
        if method.claims.adapter:
            too_large = require_rank(spec, method.r)
            if too_large:
                raise FedspanError(
                    "method.r", method.r, problem=f"{method.r} is larger than a target layer: {too_large}"
                )
        return method

    def wrap_method(self, method: RegisteredMethod) -> Method:
        """Wrap a method with the run's policy for the extras (by default the method's own) and the run's wrappers.

        Raises:
            FedspanError: If a wrapper is unknown, or does not fit the method or the training.
        """
        training = self.build_training_settings()
        policy, lr_scale = self.model.extras, self.model.extras_lr_scale
        return self.method.wrap(method, policy, lr_scale, training.optimizer, training.max_grad_norm)
