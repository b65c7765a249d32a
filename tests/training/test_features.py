"""Stored features: training the output layer on them equals training it in whole passes, without the passes."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from fedspan.assembly.head import begin
from fedspan.assembly.run import Prepared, prepare
from fedspan.core.values import Job
from fedspan.training.features import trains_output_layer
from fedspan.training.loop import LoopEngine
from helpers import tiny


class WholePasses(LoopEngine):
    """Computes the features anew in every pass."""

    def feed(self, job: Job, examples: Any, rows: Any) -> AbstractContextManager[None]:
        return self.prefixes.feed(examples, rows)


def train_head(run: Prepared, rounds: int = 2) -> torch.Tensor:
    progress = begin(run.federation, run.head)
    for _ in range(rounds):
        progress = run.federation.run_round(progress).progress
    return next(
        value for name, value in progress.state.tensors.items() if name.endswith(("classifier.weight", "score.weight"))
    )


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_the_head_is_that_of_whole_passes(kind: str, engine: str, tiny_folder: Path) -> None:
    changes = {"model": {"head_rounds": 2}, "federation": {"rounds": 3}}
    run = prepare(tiny.config(tiny_folder, kind, **changes, engine={"name": engine}))
    whole = prepare(tiny.config(tiny_folder, kind, **changes))
    old = whole.engine
    tiny.use_engine(whole.federation, WholePasses(old.adapted, old.task, old.settings, old.seed))
    found, expected = train_head(run), train_head(whole)
    assert float((expected - run.engine.adapted.get_initial(next(iter(run.engine.adapted.extras))).cpu()).norm()) > 0.1
    assert torch.allclose(found, expected, atol=1e-5)


def test_the_encoder_is_not_called_for_known_features(tiny_folder: Path) -> None:
    run = prepare(
        tiny.config(tiny_folder, model={"head_rounds": 2}, federation={"rounds": 3, "clients_per_round": None})
    )
    calls: list[int] = []
    block = run.engine.adapted.model.get_submodule("bert.encoder.layer.0")
    block.register_forward_hook(lambda *_: calls.append(1))
    progress = run.federation.run_round(begin(run.federation, run.head)).progress
    first = len(calls)
    assert first >= len(run.federation.clients)  # a pass over each client's examples at least
    progress = run.federation.run_round(progress).progress
    assert len(calls) == first
    run.federation.run_round(progress)
    assert len(calls) > first


def test_other_jobs_take_whole_passes(tiny_folder: Path) -> None:
    run = prepare(tiny.config(tiny_folder, model={"head_rounds": 1}))
    method, adapted = run.federation.method, run.engine.adapted
    progress = begin(run.federation, run.head)
    client = run.federation.get_client("west", progress)
    job = method.start(method.sync(progress.state, client), client, {}, 0)
    assert trains_output_layer(job, adapted)
    ordinary = run.evaluator.build_job(progress, None)
    assert not trains_output_layer(ordinary, adapted)
    wider = prepare(tiny.config(tiny_folder, "roberta", model={"head_rounds": 1}))  # whose head has two layers
    progress = begin(wider.federation, wider.head)
    client = wider.federation.get_client("west", progress)
    method = wider.federation.method
    assert not trains_output_layer(
        method.start(method.sync(progress.state, client), client, {}, 0), wider.engine.adapted
    )
