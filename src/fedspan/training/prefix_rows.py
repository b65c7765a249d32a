"""Where hidden states lie, and how they outlive a run: for the next of a series on the same prefix and examples.

What a forward pass gives may depend, in its last bits, on which examples it was of. So what is kept is kept by batch: a
run takes what was computed in the very batches that it would compute, and has the bits that it would have alone.
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
from fedspan.models.prefix import FrozenPrefix, NoPrefix, live_modules
from fedspan.tasks.task import Examples, Task

__all__ = ["KeptRows", "PrefixStore", "next_run", "prefix_key", "shared_prefixes", "store_in_use"]

_CHUNK = 256  # examples of a batch that is only looked at


class KeptRows:
    """Hidden states of a data set's N examples, and the batches that they were computed in.

    Args:
        values: hidden states, (rows, D); which rows are an example's is up to the cache.
        examples: N.
        mapped: whether they are in a file.
    """

    def __init__(self, values: Tensor, examples: int, mapped: bool) -> None:
        self.values, self.mapped = values, mapped
        self._of = np.full(examples, -1, np.int64)  # the number of the batch that each was computed in
        self._numbers: dict[bytes, int] = {}
        self._next = count()  # threads may share it

    @classmethod
    def make(
        cls, shape: tuple[int, int], dtype: torch.dtype, examples: int, budget: int, file: Path | None
    ) -> KeptRows:
        """Rows that are not computed yet, the first of which is zero.

        Args:
            shape: of all hidden states, (rows, D).
            dtype: theirs.
            examples: N.
            budget: bytes of memory.
            file: holds them where they exceed the budget.

        Raises:
            NoPrefix: if there is neither memory nor a file for them.
        """
        size = shape[0] * shape[1] * dtype.itemsize
        if size <= budget:
            values = torch.empty(shape, dtype=dtype)  # memory that is not written to is not taken
        elif file is not None:
            values = _in_file(file, shape, dtype)
        else:
            raise NoPrefix(f"hidden states of {size} bytes exceed the budget of {budget}, and there is no file")
        values[0] = 0
        return cls(values, examples, size > budget)

    def holds(self, batch: np.ndarray) -> bool:
        """Whether the hidden states of these examples are there, computed in a batch of them in this order."""
        return bool((self._of[batch] == self._numbers.get(batch.tobytes(), -2)).all())

    def dropped(self, batch: np.ndarray) -> None:
        """Those of a batch are about to be written: should that break off, they are nobody's."""
        self._of[batch] = -1

    def written(self, batch: np.ndarray) -> None:
        """Those of a batch were written."""
        number = self._numbers[batch.tobytes()] = next(self._next)
        self._of[batch] = number


class PrefixStore:
    """What the last run of a series computed; a run that computes something else lets go of it."""

    def __init__(self) -> None:
        self._last: dict[bytes, KeptRows] = {}
        self._own: dict[bytes, KeptRows] = {}

    def turn(self) -> None:
        """A run begins."""
        self._last, self._own = self._own, {}

    def rows(self, key: bytes, make: Callable[[], KeptRows]) -> KeptRows:
        """What the last run left under a key, or new rows."""
        if key not in self._own:
            if key not in self._last:
                self._last.clear()  # before memory is taken
            self._own[key] = self._last.pop(key, None) or make()
        return self._own[key]


_STORE: ContextVar[PrefixStore | None] = ContextVar("fedspan_prefix_store", default=None)


@contextmanager
def shared_prefixes() -> Generator[None]:
    """Within this context a run takes over hidden states from the one before (``next_run``); it may be nested."""
    token = _STORE.set(_STORE.get() or PrefixStore())
    try:
        yield
    finally:
        _STORE.reset(token)


def store_in_use() -> PrefixStore | None:
    """The store of the context; None outside of one."""
    return _STORE.get()


def next_run() -> None:
    """Tell the store of the context, if there is one, that a run begins."""
    if (store := _STORE.get()) is not None:
        store.turn()


def prefix_key(adapted: AdaptedModel, prefix: FrozenPrefix, task: Task, examples: Examples) -> bytes:
    """A digest of all that hidden states depend on: weights, examples, where the prefix ends, how it is computed."""
    found = hashlib.blake2b(digest_size=32)

    def add(*facts: object) -> None:
        found.update(repr(facts).encode())

    config: Any = getattr(adapted.model, "config", None)
    add(type(adapted.model), None if config is None else config.to_json_string(use_diff=False))
    add(getattr(config, "_attn_implementation", None), prefix.paths, adapted.device, torch.get_num_threads())
    live = tuple(f"{path}." for path in live_modules(adapted))
    for name, value in (*adapted.model.named_parameters(), *adapted.model.named_buffers()):
        if not name.startswith(live):
            add(name)
            _add_tensor(found, value)
    for start in range(0, len(examples), _CHUNK):
        indices = range(start, min(start + _CHUNK, len(examples)))
        for name, value in task.batch(examples, indices, torch.device("cpu")).items():
            add(name)
            _add_tensor(found, value)
    return found.digest()


def _add_tensor(found: Any, value: Tensor) -> None:
    found.update(repr((value.dtype, tuple(value.shape))).encode())
    found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def _in_file(file: Path, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A tensor in a new file, whose name is given up."""
    count = shape[0] * shape[1]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as opened:
            if hasattr(os, "posix_fallocate"):  # a full disk is better met now than by a signal in mid-write
                os.posix_fallocate(opened.fileno(), 0, count * dtype.itemsize)
            else:
                opened.truncate(count * dtype.itemsize)
        return torch.from_file(str(file), shared=True, size=count, dtype=dtype).view(shape)
    except OSError as error:
        raise NoPrefix(f"{file} can't hold {count * dtype.itemsize} bytes of hidden states ({error})") from error
    finally:
        with suppress(OSError):  # it was never made, or the system keeps the names of files in use
            file.unlink(missing_ok=True)
