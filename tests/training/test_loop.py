"""The loop engine on toy problems: probes, gradients, moments and bases."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedspan.core.base import BaseUpdate, Increment
from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import Job, OptimizerState, Trained
from fedspan.methods.fedit import FedIT
from fedspan.methods.fedloru import FedLoRU
from fedspan.training.jobs import Assignment, TrainingSettings
from fedspan.training.loop import LoopEngine
from fedspan.wrappers.fedprox import FedProx
from helpers.toys.oracle import pair_gradients
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Federation, adamw, close, sgd, with_extras

LR = 0.1


def _engine(problem: Problem, training: TrainingSettings) -> tuple[LoopEngine, Job]:
    method = with_extras(FedIT(spec=problem.adapted().spec, seed=1, r=2, lora_alpha=4.0))
    federation = Federation(method, problem, training)
    return federation.engine, federation.job()


def _train(engine: LoopEngine, problem: Problem, job: Job, kept: OptimizerState | None = None) -> Trained:
    indices = problem.indices["client-2"]
    return engine.train(Assignment("client-2", 0, job, indices, LR, kept), problem.examples)


def test_no_steps_give_the_gradient_and_move_nothing() -> None:
    problem = Problem()
    engine, job = _engine(problem, adamw(LR))
    rng = torch.Generator().manual_seed(0)
    moved = {name: torch.randn(value.shape, generator=rng, dtype=value.dtype) for name, value in job.tensors.items()}
    probe = _train(engine, problem, replace(job, tensors=moved, steps=0))
    pairs = {one: {s: moved[join_tensor_name(one, s)] for s in "AB"} for one in LAYERS}
    head = {name: moved[f"extras/{name}"] for name in HEAD}
    by_pair, by_head = pair_gradients(problem, "client-2", problem.to_dense(*LAYERS), head, pairs, 2.0)
    for one in LAYERS:
        for s in "AB":
            assert close(probe.gradient[join_tensor_name(one, s)], by_pair[one][s])
    for name in HEAD:
        assert close(probe.gradient[f"extras/{name}"], by_head[name])
    assert (probe.steps, probe.lr_sum) == (0, 0.0)
    for name, value in moved.items():
        assert torch.equal(probe.tensors[name], value)


def test_the_raw_gradient_holds_neither_penalty_nor_offset_nor_clipping() -> None:
    problem = Problem()
    engine, job = _engine(problem, sgd(LR, steps=1, max_grad_norm=1e-3))
    penalized = FedProx(inner=with_extras(FedIT(spec=problem.adapted().spec, seed=1, r=2, lora_alpha=4.0)))
    pulled = penalized.start(
        penalized.sync(penalized.init(engine.adapted), None), None, {}, penalized.init(engine.adapted).round
    )
    offset = {name: torch.ones_like(job.tensors[name]) for name in job.trainable_names}
    plain = _train(engine, problem, replace(job, steps=0))
    busy = _train(engine, problem, replace(pulled, gradient_offset=offset, want_gradient=True))
    for name, value in plain.gradient.items():
        assert torch.equal(busy.gradient[name], value)
        # The offset comes after clipping: a step of lr times (almost nothing + 1).
        assert close(pulled.tensors[name] - busy.tensors[name], LR * offset[name], 2e-3)


def test_a_probe_sees_every_example_once() -> None:
    problem = Problem()
    engine, job = _engine(problem, sgd(LR, epochs=3))
    assert _train(engine, problem, replace(job, steps=0)).metrics["examples"] == len(problem.indices["client-2"])


def test_a_probe_in_batches_is_the_gradient_of_the_whole_data() -> None:
    problem = Problem()
    engine, job = _engine(problem, sgd(LR))
    whole = _train(engine, problem, replace(job, steps=0)).gradient
    engine.settings = sgd(LR, batch_size=4)  # 10 examples: 4, 4 and 2
    parts = _train(engine, problem, replace(job, steps=0)).gradient
    for name, value in whole.items():
        assert close(parts[name], value)


def test_a_jobs_moments_and_kept_ones_live_side_by_side() -> None:
    problem = Problem()
    engine, job = _engine(problem, adamw(LR))
    first = _train(engine, problem, job)
    name = join_tensor_name("fc1", "A")
    own = OptimizerState({"exp_avg_sq": {name: torch.ones_like(job.tensors[name])}})
    second = _train(engine, problem, replace(job, optimizer_state=own), kept=first.optimizer_state)
    assert second.optimizer_state.steps["extras/head.bias"] == 2


def test_a_model_takes_the_base_of_another_run() -> None:
    problem = Problem(clients=2)
    federations = [
        Federation(with_extras(FedLoRU(spec=problem.adapted().spec, r=2, tau=1, seed=seed)), problem, sgd(LR))
        for seed in (0, 1)
    ]
    for one in federations:
        one.round()
    expected = federations[1].loss("client-0")
    federations[1].adapted = federations[1].engine.adapted = federations[0].adapted
    federations[0].loss("client-0")  # puts the first run's base of round 1 into the model
    assert federations[1].loss("client-0") == expected


def test_a_float64_base_may_shrink() -> None:
    problem = Problem(clients=1)
    engine, job = _engine(problem, sgd(LR))
    indices = problem.indices["client-0"]
    engine.adapted.set_base(BaseUpdate().add(Increment(1, {}, decay=0.5)))
    predictions = engine.predict(job, problem.examples, indices, batch_size=4)
    weights = problem.to_dense()
    expected = problem.loss("client-0", {**weights, **{layer: 0.5 * weights[layer] for layer in LAYERS}})
    loss = problem.task.compute_metrics(predictions, problem.examples, indices.tolist())["loss"]
    assert abs(loss - float(expected)) < 1e-6
