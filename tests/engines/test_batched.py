"""The batched engine does what the loop does: every method, one job in float64, whole federations in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from fedspan.core.values import Job, OptimizerState, Trained
from fedspan.engines.batched import BatchedEngine, Stacking
from fedspan.engines.federation import Progress
from fedspan.engines.loop import LoopEngine
from fedspan.engines.work import Assignment, Engine
from fedspan.methods.registry import METHODS
from fedspan.runs.build import Prepared, prepare

AT_ONCE = (1, 3, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tmp_path_factory.mktemp("batched")
    tiny.save_corpus(made)
    for kind in ("bert", "roberta", "distilbert", "gpt2"):
        tiny.save_model(kind, made)
    return made


def engine_of(prepared: Prepared, at_once: int | None, workers: int = 2) -> Engine:
    """The loop, or the batched engine with so many clients at once."""
    parts = (prepared.engine.adapted, prepared.task, prepared.config.training_settings(), prepared.config.seed)
    return LoopEngine(*parts) if at_once is None else BatchedEngine(*parts, Stacking(at_once, workers))


def played(prepared: Prepared, at_once: int | None, workers: int = 2) -> Progress:
    prepared.federation.engine = engine_of(prepared, at_once, workers)
    progress = prepared.federation.begin()
    while progress.state.round < prepared.federation.settings.rounds:
        progress = prepared.federation.play(progress).progress
    return progress


def apart(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """The largest relative distance between tensors of one name."""
    assert list(left) == list(right)
    gaps = [0.0]
    for name, value in left.items():
        if value.is_floating_point():
            gaps.append(float((value.double() - right[name].double()).norm() / value.double().norm().clamp(min=1e-12)))
        else:
            assert torch.equal(value, right[name])
    return max(gaps)


@pytest.mark.parametrize("key", sorted(METHODS))
def test_a_federation_of_every_method_is_the_same_with_several_clients_at_once(key: str, folder: Any) -> None:
    """float32, SGD, three rounds, clients of 11 to 58 texts with a batch of 4: 1e-5."""
    config = tiny.config(
        folder,
        method={"name": key, "r": 2},
        training={"optimizer": "sgd", "lr": 0.05, "local_steps": None, "batch_size": 4},
        federation={"clients_per_round": None},
    )
    prepared = prepare(config)
    loop = played(prepared, None)
    for at_once in AT_ONCE:
        found = played(prepared, at_once, workers=1)
        assert apart(found.state.tensors, loop.state.tensors) < 1e-5
