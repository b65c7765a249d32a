"""What a run will take, before it is begun and before a model is downloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedspan.api.series import ConfigLike, plain_values
from fedspan.config import RunConfig, parse_config
from fedspan.data.catalogue import DatasetEntry, dataset_of
from fedspan.errors import FedspanError
from fedspan.methods.registry import METHODS
from fedspan.runs.accelerators import HERE, UTILISATION, Speed, accelerator_speed
from fedspan.runs.calibration import measured_speed
from fedspan.runs.comparing import plan_comparison
from fedspan.runs.plans import Plan, plan_run, planned_model, timed
from fedspan.runs.problems import PROBLEMS

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
        clients: of the federation, which a natural partition does not tell; left out: ``partition.clients``.
        examples: of the training set; left out: what the catalogue knows of ``data.dataset``.
        labels: how many classes there are; left out: those of the config, or of the catalogue.
        length: tokens of an example on average, which FLOPs and time are those of; left out: as many as
            ``model.max_length`` and the model allow.
        device: that clients train on: a GPU (``A100``, see ``fedspan.runs.accelerators``), or ``here``, this machine,
            which some seconds of training are timed on; left out: no time is planned.
        utilisation: share of a GPU's peak that training reaches; left out: 0.35, with the reason in the same place.
        mbit: megabits a second between a client and the server; left out: no transfer is planned.

    Raises:
        FedspanError: for anything that the user can put right.
    """
    checked = (
        config if isinstance(config, RunConfig) and not overrides else parse_config(plain_values(config, overrides))
    )
    if examples is None:
        examples = known_examples(checked)
    labels = known_labels(checked) if labels is None else labels
    _require_device(device, utilisation)
    model = planned_model(_placed(checked, device), labels, architecture)
    found = plan_run(checked, model, clients, examples, length=length, mbit=mbit)
    if device is None:
        return found
    return timed(found, _speed(checked, found, device, utilisation, labels, architecture), checked)


def plan_methods(
    config: ConfigLike,
    methods: Sequence[str] = tuple(METHODS),
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
        methods: registry keys, with wrappers as in ``fedit+fedprox``.
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
    steps = plan_comparison(values, methods, [0], {}, None).steps
    first = steps[0].config
    labels = known_labels(first) if labels is None else labels
    _require_device(device, utilisation)
    model = planned_model(_placed(first, device), labels, architecture)
    found: dict[str, Plan | FedspanError] = {}
    speed: Speed | None = None
    for step in steps:
        count = known_examples(step.config) if examples is None else examples
        try:
            made = plan_run(step.config, model, clients, count, length=length, mbit=mbit)
        except FedspanError as error:
            found[step.group] = error
            continue
        if device is not None:
            speed = speed or _speed(step.config, made, device, utilisation, labels, architecture)
            made = timed(made, speed, step.config)
        found[step.group] = made
    return found


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
