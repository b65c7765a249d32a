"""The parts that train a run's clients: device, model, task, method and engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch

from fedspan.assembly.model import ModelObjects, RunModel, build_model
from fedspan.assembly.task import collect_task_settings
from fedspan.config import RunConfig
from fedspan.core.method import RegisteredMethod
from fedspan.errors import FedspanError
from fedspan.files import convert_disk_errors
from fedspan.models.adapted import AdaptedModel
from fedspan.run_folder import RunFolder
from fedspan.tasks.settings import TaskSettings
from fedspan.tasks.task import RunTask, Task
from fedspan.training.batched import BatchedEngine
from fedspan.training.config import Privacy, TrainingSettings
from fedspan.training.engine import Engine
from fedspan.training.loop import LoopEngine
from fedspan.training.stacking import StackingPlan
from fedspan.training.stages import Stages

_FILLING: Any = torch.utils.deterministic
_restricts_torch = False  # whether the last run of this process has restricted torch


def choose_device(name: str) -> torch.device:
    """Return the named device; ``auto``: CUDA, then Apple's MPS, then the CPU."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # on "meta", tensors can be created but hold no values
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).strip().splitlines()[0].partition(". ")[0]
        raise FedspanError(
            "device", name, "auto, cpu, cuda, cuda:N or mps", problem=f"this machine has no device {name!r} ({reason})"
        ) from None
    return device


def set_algorithms(deterministic: bool, device: torch.device) -> None:
    """Restrict torch to deterministic algorithms in this process, or undo what an earlier run restricted."""
    global _restricts_torch
    if deterministic and device.type != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS at its start
        _FILLING.fill_uninitialized_memory = False  # only finds mistakes, and takes time
        torch.use_deterministic_algorithms(True)
        _restricts_torch = True
    elif _restricts_torch:
        torch.use_deterministic_algorithms(False)
        _FILLING.fill_uninitialized_memory = True  # torch's default
        _restricts_torch = False


def make_engine(
    config: RunConfig,
    adapted: AdaptedModel,
    task: Task,
    settings: TrainingSettings,
    privacy: Privacy | None,
    stages: Stages | None = None,
    shared_with: Engine | None = None,
) -> Engine:
    """Build the engine that a config names.

    Args:
        shared_with: Another engine on the same model and task, whose prefix caches and time for measuring are shared.
    """
    options, size = config.engine, config.evaluation.batch_size
    prefixes = None if shared_with is None else shared_with.prefixes
    stages = stages or (None if shared_with is None else shared_with.stages)
    loop = LoopEngine(adapted, task, settings, config.seed, options, prefixes, stages, privacy, size)
    if options.name != "batched":
        return loop
    engine = BatchedEngine(loop, config.federation.rounds)
    if isinstance(shared_with, BatchedEngine):
        engine.measuring = shared_with.measuring
    return engine


def describe_refusal(engine: Engine) -> str | None:
    """Return a note for the user if the clients did not train as requested; None: they did."""
    reason = engine.refusal if isinstance(engine, BatchedEngine) else None
    return None if reason is None else f"clients train one by one, as with engine.name: loop, because {reason}"


def keep_stacking_plan(run_folder: RunFolder, engine: Engine) -> None:
    """Restore a resumed run's stacking plan, or have the one that is chosen written before it is used.

    The bits of a run's results depend on the number of stacked clients. Numbers that the config asks for replace those
    of the plan, as after an error for too little memory.
    """
    if not isinstance(engine, BatchedEngine):
        return
    if not run_folder.engine.exists():

        def store(plan: StackingPlan) -> None:
            with convert_disk_errors(run_folder.path):
                run_folder.path.mkdir(parents=True, exist_ok=True)  # that of a baseline is new
            run_folder.write_json(run_folder.engine, asdict(plan))

        engine.on_plan = store
        return
    stored = run_folder.read_json(run_folder.engine)
    try:
        plan = StackingPlan(int(stored["clients_per_pass"]), int(stored["workers"]))  # pyright: ignore
    except (TypeError, KeyError, ValueError):
        raise FedspanError(
            "engine", str(run_folder.engine), "a file with two numbers, clients_per_pass and workers"
        ) from None
    options = engine.options
    engine.stacking = StackingPlan(options.clients_per_pass or plan.clients_per_pass, options.workers or plan.workers)
    if engine.stacking != plan:
        run_folder.write_json(run_folder.engine, asdict(engine.stacking))


@contextmanager
def without_stacking_plan(engine: Engine) -> Generator[None]:
    """Evaluate within this context as before a plan is known.

    The start of a run is evaluated before the first round, which chooses the plan. A run that was stopped in its first
    round evaluates its start again, and knows the plan by then.
    """
    if not isinstance(engine, BatchedEngine):
        yield
        return
    plan, engine.stacking = engine.stacking, None
    try:
        yield
    finally:
        engine.stacking = engine.stacking or plan


@dataclass(frozen=True, kw_only=True)
class RunTrainer:
    """What trains the clients of a run, without their examples.

    Args:
        labels: Label names by index; for a language model, those of the data's column of labels, if any.
        model: The model that the engine trains, with the data that its export needs.
        base_digest: Returns the digest of the frozen weights, which no config names; called first before a server
            state's base is set. None: the config names the model.
    """

    config: RunConfig
    labels: tuple[str, ...]
    model: RunModel
    task_settings: TaskSettings
    task: RunTask
    engine: Engine
    method: RegisteredMethod
    base_digest: Callable[[], str] | None = None


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
        objects: Model and tokenizer that were passed from Python, in place of those that the config names.
        targets: Paths of the target layers, as another process found them; None: they are found by PEFT's rules.
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
    if task_settings.has_pairs_apart and not getattr(task, "has_several_passes", False):
        problem = "it pools each text of a pair alone, and the task encodes both as one"
        raise FedspanError("model.pooling", config.model.pooling, "stock", problem=problem)
    method = config.build_method(replace(adapted.spec, clients=clients))
    settings, privacy = config.build_training_settings(), config.build_privacy_settings(key)
    engine = make_engine(config, adapted, task, settings, privacy, stages)
    return RunTrainer(
        config=config,
        labels=labels,
        model=built,
        task_settings=task_settings,
        task=task,
        engine=engine,
        method=method,
        base_digest=_build_base_digest(adapted, objects),
    )


def _build_base_digest(adapted: AdaptedModel, objects: ModelObjects | None) -> Callable[[], str] | None:
    """Return a function that computes the digest of a model that was passed from Python; None for others.

    None also for one that Accelerate offloaded, whose weights are not in the model.
    """
    if objects is None or objects.model is None or any(value.is_meta for value in adapted.model.parameters()):
        return None
    return cache(lambda: adapted.hash_frozen().hexdigest())


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
