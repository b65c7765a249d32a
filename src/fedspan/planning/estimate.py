"""Cost of a run, estimated before it starts and before a model is downloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedspan.config import ConfigLike, RunConfig, parse_config, to_plain_values
from fedspan.data.catalogue import DatasetEntry, get_dataset_entry
from fedspan.data.multiple_files import has_placeholders
from fedspan.data.partition import partition
from fedspan.errors import FedspanError
from fedspan.planning.accelerators import HERE, UTILIZATION, DeviceSpeed, get_accelerator_speed
from fedspan.planning.calibration import measure_speed
from fedspan.planning.plan import Plan, add_time, plan_run, prepare_model
from fedspan.tasks.registry import get_task


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
    utilization: float | None = None,
    mbit: float | None = None,
) -> Plan:
    """Estimate the trainable parameters, bytes, steps, FLOPs, memory and time of a run from its config and its model's.

    Args:
        config: Path of a YAML file, the same as plain values, or a ``RunConfig``.
        overrides: Changes to the config, each ``section.field=value``.
        architecture: A Transformers config as plain values with its ``model_type``, in place of the named model's; left
            out, the model's own ``config.json`` is read (from the hub, if it is there).
        clients: Clients of the federation; left out: ``partition.clients``, or for a natural partition, as many as the
            data have.
        examples: Examples of the training set; left out: the catalogue's number for ``data.dataset``, or the number in
            the data.
        labels: Number of classes; left out: that of the config, of the catalogue, or of the data. The data are read for
            any of these three numbers only if they are a file or a folder on this machine.
        length: Mean tokens of an example, for FLOPs and time; left out: as many as ``model.max_length`` and the model
            allow.
        device: Device that clients train on: a GPU (``A100``, see ``fedspan.planning.accelerators``), or ``here``, this
            machine, on which some seconds of training are timed; left out: no time is planned.
        utilization: Share of a GPU's peak that training reaches; left out: 0.35, explained in
            ``fedspan.planning.accelerators``.
        mbit: Megabits a second between a client and the server; left out: no transfer is planned.

    Returns:
        The numbers; those of which nothing is known, such as the time without a ``device``, are None.

    Examples:
        >>> fedspan.plan("config.yaml", device="A100", mbit=100)

    Raises:
        FedspanError: If the config, the data or an argument has an error that the user can correct.
    """
    checked = (
        config if isinstance(config, RunConfig) and not overrides else parse_config(to_plain_values(config, overrides))
    )
    plans = plan_configs(
        {"": checked},
        architecture=architecture,
        clients=clients,
        examples=examples,
        labels=labels,
        length=length,
        device=device,
        utilization=utilization,
        mbit=mbit,
    )
    if isinstance(plans[""], FedspanError):
        raise plans[""]
    return plans[""]


def plan_configs(
    configs: Mapping[str, RunConfig],
    *,
    architecture: Mapping[str, Any] | None = None,
    clients: int | None = None,
    examples: int | None = None,
    labels: int | None = None,
    length: int | None = None,
    device: str | None = None,
    utilization: float | None = None,
    mbit: float | None = None,
) -> dict[str, Plan | FedspanError]:
    """Estimate the cost of runs that differ only in their method; the arguments besides the configs are ``plan``'s.

    Returns:
        The plan of each run, or the reason why it can't be planned (such as a rank that is too large for its layers,
        or mixed ranks that it does not support).
    """
    first = next(iter(configs.values()))
    clients, examples, labels = _collect_facts(first, clients, examples, labels)
    _require_device(device, utilization)
    model = prepare_model(_set_device(first, device), labels, architecture)
    plans: dict[str, Plan | FedspanError] = {}
    speed: DeviceSpeed | None = None
    for name, config in configs.items():
        try:
            estimate = plan_run(config, model, clients, examples, length=length, mbit=mbit)
        except FedspanError as error:
            plans[name] = error
            continue
        if device is not None:
            speed = speed or _get_speed(config, estimate, device, utilization, labels, architecture)
            estimate = add_time(estimate, speed, config)
        plans[name] = estimate
    return plans


def _collect_facts(
    config: RunConfig, clients: int | None, examples: int | None, labels: int | None
) -> tuple[int | None, int | None, int]:
    """Return clients, examples and labels as given, from the config or the catalogue, or as counted in a local file."""
    for name, value in (("clients", clients), ("examples", examples), ("labels", labels)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise FedspanError(name, value, "a whole number from 1")
    in_catalogue = _get_entry(config) is not None
    natural = clients is None and config.partition.partitioner == "natural"
    unnamed = labels is None and not config.data.labels
    if natural or (not in_catalogue and (unnamed or examples is None)):
        counts = _count_local(config)
        if counts is not None:
            clients = counts[0] if natural else clients
            examples = counts[1] if examples is None else examples
            labels = counts[2] if labels is None else labels
    examples = get_known_examples(config) if examples is None else examples
    return clients, examples, get_known_labels(config) if labels is None else labels


def _count_local(config: RunConfig) -> tuple[int, int, int] | None:
    """Return the clients, training examples and labels of data on this machine; None for other data."""
    train = config.data.train
    if train is None or not (train.startswith("builtin:") or Path(train).exists() or has_placeholders(train)):
        return None
    data = config.load_examples()
    clients = config.partition.clients
    if config.partition.partitioner == "natural":
        clients = len(partition(data.train, config.partition, config.data_seed, groups=data.groups).clients)
    return clients, len(data.train), len(data.labels) if get_task(config.task).has_labels else 0


def _require_device(device: str | None, utilization: float | None) -> None:
    if utilization is not None and device in (None, HERE):
        raise FedspanError("--utilization", utilization, problem="it needs the name of a GPU (--device; device=)")


def _set_device(config: RunConfig, device: str | None) -> RunConfig:
    """Return the config for clients with a GPU of the table, where the attention implementation may differ."""
    has_gpu = device not in (None, HERE) and config.device == "auto"
    return config.model_copy(update={"device": "cuda"}) if has_gpu else config


def _get_speed(
    config: RunConfig,
    estimate: Plan,
    device: str,
    utilization: float | None,
    labels: int,
    architecture: Mapping[str, Any] | None,
) -> DeviceSpeed:
    if device != HERE:
        return get_accelerator_speed(device, config.model.dtype, UTILIZATION if utilization is None else utilization)
    return measure_speed(
        config,
        config.data.labels or [str(number) for number in range(labels)],
        architecture,
        base=estimate.client.base,
        length=estimate.compute.length,
        clients=estimate.cohort,
        steps=estimate.steps,
    )


def get_known_labels(config: RunConfig) -> int:
    """Return the number of classes in the data of a config; 0 if the task has none.

    Raises:
        FedspanError: If neither the config nor the catalogue gives the number.
    """
    if not get_task(config.task).has_labels:
        return 0
    data, entry = config.data, _get_entry(config)
    count = len(data.labels) if data.labels else entry.classes if entry else None
    if count is None:
        expected = "the labels, a data set of fedspan data in data.dataset, or the number of labels (--labels; labels=)"
        raise FedspanError("data.labels", None, expected)
    return count if data.first_labels is None else min(count, data.first_labels)


def get_known_examples(config: RunConfig) -> int | None:
    """Return the number of training examples without reading any; None if it is unknown."""
    data, entry = config.data, _get_entry(config)
    if entry is None or data.first_labels is not None:
        return data.max_examples
    count = entry.rows.train
    if data.test is None and data.test_split is None:
        count = round(count * (1 - data.test_fraction))
    return count if data.max_examples is None else min(count, data.max_examples)


def _get_entry(config: RunConfig) -> DatasetEntry | None:
    return None if config.data.dataset is None else get_dataset_entry(config.data.dataset, "data.dataset")
