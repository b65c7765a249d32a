"""Models and data of the tests' folders, each read from its files once: that takes ten times as long as a copy."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedspan.data.loading import LoadedData
from fedspan.models.loading import Loaded

_LARGEST = 2**20
"""Bytes of the largest input that is stored."""


def _describe(*inputs: str | None) -> str | None:
    """Paths and states of all files of inputs, which are files or folders; None: they are large, or none are there."""
    paths = [Path(name).absolute() for name in inputs if name is not None]
    try:
        is_there = all(path.exists() for path in paths)
        states = [(path, path.stat()) for one in paths for path in (one, *sorted(one.rglob("*"))) if path.is_file()]
    except OSError:
        return None
    if not is_there or not 0 < sum(state.st_size for _, state in states) <= _LARGEST:
        return None
    return " ".join(f"{path} {state.st_mtime_ns} {state.st_size}" for path, state in states)


def store_models(load: Callable[..., Loaded]) -> Callable[..., Loaded]:
    """Return ``load_pretrained`` that copies what it has loaded from a folder whose files have not changed since."""
    known: dict[str, Loaded] = {}

    def load_or_copy(name: str, *head: Any, quantization: Any = None, offload: Any = None, **options: Any) -> Loaded:
        files = None if quantization or offload else _describe(name)
        if files is None:
            return load(name, *head, quantization=quantization, offload=offload, **options)
        key = f"{files} {head} {options}"
        if key not in known:
            known[key] = load(name, *head, **options)
        return copy.deepcopy(known[key])

    return load_or_copy


def store_data(load: Callable[..., LoadedData]) -> Callable[..., LoadedData]:
    """Return ``data.loading.load`` that gives what it has read from a file which has not changed since."""
    known: dict[str, LoadedData] = {}

    def load_or_reuse(config: Any, *field: str, sources: Any = None, **options: Any) -> LoadedData:
        files = None if sources or not config.train else _describe(config.train, config.test)
        if files is None:
            return load(config, *field, sources=sources, **options)
        key = f"{files} {config!r} {field} {options}"
        if key not in known:
            known[key] = load(config, *field, **options)
        return known[key]

    return load_or_reuse
