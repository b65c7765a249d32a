"""Mappings by client id that hold or copy no more than they have to: 100,000 clients cost memory for a cohort only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

import numpy as np

V = TypeVar("V")


class LazyMapping(Mapping[str, V], Generic[V]):
    """Values by id, in the order of the ids, created on access and not stored.

    Args:
        ids: Ids of the values; any order, all different.
        make: Returns the value of the id at a position of ``ids``, the same every time.
    """

    def __init__(self, ids: Iterable[str], make: Callable[[int], V]) -> None:
        given_ids = tuple(ids)
        self._order = np.array(sorted(range(len(given_ids)), key=given_ids.__getitem__), np.int64)
        self._ids = tuple(given_ids[index] for index in self._order.tolist())
        self._make = make

    def __getitem__(self, id: str) -> V:
        index = bisect_left(self._ids, id)
        if index == len(self._ids) or self._ids[index] != id:
            raise KeyError(id)
        return self._make(int(self._order[index]))

    def __contains__(self, id: object) -> bool:
        if not isinstance(id, str):
            return False
        index = bisect_left(self._ids, id)
        return index < len(self._ids) and self._ids[index] == id

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)


class OverlayMapping(Mapping[str, V], Generic[V]):
    """A mapping with changes on top of another one, which is not changed.

    Args:
        changes: Values that replace those of `base`; this dict is modified.
    """

    def __init__(self, base: Mapping[str, V], changes: dict[str, V]) -> None:
        self.base = base
        self.changes = changes

    def __getitem__(self, key: str) -> V:
        return self.changes[key] if key in self.changes else self.base[key]

    def __setitem__(self, key: str, value: V) -> None:
        self.changes[key] = value

    def __contains__(self, key: object) -> bool:
        return key in self.changes or key in self.base

    def __iter__(self) -> Iterator[str]:
        yield from self.base
        yield from (key for key in self.changes if key not in self.base)

    def __len__(self) -> int:
        return len(self.base) + sum(key not in self.base for key in self.changes)


def copy_on_write(values: Mapping[str, V]) -> dict[str, V] | OverlayMapping[V]:
    """Return a mutable copy that leaves the given values unchanged; nothing is read from disk."""
    if isinstance(values, OverlayMapping):
        return OverlayMapping(values.base, dict(values.changes))
    return dict(values) if isinstance(values, dict) else OverlayMapping(values, {})
