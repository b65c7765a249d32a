"""Storage of hidden states, and their reuse by the next run of a series on the same prefix and examples.

The result of a forward pass may depend, in its last bits, on the examples of its batch. So hidden states are stored by
batch: a run reuses only batches that it would compute itself, and gets the same bits as a run on its own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedspan.models.adapted import AdaptedModel
from fedspan.models.prefix import FrozenPrefix, NoPrefix, list_live_modules
from fedspan.tasks.task import Examples, Task

_CHUNK = 256  # examples of a batch that is only read


class PrefixRows:
    """Hidden states of a data set's N examples, and the batches that they were computed in.

    Args:
        values: Hidden states, (rows, D); the cache decides which rows belong to an example.
    """

    def __init__(self, values: Tensor, examples: int, mapped: bool) -> None:
        self.values, self.mapped = values, mapped
        self._batch_of = np.full(examples, -1, np.int64)  # the number of the batch of each example
        self._numbers: dict[bytes, int] = {}
        self._next = count()  # threads may share it

    @classmethod
    def make(
        cls, shape: tuple[int, int], dtype: torch.dtype, examples: int, budget: int, file: Path | None
    ) -> PrefixRows:
        """Allocate rows that are not computed yet; the first row is zero.

        Args:
            shape: Shape of all hidden states, (rows, D).
            budget: Memory in bytes.

        Raises:
            NoPrefix: If there is neither memory nor a file for them.
        """
        size = shape[0] * shape[1] * dtype.itemsize
        if size <= budget:
            values = torch.empty(shape, dtype=dtype)  # memory that is never written is not allocated
        elif file is not None:
            values = _map_file(file, shape, dtype)
        else:
            raise NoPrefix(f"hidden states of {size} bytes exceed the budget of {budget}, and there is no file")
        values[0] = 0
        return cls(values, examples, size > budget)

    def has_rows(self, batch: np.ndarray) -> bool:
        """Return whether these examples' hidden states are stored and were computed in this batch, in this order."""
        return bool((self._batch_of[batch] == self._numbers.get(batch.tobytes(), -2)).all())

    def invalidate(self, batch: np.ndarray) -> None:
        """Mark a batch's hidden states as invalid before they are written, in case writing is interrupted."""
        self._batch_of[batch] = -1

    def mark_written(self, batch: np.ndarray) -> None:
        """Mark a batch's hidden states as written."""
        number = self._numbers[batch.tobytes()] = next(self._next)
        self._batch_of[batch] = number


class PrefixStore:
    """The hidden states of the last run of a series; a run that computes different ones releases them."""

    def __init__(self) -> None:
        self._last: dict[bytes, PrefixRows] = {}
        self._current: dict[bytes, PrefixRows] = {}

    def begin_run(self) -> None:
        """Begin a new run."""
        self._last, self._current = self._current, {}

    def get_rows(self, key: bytes, make: Callable[[], PrefixRows]) -> PrefixRows:
        """Return the rows that the last run stored under a key, or new ones."""
        if key not in self._current:
            if key not in self._last:
                self._last.clear()  # before memory is allocated
            self._current[key] = self._last.pop(key, None) or make()
        return self._current[key]


_STORE: ContextVar[PrefixStore | None] = ContextVar("fedspan_prefix_store", default=None)


@contextmanager
def share_prefixes() -> Generator[None]:
    """Let each run within this context reuse hidden states of the one before (``start_next_run``); it may be nested."""
    token = _STORE.set(_STORE.get() or PrefixStore())
    try:
        yield
    finally:
        _STORE.reset(token)


def store_in_use() -> PrefixStore | None:
    """Return the store of the context; None outside of one."""
    return _STORE.get()


def start_next_run() -> None:
    """Tell the store of the context, if there is one, that a run begins."""
    if (store := _STORE.get()) is not None:
        store.begin_run()


def compute_prefix_key(adapted: AdaptedModel, prefix: FrozenPrefix, task: Task, examples: Examples) -> bytes:
    """Digest all that hidden states depend on: weights, examples, the prefix's end, and how it is computed."""
    digest = hashlib.blake2b(digest_size=32)

    def add(*facts: object) -> None:
        digest.update(repr(facts).encode())

    config: Any = getattr(adapted.model, "config", None)
    add(type(adapted.model), None if config is None else config.to_json_string(use_diff=False))
    add(getattr(config, "_attn_implementation", None), prefix.paths, adapted.device, torch.get_num_threads())
    live = tuple(f"{path}." for path in list_live_modules(adapted))
    for name, value in (*adapted.model.named_parameters(), *adapted.model.named_buffers()):
        if not name.startswith(live):
            add(name)
            _add_tensor(digest, value)
    for start in range(0, len(examples), _CHUNK):
        indices = range(start, min(start + _CHUNK, len(examples)))
        for name, value in task.collate(examples, indices, torch.device("cpu")).items():
            add(name)
            _add_tensor(digest, value)
    return digest.digest()


def _add_tensor(digest: Any, value: Tensor) -> None:
    digest.update(repr((value.dtype, tuple(value.shape))).encode())
    digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def _map_file(file: Path, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Create a tensor in a new file, and unlink the file."""
    count = shape[0] * shape[1]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as stream:
            if hasattr(os, "posix_fallocate"):  # a full disk raises here, not as a signal during a write
                os.posix_fallocate(stream.fileno(), 0, count * dtype.itemsize)
            else:
                stream.truncate(count * dtype.itemsize)
        return torch.from_file(str(file), shared=True, size=count, dtype=dtype).view(shape)
    except OSError as error:
        raise NoPrefix(f"{file} can't hold {count * dtype.itemsize} bytes of hidden states ({error})") from error
    finally:
        with suppress(OSError):  # it was never created, or the system does not unlink files in use
            file.unlink(missing_ok=True)
