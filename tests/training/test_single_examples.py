"""What one example changes of a step and of an evaluation on a node, whatever model the server chooses."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedspan.assembly.run import Prepared
from fedspan.core.tensors import compute_norm, subtract
from fedspan.core.values import Job
from fedspan.training.jobs import Assignment
from helpers import tiny

CLIP = 0.3


def prepare_run(prepared: Prepared, folder: Path, attention: str, padding_free: bool) -> Prepared:
    model, engine = {"target_modules": ["query", "key"], "attention": attention}, {"padding_free": padding_free}
    training = {"optimizer": "sgd", "lr": 1.0, "local_steps": 1, "batch_size": 64}
    privacy = {"mechanism": "dp-sgd", "noise": 1e-9, "clip": CLIP}
    run = tiny.variant(prepared, tiny.config(folder, model=model, engine=engine, training=training, privacy=privacy))
    assert run.engine.private is not None
    run.engine.private.privacy = replace(run.engine.private.privacy, secret=True)
    return run


def draw_job(run: Prepared, seed: int, size: float) -> Job:
    """A job with queries and keys whose products reach the largest number of float32, where a mask hides nothing."""
    federation, rng = run.federation, torch.Generator().manual_seed(seed)
    state, data = federation.begin().state, federation.clients["west"]
    drawn = {name: torch.randn(value.shape, generator=rng) for name, value in state.tensors.items()}
    drawn = {name: value * (1.0 if name.startswith("extras") else size) for name, value in drawn.items()}
    return federation.method.start(
        federation.method.sync(replace(state, tensors=drawn), data.client), data.client, {}, 0
    )


def split_longest(run: Prepared) -> tuple[np.ndarray, np.ndarray]:
    """The examples of a client, and those without its longest one."""
    indices = np.sort(run.federation.clients["west"].train)
    return indices, np.delete(indices, run.train.lengths[indices].argmax())


MODELS = pytest.mark.parametrize(("attention", "padding_free"), [("eager", True), ("eager", False), ("sdpa", False)])


@MODELS
def test_an_example_changes_bounded_metrics_by_its_own_share(
    attention: str, padding_free: bool, prepared: Prepared, tiny_folder: Path
) -> None:
    run = prepare_run(prepared, tiny_folder, attention, padding_free)
    every, others = split_longest(run)
    for seed in range(4):
        job = draw_job(run, seed, 3e9)
        measured = [run.engine.evaluate("west", job, run.train, part, 64, bounded=True) for part in (every, others)]
        for name, most in (("accuracy", 1.0), ("loss", run.task.loss_bound)):
            change = measured[0][name] * len(every) - measured[1][name] * len(others)
            assert -1e-3 <= change <= most + 1e-3, name


@MODELS
def test_an_example_changes_a_private_step_by_its_own_gradient(
    attention: str, padding_free: bool, prepared: Prepared, tiny_folder: Path
) -> None:
    run = prepare_run(prepared, tiny_folder, attention, padding_free)
    every, others = split_longest(run)
    for seed in range(4):
        for size in (0.1, 3e9):  # the first one passes the check of two examples in one pass
            job = draw_job(run, seed, size)
            moved = []
            for part in (every, others):
                trained = run.engine.train(Assignment("west", 0, job, part, 1.0, None, 1e-9), run.train)
                change = subtract(trained.tensors, job.tensors)
                moved.append({name: value.double() * len(part) for name, value in change.items()})
            assert compute_norm(subtract(moved[0], moved[1])) <= CLIP * 1.01
