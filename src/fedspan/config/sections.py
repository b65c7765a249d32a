"""The sections of the configuration of a run, and the settings of local training that are built from them."""

from __future__ import annotations

from typing import Literal

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
from fedspan.core.method import Method, RegisteredMethod
from fedspan.core.values import OptimizerSpec
from fedspan.data.columns import LABELED_TEXTS, TaskColumns
from fedspan.data.config import DataConfig, PartitionConfig
from fedspan.errors import FedspanError
from fedspan.methods.registry import get_method_class
from fedspan.tasks.definition import TaskDefinition
from fedspan.tasks.registry import get_task
from fedspan.training.jobs import Privacy, TrainingSettings
from fedspan.wrappers.head_rounds import HeadRounds, NewHead


class RunSections(Section):
    """The sections of a run's configuration, each valid by itself."""

    task: str = Field(
        default="sequence-classification",
        description="sequence-classification: a label for a text or a pair. image-classification: a label for an "
        "image. regression: a number. causal-lm: an answer to a prompt (instruction tuning). "
        "token-classification: a tag for each word (named entities). multi-label-classification: any number of "
        "labels for a text. masked-lm: masked words, without labels. text-embedding: a vector for a text. seq2seq: a "
        "text for a text (translation, summaries). preference: the better of two answers to a prompt (DPO). trainer: "
        "what the trainers of fedspan.simulate define. Or a task of your own (docs/your-task.md). Default: the task of "
        "data.dataset, if set.",
    )
    task_options: dict[str, str | bool | int | float | None] = Field(
        default_factory=dict, description="The task's own options; docs/tasks.md leads to those of each task."
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of every random draw.")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, mps.")
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="CPU threads of torch; default: torch's choice."
    )
    deterministic: bool = Field(
        default=False,
        description="On a GPU, use only deterministic algorithms (torch.use_deterministic_algorithms): reruns are "
        "bitwise equal. Some are slower, and an operation without one fails. It lasts in a process until the next run "
        "without it. In a deployment it applies to the server and the nodes. It has no effect on a CPU, where reruns "
        "are bitwise equal anyway.",
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
    baselines: list[Literal["local-only", "centralized"]] = Field(
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

    def wrap_method(self, method: RegisteredMethod, head: NewHead | None = None) -> Method:
        """Wrap a method with the run's policy for the extras (by default the method's own) and the run's wrappers.

        Args:
            method: The method.
            head: The model's head, if it is new and rounds may train it alone.

        Raises:
            FedspanError: If a wrapper is unknown, or does not fit the method or the training.
        """
        training = self.build_training_settings()
        policy, lr_scale = self.model.extras, self.model.extras_lr_scale
        wrapped = self.method.wrap(method, policy, lr_scale, training.optimizer, training.max_grad_norm)
        if head is None or (policy or method.claims.extras) != "average":  # a baseline's method may have its own
            return wrapped
        # Epochs on stored features take little time, and three without a backward pass through the model no longer than
        # one with it. The planned charges of privacy are those of the run's own epochs.
        epochs = None if training.steps or training.privacy else (10 if head.is_alone else 3) * training.epochs
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
        return 0 if self.privacy or self.federation.buffered else min(5, self.federation.rounds // 5)
