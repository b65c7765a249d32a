"""Checks that the files of a run are those that it wrote: configuration, partition, logs, report, exported models.

Every checkpoint names the run's configuration, the SHA-256 of the files that no round changes, and the ends of the
logs. The report of a finished run names the same, and the SHA-256 of environment.json and of every exported file. That
finds damaged disks and edits of any of these files. It does not stop someone who rewrites all of them together with
the checkpoints: for that, keep the ``sha256`` of report.json elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fedspan.config import RunConfig, parse_config, parse_yaml
from fedspan.data.files import NOWHERE
from fedspan.data.multiple_files import has_files
from fedspan.errors import FedspanError
from fedspan.files import compute_sha256
from fedspan.logs import Position, require_position
from fedspan.run_folder import RunFolder, read_records, require_same_files
from fedspan.runs import checkpoint as checkpoints
from fedspan.runs.checkpoint_format import Checkpoint, read_positions
from fedspan.runs.learning_rate import ROUNDS

RESOLVED = ("pooling", "pooling_normalize")
"""Fields of ``model`` that are resolved once, at the start of a run; pooling.json holds them."""
DIRECTORY = "directory"
"""Entry of environment.json with the directory in which a run was started, which its paths are relative to."""
_END = "\n...\n"
"""YAML's mark of the end of a document: a config.yaml without it lost its end."""

_RESOURCES = {
    *("device", "threads", "deterministic", "engine", "cluster", "model.gradient_checkpointing"),
    *(
        f"federation.{name}"
        for name in ("early_stopping", "deadline", "reconnect_timeout", "retries", "min_replies", "buffered.replay")
    ),
    *(f"federation.{name}" for name in ("over_select", "message_mib")),
    *("evaluation.batch_size", "evaluation.diagnostics"),
}
"""Sections and fields that may differ after a resume: what trades time for memory, and how long a run waits."""

_CHANGEABLE = _RESOURCES | {"baselines", "centralized_lr", "model.name", "model.adapter", "data.train", "data.test"}
"""Those, what is trained after the last round, and where files are, which only a changed config.yaml may say."""


def format_config(config: RunConfig) -> str:
    """Return the text of a run's config.yaml, with all defaults filled in."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, explicit_end=True)


def read_config(folder: str | Path) -> RunConfig:
    """Read the config of a run."""
    run_folder = RunFolder(folder)
    text = run_folder.read_config_text()
    config = parse_config(parse_yaml(text, str(run_folder.config)))
    if not text.replace("\r\n", "\n").endswith(_END):
        problem = (
            "the end of the file is missing: a run's configuration ends with the line `...`. Restore the file or start "
            "again in another folder"
        )
        raise FedspanError(str(run_folder.config), None, problem=problem)
    return config


def read_resolved_config(folder: str | Path) -> RunConfig:
    """Read the config of a run with its pooling (``resolve_config``)."""
    return resolve_config(RunFolder(folder), read_config(folder))


def resolve_config(run_folder: RunFolder, config: RunConfig) -> RunConfig:
    """Return a run's config as it was at its start: its pooling, whatever a hub has now, and its paths."""
    if run_folder.environment.is_file():
        recorded = run_folder.read_json(run_folder.environment)
        directory = recorded.get(DIRECTORY) if isinstance(recorded, dict) else None
        config = anchor_paths(config, directory) if isinstance(directory, str) else config
    if not run_folder.pooling.is_file():
        return config
    pooling = run_folder.read_json(run_folder.pooling)
    if not isinstance(pooling, dict) or set(pooling) != set(RESOLVED):
        raise FedspanError(str(run_folder.pooling), pooling, f"an object with {' and '.join(RESOLVED)}")
    values = config.model_dump(mode="json")
    return parse_config({**values, "model": {**values["model"], **pooling}})


def anchor_paths(config: RunConfig, directory: str) -> RunConfig:
    """Return a config whose relative paths are absolute, as far as they exist.

    That of a server, whose nodes read its paths, is returned as it is.
    """
    if config.data.train == NOWHERE:
        return config
    for section, names in (("data", ("train", "test")), ("model", ("name", "adapter"))):
        values = getattr(config, section)
        paths = {name: os.path.join(directory, value) for name in names if (value := getattr(values, name))}
        # What does not exist is a name on the hub, or of a built-in.
        found = {name: path for name, path in paths.items() if os.path.exists(path) or has_files(path)}
        config = config.model_copy(update={section: values.model_copy(update=found)})
    return config


def describe_config(config: RunConfig) -> str:
    """Return a config as text for a checkpoint."""
    return json.dumps(config.model_dump(mode="json"), separators=(",", ":"))


