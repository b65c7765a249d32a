"""Values that are remembered: how many, and for how long."""

from __future__ import annotations

import pickle

import torch

from fedspan.core.recent import MessageTensors, RecentValues
from fedspan.core.tensors import Tensors


def test_the_least_recently_used_values_are_dropped_and_the_last_one_stays() -> None:
    computed = list[str]()

    def get(values: RecentValues[str], key: str, size: int = 4) -> str:
        def compute() -> tuple[str, int]:
            computed.append(key)
            return key.upper(), size

        return values.get_or_compute(key, compute)

    values = RecentValues[str](max_bytes=8)
    assert [get(values, key) for key in "ababcab"] == list("ABABCAB")
    assert "".join(computed) == "abcab"
    computed.clear()
    get(values, "d", size=100)
    get(values, "d")
    assert computed == ["d"]
    values.clear()
    get(values, "a")
    get(values, "b")
    get(values, "a")
    assert computed == ["d", "a", "b"]


def test_tensors_are_shared_within_a_round_and_only_for_the_same_sources() -> None:
    shared, sources = MessageTensors(), {"x": torch.ones(2)}

    def double() -> Tensors:
        return {"x": 2 * sources["x"]}

    first = shared.get_or_compute(0, sources, "key", double)
    assert shared.get_or_compute(0, dict(sources), "key", double)["x"] is first["x"]
    assert shared.get_or_compute(0, sources, "other", double)["x"] is not first["x"]
    assert shared.get_or_compute(0, {"x": torch.ones(2)}, "key", double)["x"] is not first["x"]
    assert shared.get_or_compute(1, sources, "key", double)["x"] is not first["x"]


def test_a_copy_in_another_process_starts_empty() -> None:
    shared, sources = MessageTensors(), {"x": torch.ones(1000)}
    shared.get_or_compute(0, sources, "key", lambda: dict(sources))
    assert len(pickle.dumps(shared)) < 200
    assert isinstance(pickle.loads(pickle.dumps(shared)), MessageTensors)
