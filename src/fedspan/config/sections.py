"""The configuration of a run as sections, and the settings of local training that are built from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from fedspan.config.method import MethodConfig
from fedspan.config.rates import get_training_defaults
from fedspan.core.method import Method, RegisteredMethod
from fedspan.core.noise import derive_seed_key
from fedspan.data.catalogue import DatasetEntry, list_datasets
from fedspan.data.columns import LABELED_TEXTS, TaskColumns
from fedspan.data.config import DataConfig, PartitionConfig
from fedspan.errors import FedspanError
from fedspan.federation.conditions import SimulationConfig
from fedspan.federation.config import EvaluationConfig, FederationConfig
from fedspan.methods.registry import get_method_class
from fedspan.models.config import ModelConfig
from fedspan.section import Section
from fedspan.tasks.definition import TaskDefinition
from fedspan.tasks.registry import TASKS, get_task
from fedspan.training.config import ClusterConfig, EngineConfig, Privacy, PrivacyConfig, TrainingSettings
from fedspan.wrappers.head_rounds import HeadRounds, NewHead


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
        if self.privacy is None:
            return None
        noise_key = derive_seed_key(self.seed) if key is None else key
        return Privacy(**dict(self.privacy), rounds=self.federation.rounds, key=noise_key, secret=key is not None)

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
