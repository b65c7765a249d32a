"""Construction of a run from its config: examples, model, engine, federation and evaluator."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedspan.assembly.engine import RunTrainer, build_trainer, choose_device
from fedspan.assembly.federation import build_clients, build_simulated_federation
from fedspan.assembly.head import build_head_start
from fedspan.assembly.model import ModelObjects, require_size
from fedspan.assembly.task import collect_columns
from fedspan.config import RunConfig
from fedspan.data.duplicates import describe_shared
from fedspan.data.files import FROM_TRAINERS, IN_MEMORY
from fedspan.data.names import read_required_names, sort_names
from fedspan.data.objects import DataObjects, read_objects
from fedspan.data.partition import Partition, partition
from fedspan.errors import FedspanError
from fedspan.federation.evaluation import Evaluator
from fedspan.federation.federation import Federation
from fedspan.federation.head_start import HeadStart
from fedspan.federation.progress import ClientData
from fedspan.models.names import FROM_PYTHON
from fedspan.tasks.task import Examples
from fedspan.training.stages import Stages

if TYPE_CHECKING:
    import datasets


_PASSED = "the {} passed from Python: pass {} again as {}= of {} (the command line has no such option)"


@dataclass(frozen=True, kw_only=True)
class LocalRun(RunTrainer):
    """A run whose clients' examples are in this process, without its federation.

    Args:
        partition: The training examples of each client; None: the examples are on remote nodes.
        test: Encoded held-out examples, or None.
        test_parts: Indices of the held-out examples of each value of ``evaluation.by``, int64; empty without it.
        notes: Notes for the user about the examples (truncated answers).
        head: How the head starts; None: as loaded.
        count_passes: Returns the number of forward and backward passes of some steps, or of some epochs if these are
            None; None: the config decides it.
    """

    clients: Mapping[str, ClientData]
    train: Examples
    partition: Partition | None = None
    test: Examples | None = None
    test_names: tuple[str, ...] = ()
    test_parts: Mapping[str, np.ndarray] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    head: HeadStart | None = None
    count_passes: Callable[[int, int | None], int] | None = None


@dataclass(frozen=True, kw_only=True)
class Prepared(LocalRun):
    """A run that is built and ready to start."""

    federation: Federation
    evaluator: Evaluator


@dataclass(frozen=True)
class Objects:
    """Data, model and tokenizer that were passed from Python.

    Args:
        data: The data; None: read as the config says.
        model: Model and tokenizer; None: loaded by name.
    """

    data: DataObjects | None = None
    model: ModelObjects | None = None


@contextmanager
def _pause_garbage_collection() -> Generator[None]:
    """Collect no garbage meanwhile: imports and models make a million objects that stay, and each search visits all."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def prepare(
    config: RunConfig,
    existing_partition: Partition | None = None,
    key: bytes | None = None,
    stages: Stages | None = None,
    objects: Objects | None = None,
) -> Prepared:
    """Build a run whose clients are all in this process; its arguments are those of ``load_run``."""
    local = load_run(config, existing_partition, key, stages, objects)
    federation = build_simulated_federation(local, local.clients, local.train, key)
    evaluator = Evaluator(federation, config.evaluation.batch_size, config.evaluation.clients)
    return Prepared(**vars(local), federation=federation, evaluator=evaluator)


