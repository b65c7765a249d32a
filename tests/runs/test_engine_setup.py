"""The engine of a run: what users are told when clients do not train as requested."""

from __future__ import annotations

from typing import Any

from fedspan.config import RunConfig, parse_config
from fedspan.runs.engine_setup import describe_refusal
from fedspan.training.batched import BatchedEngine
from fedspan.training.loop import LoopEngine

REASON = "its layers cannot be stacked"


class Refusing(BatchedEngine):
    """An engine that trains its clients one by one."""

    def __init__(self) -> None:
        pass

    @property
    def refusal(self) -> str | None:
        return REASON


def config(**changes: Any) -> RunConfig:
    return parse_config({"data": {"train": "x.csv"}, "method": {"name": "fedit"}, **changes})


def test_a_refusal_is_reported_unless_workers_train() -> None:
    note = describe_refusal(config(), Refusing())
    assert note is not None
    assert note.endswith(REASON)
    assert describe_refusal(config(cluster={"workers": 2}), Refusing()) is None
    assert describe_refusal(config(), LoopEngine.__new__(LoopEngine)) is None
