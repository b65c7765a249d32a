"""Configs of wrapped methods, as the tests of methods make them of methods."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedspan.config import RunConfig

from .watched_rounds import MethodRun, method_config

TRAINING: Mapping[str, Mapping[str, Any]] = {"scaffold": {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0}}
"""What a wrapper needs of local training."""

RunWrapped = Callable[..., MethodRun]


def wrapped_config(folder: Path, key: str, wrappers: Sequence[str | Mapping[str, Any]], **changes: Any) -> RunConfig:
    """A run of a method with wrappers around it."""
    names = [wrapper if isinstance(wrapper, str) else wrapper["name"] for wrapper in wrappers]
    training = {name: value for wrapper in names for name, value in TRAINING.get(wrapper, {}).items()}
    return method_config(
        folder,
        key,
        method={"wrappers": list(wrappers), **changes.pop("method", {})},
        training={**training, **changes.pop("training", {})},
        **changes,
    )
