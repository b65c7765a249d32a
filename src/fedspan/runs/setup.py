"""Construction of a run from its config: clients with their ranks, engine with its stacking plan, federation."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedspan.clients.mappings import LazyMapping
from fedspan.config import RunConfig
from fedspan.core.method import RegisteredMethod
from fedspan.core.values import Client
from fedspan.crypto import require_packages
from fedspan.data.duplicates import describe_shared
from fedspan.data.names import read_required_names, sort_names
from fedspan.data.objects import DataObjects
from fedspan.data.partition import Partition, partition
from fedspan.errors import FedspanError, suggest_nearest
from fedspan.federation.conditions import Conditions
from fedspan.federation.evaluation import Evaluator
from fedspan.federation.federation import Federation
from fedspan.federation.head_start import HeadStart
from fedspan.federation.presence import Presence
from fedspan.federation.progress import ClientData
from fedspan.federation.settings import FEWEST_SECURE_CLIENTS
from fedspan.models.adapted import AdaptedModel
from fedspan.models.digest import hash_frozen
from fedspan.runs.arrivals import read_arrivals
from fedspan.runs.client_ranks import compute_client_ranks, compute_client_scaling
from fedspan.runs.engine_setup import make_engine
from fedspan.runs.head_setup import build_aggregation, build_head_start
from fedspan.runs.model_setup import ModelObjects, RunModel, build_model, require_size
from fedspan.runs.task_setup import collect_task_settings
from fedspan.tasks.settings import TaskSettings
from fedspan.tasks.task import Examples, RunTask, get_labels
from fedspan.training.engine import Engine
from fedspan.training.stages import Stages
from fedspan.transports.in_process import simulate

if TYPE_CHECKING:
    import datasets

    from fedspan.clients.secagg import SecureClient


__all__ = [
    "Prepared",
    "RunTrainer",
    "build_simulated_federation",
    "build_trainer",
    "choose_device",
    "compute_max_length",
    "prepare",
    "require_private_model",
]


@dataclass(frozen=True)
class Prepared:
    """A run that is built and ready to start.

    Args:
        config: The config that the run was built from.
        labels: Label names by index; for a language model, those of the data's column of labels, if any.
        task_settings: Settings of the task that the model needs.
        partition: The training examples of each client; None: the examples are on remote nodes.
        task: The learning problem.
        engine: The engine, with the model on its device.
        federation: Method, engine and clients.
        evaluator: Evaluator of the federation.
        train: Encoded examples that the partition assigns to clients.
        test: Encoded held-out examples, or None.
        test_names: Display names of the held-out examples.
        model: The model that the engine trains, with the data that its export needs.
        notes: Notes for the user about the examples (truncated answers).
        head: How the head starts; None: as loaded.
        base_digest: Returns the digest of the frozen weights, which no config names; called first before a server
            state's base is set. None: the config names the model.
        count_passes: Returns the number of forward and backward passes of some steps, or of some epochs if these are
            None; None: the config decides it.
        test_parts: Indices of the held-out examples of each value of ``evaluation.by``, int64; empty without it.
    """

    config: RunConfig
    labels: tuple[str, ...]
    task_settings: TaskSettings
    partition: Partition | None
    task: RunTask
    engine: Engine
    federation: Federation
    evaluator: Evaluator
    train: Examples
    test: Examples | None
    test_names: tuple[str, ...]
    model: RunModel
    notes: tuple[str, ...] = ()
    head: HeadStart | None = None
    base_digest: Callable[[], str] | None = None
    count_passes: Callable[[int, int | None], int] | None = None
    test_parts: Mapping[str, np.ndarray] = field(default_factory=dict)


_FILLING: Any = torch.utils.deterministic
_restricts_torch = False  # whether the last run of this process has restricted torch


def choose_device(name: str) -> torch.device:
    """Return the named device; ``auto``: CUDA, then Apple's MPS, then the CPU.

    Raises:
        FedspanError: If the name is not a device name, or this machine lacks the device.
    """
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
    """Restrict torch to deterministic algorithms in this process, or undo what an earlier run restricted.

    Args:
        deterministic: Whether the run asks for it.
        device: Device of the run; a CPU needs no restriction.
    """
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


@dataclass(frozen=True)
class Objects:
    """Data, model and tokenizer that were passed from Python.

    Args:
        data: The data; None: read as the config says.
        model: Model and tokenizer; None: loaded by name.
    """

    data: DataObjects | None = None
    model: ModelObjects | None = None


def prepare(
    config: RunConfig,
    given_partition: Partition | None = None,
    key: bytes | None = None,
    stages: Stages | None = None,
    objects: Objects | None = None,
) -> Prepared:
    """Build a run.

    Args:
        config: Config of the run.
        given_partition: An existing partition (of a resumed run) to use instead of drawing one.
        key: Secret key of the noise, if it has one.
        stages: Reports the progress of long work; None: it is not reported.
        objects: Data, model and tokenizer that were passed from Python, in place of those that the config names.

    Raises:
        FedspanError: If anything in the config does not fit the data or the model.
    """
    objects, stages = objects or Objects(), stages or Stages()
    if config.evaluation.generate and config.task_definition.require_packages is not None:
        config.task_definition.require_packages()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = choose_device("cpu" if config.cluster is not None else config.device)  # workers have the GPUs
    sources = None if objects.data is None else objects.data.sources
    with stages.stage("data"):
        data = config.load_examples(sources)
        test_parts = _find_test_parts(data.test, config.evaluation.by)
        parts = given_partition or partition(data.train, config.partition, config.data_seed, groups=data.groups)
    if parts.examples != len(data.train):
        raise FedspanError("data.train", len(data.train), f"the {parts.examples} examples with which the run began")
    if config.evaluation.metric == "f1" and len(data.labels) != 2:
        expected = f"macro_f1, because there are {len(data.labels)} labels and f1 is for two"
        raise FedspanError("evaluation.metric", "f1", expected)
    trainer = build_trainer(config, data.labels, len(parts.clients), device, key, stages, objects.model)
    built, task, engine = trainer.model, trainer.task, trainer.engine
    if config.evaluation.generate and config.task_definition.require_generation is not None:
        config.task_definition.require_generation(task, built.adapted.model)
    task_settings = replace(trainer.task_settings, label_separator=data.label_separator)
    with stages.stage("model"):
        head, notes = build_head_start(config, built)
    with stages.stage("encoding"):
        train = task.encode(data.train)
        test = None if data.test is None else task.encode(data.test)
    require_size(config, built.adapted.model, task, train, device)
    federation = build_simulated_federation(config, trainer, parts, train, key)
    return Prepared(
        config=config,
        labels=data.labels,
        task_settings=task_settings,
        partition=parts,
        task=task,
        engine=engine,
        federation=federation,
        evaluator=Evaluator(federation, config.evaluation.batch_size, config.evaluation.clients),
        train=train,
        test=test,
        test_names=() if data.test is None else _get_names(data.test),
        model=built,
        notes=(
            *data.notes,
            *describe_shared(data.train, parts, config.data, config.partition.partitioner == "natural"),
            *task.describe_examples(train),
            *notes,
        ),
        head=head,
        base_digest=_build_base_digest(built.adapted, objects.model),
        test_parts=test_parts,
    )


def _build_base_digest(adapted: AdaptedModel, objects: ModelObjects | None) -> Callable[[], str] | None:
    """Return a function that computes the digest of a model that was passed from Python; None for others.

    None also for one that Accelerate offloaded, whose weights are not in the model.
    """
    if objects is None or objects.model is None or any(value.is_meta for value in adapted.model.parameters()):
        return None
    return cache(lambda: hash_frozen(adapted.model, adapted.get_values()).hexdigest())


def _find_test_parts(test: datasets.Dataset | None, by: str | None) -> dict[str, np.ndarray]:
    """Return the indices of the held-out examples of each value of a column; empty if no column is named.

    Raises:
        FedspanError: If there is no held-out set, or not each of its examples has a value.
    """
    if by is None:
        return {}
    if test is None:
        raise FedspanError("evaluation.by", by, "data.test, or a data.test_fraction", problem="there is no test set")
    # An array of text pads every name to the longest one and drops trailing NULs, so a dictionary numbers the names.
    numbers: dict[str, int] = {}
    row_numbers = [numbers.setdefault(name, len(numbers)) for name in read_required_names(test, by, "evaluation.by")]
    rows = np.split(np.argsort(row_numbers, kind="stable"), np.cumsum(np.bincount(row_numbers))[:-1])
    parts = dict(zip(numbers, rows, strict=True))
    return {value: parts[value] for value in sort_names(parts)}


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


def build_simulated_federation(
    config: RunConfig, trainer: RunTrainer, parts: Partition, train: Examples, key: bytes | None
) -> Federation:
    """Build a run's federation, with all clients in this process.

    Args:
        config: Config of the run.
        trainer: What trains the clients.
        parts: The clients' examples.
        train: The encoded examples.
        key: Secret key of the noise, if it has one.

    Raises:
        FedspanError: If the config does not fit the clients.
    """
    clients, conditions = _build_members(config, trainer.method, parts), None
    if config.simulation is not None:
        conditions = config.simulation.build_conditions(config.seed)
    return simulate(
        config.wrap_method(trainer.method),
        trainer.engine,
        clients,
        _flip_labels(train, clients, conditions, len(trainer.task_settings.labels)),
        read_arrivals(config.federation, config.build_round_settings(key)),
        config.build_simulation_rules(),
        build_aggregation(config),
        _secure_clients(config, clients),
        conditions,
        _build_presence(config, parts.parts.ids),
    )


def _build_presence(config: RunConfig, ids: Sequence[str]) -> Presence:
    """Build the rounds in which the clients of a simulation are present.

    Raises:
        FedspanError: If a client does not exist, or too few clients are present in a round.
    """
    if config.simulation is None or not config.simulation.present:
        return Presence()
    known, present = set(ids), config.simulation.present
    for id, span in present.items():
        if id not in known:
            problem = f"no client is named {id!r}. {suggest_nearest(id, ids)}"
            raise FedspanError(f"simulation.present.{id}", list(span), problem=problem)
    presence, required = config.simulation.build_presence(), config.federation.min_replies
    needs = [(required, "federation.min_replies")]
    if config.federation.secure is not None:
        needs.append((FEWEST_SECURE_CLIENTS, "federation.secure"))
    for round in range(config.federation.rounds):
        try:
            for least, reason in needs:
                presence.require_enough(len(ids), round, least, reason)
        except FedspanError as error:
            raise FedspanError("simulation.present", error.value, error.expected, problem=error.problem) from None
    return presence


def _secure_clients(config: RunConfig, clients: Mapping[str, ClientData]) -> Mapping[str, SecureClient] | None:
    """Each simulated client's half of secure aggregation, with its state in memory; None: the run has none."""
    if config.federation.secure is None:
        return None
    require_packages()
    from fedspan.clients.secagg import MemorySessionStore, SecureClient  # needs fedspan[secagg]

    ids, sessions = tuple(clients), MemorySessionStore()
    return LazyMapping(ids, lambda index: SecureClient(ids[index], sessions))


