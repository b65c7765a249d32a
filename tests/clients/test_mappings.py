"""Values of clients over those that are stored."""

from __future__ import annotations

from fedspan.clients.mappings import LazyMapping, OverlayMapping, copy_on_write


def test_a_copy_of_stored_values_reads_and_changes_none_of_them() -> None:
    read: list[int] = []

    def make(index: int) -> int:
        read.append(index)
        return index

    stored = LazyMapping(["a", "b", "c"], make)
    first = copy_on_write(stored)
    first["b"] = 7
    second = copy_on_write(first)
    second["d"] = 8
    assert isinstance(second, OverlayMapping)
    assert second.base is stored  # no chain of overlays
    assert (list(first), list(second)) == (["a", "b", "c"], ["a", "b", "c", "d"])
    assert (len(first), len(second)) == (3, 4)
    assert read == []
    assert (dict(stored), dict(first)) == ({"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 7, "c": 2})
