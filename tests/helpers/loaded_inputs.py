"""Models and data of the tests' folders, each read from its files once: that takes ten times as long as a copy."""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fedspan.data.loading import LoadedData
from fedspan.models.loading import Loaded

_LARGEST = 2**20
"""Bytes of the largest input that is stored."""


def _describe(files: Iterable[Path]) -> str | None:
    """Paths and states of an input's files; None: it is no small input of files alone."""
    states = [(path, path.stat()) for path in files if path.is_file()]
    if not 0 < sum(state.st_size for _, state in states) <= _LARGEST:
        return None
    return " ".join(f"{path} {state.st_mtime_ns} {state.st_size}" for path, state in states)


def store_models(load: Callable[..., Loaded]) -> Callable[..., Loaded]:
    """Return ``load_pretrained`` that copies what it has loaded from a folder whose files have not changed since."""
    known: dict[str, Loaded] = {}

    def load_or_copy(name: str, *head: Any, quantization: Any = None, offload: Any = None, **options: Any) -> Loaded:
        folder = Path(name).absolute()
        files = _describe(sorted(folder.iterdir())) if folder.is_dir() else None
        if files is None or quantization is not None or offload is not None:
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
        files = _describe([Path(config.train).absolute()]) if config.train and config.test is None else None
        if files is None or sources:
            return load(config, *field, sources=sources, **options)
        key = f"{files} {config!r} {field} {options}"
        if key not in known:
            known[key] = load(config, *field, **options)
        return known[key]

    return load_or_reuse
