"""Values that are computed once and remembered for as long as they may be needed again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from torch import Tensor

from fedspan.core.tensors import Tensors

V = TypeVar("V")

_MAX_BYTES = 256 << 20


class RecentValues(Generic[V]):
    """Values by key; the least recently used are dropped beyond a number of bytes, the last one is always stored.

    Args:
        max_bytes: Maximum size of the stored values in bytes.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._values: dict[Hashable, tuple[V, int]] = {}

    def get_or_compute(self, key: Hashable, compute: Callable[[], tuple[V, int]]) -> V:
        """Return the value of a key; if none is stored, compute it and its size in bytes."""
        entry = self._values.pop(key, None)
        if entry is None:
            entry = compute()
            self._bytes += entry[1]
        self._values[key] = entry  # the last in order
        while self._bytes > self._max_bytes and len(self._values) > 1:
            _, size = self._values.pop(next(iter(self._values)))
            self._bytes -= size
        return entry[0]

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()
        self._bytes = 0


class MessageTensors:
    """Tensors that a method computes from others for its messages: clients with equal keys share the same objects.

    So their messages are encoded once. Tensors of an earlier round are dropped. A copy in another process starts empty.
    """

    def __init__(self) -> None:
        self._round = -1
        self._results = RecentValues[tuple[Tensors, Tensors]]()

    def __reduce__(self) -> tuple[type[MessageTensors], tuple[()]]:
        return MessageTensors, ()

    def get_or_compute(
        self, round: int, sources: Tensors, key: Hashable, compute: Callable[[], Tensors]
    ) -> dict[str, Tensor]:
        """Return the tensors of a key, which are computed if they are not stored.

        Args:
            sources: The tensors from which they are computed. Results from other objects are not returned.
            key: Everything else on which the result depends.
        """
        if round != self._round:
            self._round = round
            self._results.clear()

        def compute_entry() -> tuple[tuple[Tensors, Tensors], int]:
            results = compute()
            # The sources are stored, too, so that their ids are not reused.
            stored = [*sources.values(), *results.values()]
            return (sources, results), sum(value.nbytes for value in stored)

        identity = tuple((name, id(value)) for name, value in sources.items())
        return dict(self._results.get_or_compute((identity, key), compute_entry)[1])