@_pause_garbage_collection()
def load_run(
    config: RunConfig,
    existing_partition: Partition | None = None,
    key: bytes | None = None,
    stages: Stages | None = None,
    objects: Objects | None = None,
    *,
    ignores_labels: bool = False,
) -> LocalRun:
    """Load a run's data and model, and build what trains its clients.

    Args:
        existing_partition: An existing partition (of a resumed run) to use instead of drawing one.
        objects: Data, model and tokenizer that were passed from Python, in place of those that the config names.
        ignores_labels: Whether clients leave out examples whose label is not in ``data.labels``, which count as theirs
            in ``partition``; else they are an error.
    """
    objects, stages = objects or Objects(), stages or Stages()
    if config.evaluation.generate and config.task_definition.require_packages is not None:
        config.task_definition.require_packages()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = choose_device("cpu" if config.cluster is not None else config.device)  # workers have the GPUs
    sources = None if objects.data is None else objects.data.sources
    # One after another: most of the time is spent on imports, which Python's lock serializes, so threads that read the
    # data or import Transformers meanwhile save nothing.
    with stages.stage("data"):
        data = config.load_examples(sources, ignores_labels=ignores_labels)
        test_parts = _find_test_parts(data.test, config.evaluation.by)
        assigned = data.train
        if ignores_labels:  # so that groups are not drawn by the server's list of labels
            assigned = assigned.remove_columns([name for name in ("label", "labels") if name in assigned.column_names])
        parts = existing_partition or partition(assigned, config.partition, config.data_seed, groups=data.groups)
    if config.federation.final_rounds and data.test is None:
        problem = "without data.test or a data.test_fraction, no examples are left to measure the model after them"
        raise FedspanError("federation.final_rounds", config.federation.final_rounds, "0", problem=problem)
    if parts.examples != len(data.train):
        raise FedspanError("data.train", len(data.train), f"the {parts.examples} examples with which the run began")
    if config.evaluation.metric == "f1" and len(data.labels) != 2:
        expected = f"macro_f1, because there are {len(data.labels)} labels and f1 is for two"
        raise FedspanError("evaluation.metric", "f1", expected)
    trainer = build_trainer(config, data.labels, len(parts.clients), device, key, stages, objects.model)
    model, task = trainer.model.adapted.model, trainer.task
    if config.evaluation.generate and config.task_definition.require_generation is not None:
        config.task_definition.require_generation(task, model)
    columns = collect_columns(config.data, data.label_separator)
    trainer = replace(trainer, task_settings=replace(trainer.task_settings, columns=columns))
    with stages.stage("model"):
        head, notes = build_head_start(config, trainer.model)
    with stages.stage("encoding"):
        train = task.encode(data.train)
        test = None if data.test is None else task.encode(data.test)
    require_size(config, model, task, train, device)
    notes = (
        *data.notes,
        *describe_shared(data.train, parts, config.data, config.partition.partitioner == "natural"),
        *task.describe_examples(train),
        *notes,
    )
    return LocalRun(
        **vars(trainer),
        clients=build_clients(config, trainer.method, parts, data.ignored if len(data.ignored) else None),
        train=train,
        partition=parts,
        test=test,
        test_names=() if data.test is None else _get_names(data.test),
        test_parts=test_parts,
        notes=notes,
        head=head,
    )


def _find_test_parts(test: datasets.Dataset | None, by: str | None) -> dict[str, np.ndarray]:
    """Return the indices of the held-out examples of each value of a column; empty if no column is named."""
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


def _get_names(examples: datasets.Dataset) -> tuple[str, ...]:
    """Return the display names of examples: their texts, or the files of images."""
    import datasets

    if "text" in examples.column_names:
        return tuple(examples["text"])
    paths = [row["path"] for row in examples.cast_column("image", datasets.Image(decode=False))["image"]]
    return tuple(path or f"image {number}" for number, path in enumerate(paths, start=1))


def collect_objects(config: RunConfig, call: str, data: Any, model: Any, tokenizer: Any) -> Objects:
    """Collect the objects that a run was started from.

    Args:
        call: The Python function that takes them, for errors: ``fedspan.resume``.
        data: The data; None: read as the config says.
        tokenizer: The tokenizer or image processor; None: that of the model's name.
    """
    if data is None:
        require_named_data(config, call)
    if model is None:
        require_named_model(config, call)
    source = None if data is None else read_objects(data, config.partition.clients)
    return Objects(source, ModelObjects(model, tokenizer))


def require_named_data(config: RunConfig, call: str, argument: str = "data") -> None:
    """Check that the config of a run names its data."""
    if config.data.train == FROM_TRAINERS:
        problem = "the clients of this run trained with trainers passed from Python: pass them again as trainers= of "
        raise FedspanError("trainers", None, problem=f"{problem}fedspan.simulate(..., resume=True)")
    if config.data.train == IN_MEMORY:
        raise FedspanError("data", None, problem=_PASSED.format("data of this run were", "them", argument, call))


def require_named_model(config: RunConfig, call: str) -> None:
    """Check that the config of a run names its model."""
    if config.model.name.startswith(FROM_PYTHON):
        raise FedspanError("model", None, problem=_PASSED.format("model of this run was", "it", "model", call))
