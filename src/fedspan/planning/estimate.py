"""What a run will take, before it is begun and before a model is downloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedspan.config import RunConfig, parse_config
from fedspan.data.catalogue import DatasetEntry, dataset_of
from fedspan.data.loading import load
from fedspan.data.partition import partition
from fedspan.data.path_patterns import has_places
from fedspan.errors import FedspanError
from fedspan.experiments.comparison import plan_comparison
from fedspan.experiments.execution import ConfigLike, plain_values
from fedspan.methods.registry import METHODS
from fedspan.planning.accelerators import HERE, UTILISATION, Speed, accelerator_speed
from fedspan.planning.calibration import measured_speed
from fedspan.planning.plan import Plan, plan_run, planned_model, timed
from fedspan.runs.task_setup import PROBLEMS

__all__ = ["known_examples", "known_labels", "plan", "plan_methods"]


def plan(
    config: ConfigLike,
    *,
    overrides: Sequence[str] = (),
    architecture: Mapping[str, Any] | None = None,
    clients: int | None = None,
    examples: int | None = None,
    labels: int | None = None,
    length: int | None = None,
    device: str | None = None,
    utilisation: float | None = None,
    mbit: float | None = None,
) -> Plan:
    """Trainable parameters, bytes, steps, FLOPs, memory and time of a run, by its config and that of its model alone.

    Args:
        config: the path of a YAML file, the same as plain values, or a ``RunConfig``.
        overrides: changes to the config, each ``section.field=value``.
        architecture: a Transformers config as plain values with its ``model_type``, in place of the named model's;
            left out, the model's own ``config.json`` is read (from the hub, if it is there).
        clients: of the federation; left out: ``partition.clients``, or of a natural partition as many as the data have.
        examples: of the training set; left out: what the catalogue knows of ``data.dataset``, or as many as there are.
        labels: how many classes there are; left out: those of the config, of the catalogue, or of the data. The data
            are read for any of the three only where they are a file or a folder on this machine.
        length: tokens of an example on average, which FLOPs and time are those of; left out: as many as
            ``model.max_length`` and the model allow.
        device: Device that clients train on: a GPU (``A100``, see ``fedspan.planning.accelerators``), or ``here``, this
            machine, on which some seconds of training are timed; left out: no time is planned.
        utilisation: share of a GPU's peak that training reaches; left out: 0.35, with the reason in the same place.
        mbit: megabits a second between a client and the server; left out: no transfer is planned.

    Raises:
        FedspanError: for anything that the user can put right.
    """
    checked = (
        config if isinstance(config, RunConfig) and not overrides else parse_config(plain_values(config, overrides))
    )
    clients, examples, labels = _facts(checked, clients, examples, labels)
    _require_device(device, utilisation)
    model = planned_model(_placed(checked, device), labels, architecture)
    found = plan_run(checked, model, clients, examples, length=length, mbit=mbit)
    if device is None:
        return found
    return timed(found, _speed(checked, found, device, utilisation, labels, architecture), checked)


def plan_methods(
    config: ConfigLike,
    methods: Sequence[str] | None = None,
    *,
    overrides: Sequence[str] = (),
    architecture: Mapping[str, Any] | None = None,
    clients: int | None = None,
    examples: int | None = None,
    labels: int | None = None,
    length: int | None = None,
    device: str | None = None,
    utilisation: float | None = None,
    mbit: float | None = None,
) -> dict[str, Plan | FedspanError]:
    """What a run will take under several methods.

    Args:
        config: as for ``plan``; options that only some of the methods have may stand in it.
        methods: registry keys, with wrappers as in ``fedit+fedprox``; left out: all that are registered.
        overrides: as for ``plan``, as are all others.
        architecture: likewise.
        clients: likewise.
        examples: likewise.
        labels: likewise.
        length: likewise.
        device: likewise; ``here`` is timed once.
        utilisation: likewise.
        mbit: likewise.

    Returns:
        By method, its plan, or why it can't be planned (a rank that it has no room for, ranks that it can't mix).

    Raises:
        FedspanError: for what is wrong under any method.
    """
    values = plain_values(config, overrides)
    steps = plan_comparison(values, tuple(METHODS) if methods is None else methods, [0], {}, None).steps
    first = steps[0].config
    clients, examples, labels = _facts(first, clients, examples, labels)
    _require_device(device, utilisation)
    model = planned_model(_placed(first, device), labels, architecture)
    found: dict[str, Plan | FedspanError] = {}
    speed: Speed | None = None
    for step in steps:
        try:
            made = plan_run(step.config, model, clients, examples, length=length, mbit=mbit)
        except FedspanError as error:
            found[step.group] = error
            continue
        if device is not None:
            speed = speed or _speed(step.config, made, device, utilisation, labels, architecture)
            made = timed(made, speed, step.config)
        found[step.group] = made
    return found


def _facts(
    config: RunConfig, clients: int | None, examples: int | None, labels: int | None
) -> tuple[int | None, int | None, int]:
    """Clients, examples and labels: as given, as the config or the catalogue say, or as counted in a local file."""
    for name, value in (("clients", clients), ("examples", examples), ("labels", labels)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise FedspanError(name, value, "a whole number from 1")
    told = _entry(config) is not None
    natural = clients is None and config.partition.partitioner == "natural"
    unnamed = labels is None and not config.data.labels
    if natural or (not told and (unnamed or examples is None)):
        here = _counted(config)
        if here is not None:
            clients = here[0] if natural else clients
            examples = here[1] if examples is None else examples
            labels = here[2] if labels is None else labels
    examples = known_examples(config) if examples is None else examples
    return clients, examples, known_labels(config) if labels is None else labels


def _counted(config: RunConfig) -> tuple[int, int, int] | None:
    """Clients, training examples and labels of data that lie on this machine; None of others."""
    train = config.data.train
    if train is None or not (train.startswith("builtin:") or Path(train).exists() or has_places(train)):
        return None
    data = load(config.data, seed=config.data_seed, task=config.task)
    clients = config.partition.clients
    if config.partition.partitioner == "natural":
        clients = len(partition(data.train, config.partition, config.data_seed).clients)
    return clients, len(data.train), len(data.labels) if PROBLEMS[config.task].classifies else 0


def _require_device(device: str | None, utilisation: float | None) -> None:
    if utilisation is not None and device in (None, HERE):
        raise FedspanError("--utilisation", utilisation, "a GPU's name beside it (--device; device=)")


def _placed(config: RunConfig, device: str | None) -> RunConfig:
    """The config where clients have a GPU of the table: there, attention may be another."""
    named = device not in (None, HERE) and config.device == "auto"
    return config.model_copy(update={"device": "cuda"}) if named else config


def _speed(
    config: RunConfig,
    found: Plan,
    device: str,
    utilisation: float | None,
    labels: int,
    architecture: Mapping[str, Any] | None,
) -> Speed:
    """That of a device by its name, or of this machine."""
    if device != HERE:
        return accelerator_speed(device, config.model.dtype, UTILISATION if utilisation is None else utilisation)
    return measured_speed(
        config,
        config.data.labels or [str(number) for number in range(labels)],
        architecture,
        base=found.client.base,
        length=found.compute.length,
        clients=found.cohort,
        steps=found.steps,
    )


def known_labels(config: RunConfig) -> int:
    """How many classes the data of a config have; 0 where the task has none.

    Raises:
        FedspanError: if nobody says.
    """
    if not PROBLEMS[config.task].classifies:
        return 0
    data, entry = config.data, _entry(config)
    count = len(data.labels) if data.labels else entry.classes if entry else None
    if count is None:
        expected = "the labels, a data set of fedspan data in data.dataset, or how many there are (--labels; labels=)"
        raise FedspanError("data.labels", None, expected)
    return count if data.first_labels is None else min(count, data.first_labels)


def known_examples(config: RunConfig) -> int | None:
    """How many training examples there are, before any is read; None where nobody says."""
    data, entry = config.data, _entry(config)
    if entry is None or data.first_labels is not None:
        return data.max_examples
    count = entry.rows.train
    if data.test is None and data.test_split is None:
        count = round(count * (1 - data.test_fraction))
    return count if data.max_examples is None else min(count, data.max_examples)


def _entry(config: RunConfig) -> DatasetEntry | None:
    return None if config.data.dataset is None else dataset_of(config.data.dataset, "data.dataset")
