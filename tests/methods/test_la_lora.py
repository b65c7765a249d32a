"""LA-LoRA against rounds written out by hand, and its private steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.ndimage import convolve1d
from torch import Tensor

from fedspan.assembly.run import Prepared
from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import Job, Message
from fedspan.methods.la_lora import LALoRA
from fedspan.training.jobs import Assignment
from fedspan.training.loop import LoopEngine
from helpers import tiny
from helpers.dense_rounds import COHORTS, LR, get_pairs
from helpers.toys.oracle import average, pair_gradients
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Federation, close, sgd, to_double, with_extras
from helpers.watched_rounds import method_config

KERNEL = np.array([1, 4, 6, 4, 1]) / 16


def _smoothed(gradient: Tensor, slot: str) -> Tensor:
    return torch.from_numpy(convolve1d(gradient.numpy(), KERNEL, axis=1 if slot == "A" else 0, mode="reflect"))


def _federation(steps: int, **options: Any) -> Federation:
    method = LALoRA(spec=Problem().adapted().spec, r=2, lora_alpha=4, **options)
    made = Federation(with_extras(method), Problem(), sgd(LR, steps=steps), lora_alpha=4.0)
    made.state = made.state.__class__(tensors=to_double(made.state.tensors))
    return made


@pytest.mark.parametrize("smoothing", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_rounds_match_alternating_steps_by_hand(steps: int, smoothing: bool) -> None:
    problem, scale = Problem(), 3.0
    made = _federation(steps, smoothing=smoothing, b_lr_scale=scale)
    W, pairs, head = problem.to_dense(*LAYERS), get_pairs(made), problem.to_dense(*HEAD)
    for positions in COHORTS:
        ids = [problem.client_ids[position] for position in positions]
        made.round(ids)
        shares, own, heads = problem.shares(ids), {}, {}
        for id in ids:
            own[id], heads[id] = {one: dict(pair) for one, pair in pairs.items()}, dict(head)
            for step in range(steps):
                slot = "BA"[step % 2]
                by_pair, by_head = pair_gradients(problem, id, W, heads[id], own[id], 2.0)
                for one in LAYERS:
                    gradient = by_pair[one][slot]
                    gradient = _smoothed(gradient, slot) if smoothing else gradient
                    own[id][one][slot] = own[id][one][slot] - LR * (scale if slot == "B" else 1.0) * gradient
                for name in HEAD:
                    heads[id][name] = heads[id][name] - LR * by_head[name]
        pairs = {one: average((shares[id], own[id][one]) for id in ids) for one in LAYERS}
        head = average((shares[id], heads[id]) for id in ids)
        for one in LAYERS:
            assert close(made.get_weight(one), W[one] + 2.0 * pairs[one]["B"] @ pairs[one]["A"])
            for slot in "AB":
                assert close(made.state.tensors[join_tensor_name(one, slot)], pairs[one][slot])
        for name in HEAD:
            assert close(made.state.tensors[f"extras/{name}"], head[name])
    first = _federation(steps).state.tensors
    moved = not close(made.state.tensors["fc1/A"], first["fc1/A"], 1e-6)
    assert moved == (steps > 1)  # a single step trains B


def _job(prepared: Prepared) -> Job:
    federation = prepared.federation
    client = next(iter(federation.clients.values())).client
    state = federation.begin().state
    message: Message = federation.method.sync(state, client)
    return federation.method.start(message, client, {}, 0)


def test_a_private_step_releases_and_clips_only_the_factor_that_trains(
    prepared: Prepared, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")
    from fedspan.training import noisy_sum

    added: list[tuple[str, ...]] = []
    genuine = noisy_sum.NoisySum.pop_mean

    def watched(self: Any, step: int, expected: int) -> dict[str, Tensor]:
        mean = genuine(self, step, expected)
        added.append(tuple(sorted({name.rpartition("/")[2] for name in mean if not name.startswith("extras/")})))
        return mean

    monkeypatch.setattr(noisy_sum.NoisySum, "pop_mean", watched)
    privacy = {"mechanism": "dp-sgd", "noise": 0.5, "clip": 0.5}
    run = tiny.variant(
        prepared, method_config(tiny_folder, "la-lora", privacy=privacy, training={"local_steps": 3}), engine=LoopEngine
    )
    id, data = next(iter(run.federation.clients.items()))
    job = _job(run)
    trained = run.engine.train(Assignment(id, 0, job, data.train, 0.1, noise=0.5), run.train)
    assert added == [("B",), ("A",), ("B",)]
    assert trained.steps == 3
    moved = {name for name, value in trained.tensors.items() if not torch.equal(value, job.tensors[name])}
    assert moved == set(job.trainable_names)
    steps = {name: trained.optimizer_state.steps[name] for name in job.trainable_names if "extras" not in name}
    assert {name: count for name, count in steps.items() if count != (2 if name.endswith("/B") else 1)} == {}
