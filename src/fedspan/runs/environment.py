"""The environment of a run, in enough detail to explain why two runs of one configuration differ."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePath

import torch

import fedspan
from fedspan.config import RunConfig
from fedspan.run_folder import RunFolder
from fedspan.runs.integrity import DIRECTORY

_PACKAGES = ("transformers", "peft", "safetensors", "datasets", "flwr")


def _read_version(package: str) -> str | None:
    try:
        return version(package)  # from the metadata: importing transformers takes seconds
    except PackageNotFoundError:
        return None


def _describe_environment(seed: int, command: Sequence[str], threads: int | None) -> dict[str, object]:
    return {
        "fedspan": fedspan.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{package: _read_version(package) for package in _PACKAGES},
        "platform": platform.platform(),
        "machine": platform.machine(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": threads or torch.get_num_threads(),
        "seed": seed,
        "command": list(command),
        DIRECTORY: os.getcwd(),
    }


def record_environment(
    folder: RunFolder, seed: int, command: Sequence[str], threads: int | None = None
) -> dict[str, tuple[object, object]]:
    """Write environment.json, or compare it with the environment that the run was started in.

    Args:
        threads: Number of torch's threads that the run's config asks for; None: the current number.

    Returns:
        ``{name: (then, now)}`` of what differs from the start of the run, except command and directory: after a resume
        with other versions or threads, the same bits can no longer be expected. Empty for a new run.
    """
    current = _describe_environment(seed, command, threads)
    if not folder.environment.exists():
        folder.write_json(folder.environment, current)
        return {}
    return _list_changes(folder, current)


def is_command(command: Sequence[str]) -> bool:
    """Check whether a command line is one of fedspan's own commands, not a script that calls it."""
    program = PurePath(command[0])
    return program.stem == "fedspan" or program.parts[-2:] == ("fedspan", "__main__.py")


def extend_command(folder: RunFolder, changes: Iterable[str]) -> None:
    """Add changes of the config to the recorded command, so that it is one that plans the run as it is now."""
    recorded = folder.read_json(folder.environment)
    command = recorded.get("command") if isinstance(recorded, dict) else None
    if isinstance(recorded, dict) and isinstance(command, list) and command and is_command(command):
        options = [word for change in changes for word in ("--set", change)]
        folder.write_json(folder.environment, {**recorded, "command": [*command, *options]})


def mark_changed(folder: RunFolder) -> None:
    """Record that a run went on with other settings than it began with, so that its bits are those of neither."""
    recorded = folder.read_json(folder.environment)
    if isinstance(recorded, dict):
        folder.write_json(folder.environment, {**recorded, "changed": True})


def is_same_environment(folder: RunFolder, config: RunConfig) -> bool:
    """Check whether a run had the current versions, a machine like this one, and the threads of this config.

    A run that went on with other settings than it began with (``mark_changed``) had several.
    """
    recorded = folder.read_json(folder.environment)
    if isinstance(recorded, dict) and "changed" in recorded:
        return False
    return not _list_changes(folder, _describe_environment(config.seed, (), config.threads))


def _list_changes(folder: RunFolder, current: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    recorded = folder.read_json(folder.environment)
    before = recorded if isinstance(recorded, dict) else {}
    return {
        name: (before.get(name), current[name])
        for name in current
        if name not in ("command", DIRECTORY) and before.get(name) != current[name]
    }