def compute_input_digests(run_folder: RunFolder) -> dict[str, str]:
    """Return the SHA-256 of the run's files that no round changes, by name; only of those that the run has."""
    files = (run_folder.partition, run_folder.learning_rate, run_folder.pooling, run_folder.arrivals)
    return {path.name: compute_sha256(path) for path in files if path.is_file()}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def list_differences(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two configs differ, by path, each with both values."""
    values_before, values_after = (_flatten(config.model_dump(mode="json")) for config in (before, after))
    names = dict.fromkeys((*values_before, *values_after))
    return {
        name: (values_before.get(name), values_after.get(name))
        for name in names
        if values_before.get(name) != values_after.get(name)
    }


def is_resource(name: str, before: Any, after: Any) -> bool:
    """Return whether a field may change when a run resumes, and has no effect on what is finished."""
    return _is_among(_RESOURCES, name)


def _is_among(fields: set[str], name: str) -> bool:
    return any(name == field or name.startswith(f"{field}.") for field in fields)


def _is_changeable(run_folder: RunFolder, name: str, before: Any, after: Any) -> bool:
    if name == "centralized_lr" and (run_folder.baselines / "centralized").is_dir():
        return False  # it has been trained, at least in part
    return is_resource(name, before, after) or _is_among(_CHANGEABLE - _RESOURCES, name)


def _require_same_config(run_folder: RunFolder, config: RunConfig, stored_text: str) -> None:
    """Check a config against a stored one (``describe_config``; later fields have their defaults).

    The number of rounds may differ in a run that is not finished, if no finished round depends on it: so it is in one
    that was extended (``extension``) and has no new round yet.
    """
    stored = parse_config(json.loads(stored_text))
    for name, (before, after) in list_differences(stored, config).items():
        if (
            name == ROUNDS_FIELD
            and not run_folder.report.is_file()
            and after > checkpoints.read_last_saved_round(run_folder)
        ):
            require_independent_rounds(checkpoints.read_last_saved_round(run_folder), stored, config)
        elif not _is_changeable(run_folder, name, before, after):
            problem = f"it is {after!r} now, and the run began with {before!r}"
            expected = f"{before!r} again, or another folder (only paths, deadlines, cluster and engine may change)"
            raise FedspanError(f"{run_folder.config}, {name}", after, expected, problem=problem)


def require_same_run(run_folder: RunFolder, config: RunConfig, stored: Checkpoint | None) -> None:
    """Check that configuration, partition and learning rate are those of the run that wrote a checkpoint.

    Raises:
        FedspanError: If one of the files was changed; the error names it, and the field of a config.
    """
    if stored is not None:
        _require_same_config(run_folder, config, str(stored.extra["config"]))
        require_same_files(run_folder, stored.inputs)


def require_same_base(run_folder: RunFolder, digest: str, argument: str) -> None:
    """Check the frozen weights of models that were passed from Python against those with which a run began.

    Args:
        run_folder: The run folder; a run that was not started yet has no digest to compare with.
        argument: The Python argument that holds the models, for the error.
    """
    if run_folder.base.exists() and run_folder.read_json(run_folder.base) != {"sha256": digest}:
        problem = "the frozen weights of the models are not those with which the run began. Load the same models"
        raise FedspanError(argument, str(run_folder.path), problem=problem)


def require_intact(run_folder: RunFolder) -> None:
    """Check the files of a run, finished or not, against its report or, without one, its newest checkpoint.

    Only the checkpoint's index is read, no tensors. A process may work on the run meanwhile.

    Raises:
        FedspanError: If a file is not what the run wrote; the error names the file, and the line of a log.
    """
    config, index = read_resolved_config(run_folder.path), checkpoints.read_newest_index(run_folder)
    positions: dict[str, Position] = {} if index is None else read_positions(index)
    if run_folder.report.is_file():
        records = read_records(run_folder)
        _require_same_config(run_folder, config, records.config)
        require_same_files(run_folder, records.files, run_folder.report.name)
        positions |= records.positions
    elif index is not None:
        _require_same_config(run_folder, config, str(index["extra"]["config"]))
        require_same_files(run_folder, index["inputs"])
    for name, position in positions.items():
        require_position(run_folder.path / name, position)


ROUNDS_FIELD = "federation.rounds"


def require_independent_rounds(done: int, stored: RunConfig, changed: RunConfig) -> None:
    """Check that finished rounds do not depend on the number of all rounds."""
    before, after, training = stored.federation.rounds, changed.federation.rounds, stored.training
    start_anew = f"Start a new run with {ROUNDS_FIELD}={after} in another folder"
    settings = stored.build_training_settings()
    if any(settings.compute_lr(round, before) != settings.compute_lr(round, after) for round in range(done)):
        problem = (
            f"training.schedule {training.schedule} spreads over all rounds, and the {done} finished rounds had the "
            f"learning rates of a run of {before} rounds. {start_anew}; a run with training.schedule: constant can be "
            "extended"
        )
        raise FedspanError(ROUNDS_FIELD, after, problem=problem)
    if stored.privacy is not None and stored.privacy.epsilon is not None:
        problem = f"privacy.epsilon is the budget of the {before} rounds that were planned. {start_anew}"
        raise FedspanError(ROUNDS_FIELD, after, problem=problem)
    if training.lr == "auto" and min(ROUNDS, before) != min(ROUNDS, after):
        problem = f"the range test of training.lr ran {min(ROUNDS, before)} of {ROUNDS} rounds. {start_anew}"
        raise FedspanError(ROUNDS_FIELD, after, problem=problem)