def _flip_labels(
    train: Examples, clients: Mapping[str, ClientData], conditions: Conditions | None, labels: int
) -> Examples:
    """Return the training examples, with label K - 1 - k instead of k for clients that train on flipped labels.

    Raises:
        FedspanError: If the examples of a task of the user's own are no dataclass with ``labels``.
    """
    faults = None if conditions is None else conditions.faults
    if conditions is None or faults is None or faults.kind != "label-flip":
        return train
    flipped = get_labels(train, np.arange(len(train)))
    for id in conditions.draw_faulty(sorted(clients)):
        indices = clients[id].train
        flipped[indices] = labels - 1 - flipped[indices]
    if not is_dataclass(train) or isinstance(train, type):
        expected = "a task whose encoded examples are a dataclass with `labels`"
        raise FedspanError("simulation.faults.kind", "label-flip", expected)
    return replace(train, labels=flipped)


def require_private_model(config: RunConfig, adapted: AdaptedModel) -> None:
    """Check that the run's privacy covers all parts of a model.

    Raises:
        FedspanError: If it does not.
    """
    if config.privacy is not None and adapted.buffers:
        problem = f"this model's running statistics ({adapted.buffers[0]}, ...) come from raw examples, without privacy"
        raise FedspanError("privacy", config.privacy.mechanism, problem=problem)


def _get_names(examples: datasets.Dataset) -> tuple[str, ...]:
    """Return the display names of examples: their texts, or the files of images."""
    import datasets

    if "text" in examples.column_names:
        return tuple(examples["text"])
    paths = [row["path"] for row in examples.cast_column("image", datasets.Image(decode=False))["image"]]
    return tuple(path or f"image {number}" for number, path in enumerate(paths, start=1))


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


def _build_members(config: RunConfig, method: RegisteredMethod, parts: Partition) -> LazyMapping[ClientData]:
    ids = parts.parts.ids
    cohort = config.federation.clients_per_round
    if cohort is not None and cohort > len(ids):
        raise FedspanError("federation.clients_per_round", cohort, f"at most {len(ids)}, the number of clients")
    ranks = np.fromiter(compute_client_ranks(config, method, ids).values(), np.int64, len(ids))

    def member(index: int) -> ClientData:
        part, rank = parts.parts[index], int(ranks[index])
        weight = 1.0 if config.federation.weights == "uniform" else float(len(part.train))
        client = Client(part.id, rank, compute_client_scaling(config, method, rank), len(part.train), weight)
        return ClientData(client, part.train, part.validation, part.test)

    return LazyMapping(ids, member)
