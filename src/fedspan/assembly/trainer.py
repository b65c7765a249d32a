"""Loading of a run's model, and construction of what trains its clients: task, method and engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fedspan.assembly.devices import set_algorithms
from fedspan.assembly.engine import make_engine
from fedspan.assembly.model import ModelObjects, RunModel, build_model
from fedspan.assembly.task import collect_task_settings
from fedspan.config import RunConfig
from fedspan.core.method import RegisteredMethod
from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.tasks.settings import TaskSettings
from fedspan.tasks.task import RunTask
from fedspan.training.engine import Engine
from fedspan.training.stages import Stages


@dataclass(frozen=True)
class RunTrainer:
    """What trains the clients of a run, without their examples.

    Args:
        model: The model that the engine trains.
        task_settings: Settings of the task that the model needs.
        task: The learning problem.
        engine: The engine.
        method: The method, without the run's wrappers.
    """

    model: RunModel
    task_settings: TaskSettings
    task: RunTask
    engine: Engine
    method: RegisteredMethod


def build_trainer(
    config: RunConfig,
    labels: tuple[str, ...],
    clients: int,
    device: torch.device,
    key: bytes | None,
    stages: Stages | None = None,
    objects: ModelObjects | None = None,
    targets: Sequence[str] | None = None,
) -> RunTrainer:
    """Load a run's model and build what trains it.

    Args:
        config: Config of the run.
        labels: Names of the labels by index.
        clients: Number of the federation's clients.
        device: Device of the model.
        key: Secret key of the noise, if it has one.
        stages: Reports the progress of long work; None: it is not reported.
        objects: Model and tokenizer that were passed from Python, in place of those that the config names.
        targets: Paths of the target layers, as another process found them; None: they are found by PEFT's rules.

    Raises:
        FedspanError: If anything in the config does not fit the model.
    """
    stages = stages or Stages()
    set_algorithms(config.deterministic, device)
    with stages.stage("model"):
        built = build_model(config, labels, device, objects, targets)
    adapted = built.adapted
    require_private_model(config, adapted)
    task_settings = collect_task_settings(
        config, labels, compute_max_length(config, built.processor, adapted.model), built.pooling
    )
    task = config.task_definition.build(built.processor, task_settings, config.data)
    method = config.build_method(replace(adapted.spec, clients=clients))
    engine = make_engine(config, adapted, task, config.build_training_settings(key), stages)
    return RunTrainer(built, task_settings, task, engine, method)


def require_private_model(config: RunConfig, adapted: AdaptedModel) -> None:
    """Check that the run's privacy covers all parts of a model."""
    if config.privacy is not None and adapted.buffers:
        problem = f"this model's running statistics ({adapted.buffers[0]}, ...) come from raw examples, without privacy"
        raise FedspanError("privacy", config.privacy.mechanism, problem=problem)


def compute_max_length(config: RunConfig, tokenizer: object, model: torch.nn.Module) -> int:
    """Return the maximum number of tokens of an example that the config, the tokenizer and the model allow."""
    limits = [
        config.model.max_length,
        getattr(tokenizer, "model_max_length", config.model.max_length),
        getattr(getattr(model, "config", None), "max_position_embeddings", config.model.max_length),
    ]
    for name, module in model.named_modules():  # RoBERTa-like models count positions from after the padding index
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding) and padding is not None:
            limits.append(module.num_embeddings - padding - 1)
    return int(min(limits))
