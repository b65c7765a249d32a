"""The loop engine: probes, moments, bases, projectors, rows of the head; local optimizers against torch.optim."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspan.assembly.run import prepare
from fedspan.config import parse_config
from fedspan.core.base import BaseUpdate, Increment
from fedspan.core.lowrank import LowRank
from fedspan.core.parametrization import Projected
from fedspan.core.projectors import compute_svd_projector, draw_projector
from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import Group, Job, OptimizerSpec, OptimizerState, Refresh, Trained
from fedspan.methods.fedit import FedIT
from fedspan.methods.fedloru import FedLoRU
from fedspan.tasks.causal import CausalLM
from fedspan.tasks.preference import PreferenceTuning
from fedspan.training.config import TrainingSettings
from fedspan.training.jobs import Assignment
from fedspan.training.loop import LoopEngine
from fedspan.training.optimizers import LocalOptimizer
from fedspan.training.projector_refresh import build_untrained_tensors, close_segment, refresh_due, refresh_projectors
from fedspan.training.references import References, fill_reference, has_reference
from fedspan.training.stages import Stages
from fedspan.wrappers.fedprox import FedProx
from helpers import tiny, tiny_decoders, tiny_preferences
from helpers.families import others_slow
from helpers.refusals import refused
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


def test_a_probe_sees_every_example_once_and_is_the_gradient_of_the_whole_data() -> None:
    problem = Problem()
    engine, job = _engine(problem, sgd(LR, epochs=3))
    assert _train(engine, problem, replace(job, steps=0)).metrics["examples"] == len(problem.indices["client-2"])
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


RANK = 2
SIDES = {"fc1": "right", "fc2": "left"}
"""fc1 is 8 x 5, fc2 6 x 8."""


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(3)
    shapes = {"fc1/acc": (8, RANK), "fc1/P": (RANK, 5), "fc2/acc": (RANK, 8), "fc2/P": (6, RANK)}
    return {name: drawn(*shape) for name, shape in shapes.items()}


def weight(live: dict[str, Tensor], layer: str) -> Tensor:
    """What a layer's tensors add to its weight."""
    slots = {name.partition("/")[2]: value for name, value in live.items() if name.startswith(f"{layer}/")}
    pair = Projected(SIDES[layer]).compute_effective(slots).pair
    assert isinstance(pair, LowRank)
    return pair.to_dense()


@pytest.mark.parametrize(
    ("refresh", "due"),
    [
        (Refresh(3), [0, 3, 6]),
        (Refresh(3, at_start=False), [3, 6]),
        (Refresh(None), [0]),
        (Refresh(None, at_start=False), []),
        (Refresh(1), [*range(8)]),
    ],
)
def test_refreshes_are_due_at_multiples_of_the_period(refresh: Refresh, due: list[int]) -> None:
    assert [step for step in range(8) if refresh_due(refresh, step)] == due


@pytest.mark.parametrize("layer", LAYERS)
def test_a_closed_segment_keeps_the_weight_and_restarts_the_accumulator(layer: str) -> None:
    live = tensors()
    before = weight(live, layer)
    close_segment(live, layer, Projected(SIDES[layer]))
    assert torch.equal(live[f"{layer}/acc"], torch.zeros_like(live[f"{layer}/acc"]))
    assert torch.allclose(weight(live, layer), before, rtol=1e-12)
    live[f"{layer}/acc"] += 1.0
    second = weight(live, layer)
    close_segment(live, layer, Projected(SIDES[layer]))
    assert torch.allclose(weight(live, layer), second, rtol=1e-12)
    assert (live[f"{layer}/done_B"].shape[1], live[f"{layer}/done_A"].shape[0]) == (2 * RANK, 2 * RANK)


class Recorded:
    """Moments of the accumulators."""

    def __init__(self, live: dict[str, Tensor]) -> None:
        accumulators = [name for name in live if name.endswith("/acc")]
        self.moments = {
            (kind, name): torch.rand_like(live[name]) for kind in ("exp_avg", "exp_avg_sq") for name in accumulators
        }

    def get_moment(self, kind: str, name: str) -> Tensor:
        return self.moments[kind, name]


def refreshed(refresh: Refresh, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor], Recorded, Any]:
    problem = Problem(clients=2)
    services = LoopEngine(problem.adapted(), problem.task, sgd(), seed=7)
    parametrization = {layer: Projected(side) for layer, side in SIDES.items()}
    before = tensors()
    live = {name: value.clone() for name, value in before.items()}
    job = Job(parametrization, before, (), refresh=refresh)
    for name, value in live.items():
        value.requires_grad_(name.endswith("/acc"))
    services.adapted.bind(parametrization, live)
    moments = Recorded(live)
    refresh_projectors(services, job, live, moments, step, problem.examples, problem.indices["client-0"])
    return before, live, moments, problem


@pytest.mark.parametrize("step", [0, 4])
def test_seeded_projectors_advance_with_each_refresh(step: int) -> None:
    """The server draws the same ones; the weight does not jump, except that the first step has no segment to finish."""
    before, live, _, _ = refreshed(Refresh(2, "random", seed=11), step)
    for layer, shape in (("fc1", (8, 5)), ("fc2", (6, 8))):
        drawn_again = draw_projector(layer, shape, RANK, SIDES[layer], 11 + step // 2).double()
        assert torch.equal(live[f"{layer}/P"], drawn_again)
        if step:
            assert torch.allclose(weight(live, layer), weight(before, layer), rtol=1e-12)
        else:
            assert f"{layer}/done_B" not in live
            assert torch.equal(live[f"{layer}/acc"], before[f"{layer}/acc"])


def test_nothing_changes_between_refreshes_and_after_the_last_measured_one_they_are_random() -> None:
    before, live, _, _ = refreshed(Refresh(2, "random"), 3)
    assert live.keys() == before.keys()
    assert all(torch.equal(live[name], before[name]) for name in before)
    _, live, _, _ = refreshed(Refresh(2, "svd", until=1, seed=5), 2)
    assert torch.equal(live["fc1/P"], draw_projector("fc1", (8, 5), RANK, "right", 6).double())


def test_measured_projectors_are_the_leading_directions_of_the_gradient() -> None:
    before, live, _, problem = refreshed(Refresh(2, "svd"), 0)
    dense = problem.to_dense()
    dense |= {layer: dense[layer] + weight(before, layer) for layer in LAYERS}
    gradients = problem.gradients("client-0", dense)
    for layer, side in SIDES.items():
        gradient = gradients[layer]
        whole = LowRank(gradient, torch.eye(gradient.shape[1], dtype=torch.float64))
        P, found = compute_svd_projector(whole, RANK, side).double(), live[f"{layer}/P"]
        expected, projection = (P.T @ P, found.T @ found) if side == "right" else (P @ P.T, found @ found.T)
        assert torch.allclose(projection, expected, atol=1e-5)
    assert all(value.grad is None for value in live.values())


@pytest.mark.parametrize(("rule", "kept"), [("keep", True), ("reset", False)])
def test_moments_follow_their_rule(rule: Any, kept: bool) -> None:
    _, _, moments, _ = refreshed(Refresh(2, "random", moments=rule), 2)
    assert all(bool(value.any()) is kept for value in moments.moments.values())


def test_an_untrained_job_has_the_segments_that_its_refreshes_finish() -> None:
    parametrization = {layer: Projected(side) for layer, side in SIDES.items()}
    job = Job(parametrization, tensors(), (), steps=7, refresh=Refresh(3))
    found = build_untrained_tensors(job)
    for layer in LAYERS:
        assert torch.allclose(weight(found, layer), weight(dict(job.tensors), layer), rtol=1e-12)
        assert found[f"{layer}/done_B"].shape[1] == 2 * RANK  # before steps 3 and 6
        assert bool(job.tensors[f"{layer}/acc"].any())
    for unchanged in (replace(job, refresh=None), replace(job, refresh=Refresh(None)), replace(job, steps=None)):
        assert build_untrained_tensors(unchanged) == dict(job.tensors)
    assert build_untrained_tensors(replace(job, steps=3)).keys() == job.tensors.keys()


CPU = torch.device("cpu")


@pytest.mark.parametrize("method", others_slow(["flora", "fedloru", "fedit", "fedavg"], ["flora"]))
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_the_reference_is_the_start_of_the_federation(method: str, engine: str, decoders: Path, tmp_path: Path) -> None:
    values = tiny_preferences.settings(decoders, tmp_path, method={"name": method}, engine={"name": engine})
    prepared = prepare(parse_config(values))
    examples, test = prepared.train, prepared.test
    assert test is not None
    assert np.isnan(examples.reference).all()
    progress = tiny.run_all_rounds(prepared)
    prepared.evaluator.evaluate_heldout(progress, test)  # for the first time now
    assert prepared.engine.adapted.base is progress.state.base
    pretrained = transformers.AutoModelForCausalLM.from_pretrained(decoders / "llama-lm").eval()
    for own in (examples, test):
        filled = ~np.isnan(own.reference).any(1)
        assert filled.any()
        batch = prepared.task.collate(own, np.flatnonzero(filled).tolist(), CPU)
        expected = prepared.task.compute_reference(pretrained, batch)
        np.testing.assert_allclose(own.reference[filled], expected.numpy(), rtol=1e-5, atol=1e-5)


def test_examples_are_computed_once_and_in_parts(decoders: Path, tmp_path: Path) -> None:
    prepared = prepare(parse_config(tiny_preferences.settings(decoders, tmp_path)))
    task, examples = prepared.task, prepared.train
    seen: list[tuple[int, int | None]] = []
    stages = Stages(lambda stage: seen.append((stage.done, stage.total)) if stage and stage.done else None)
    references = References(prepared.engine.adapted, task, stages, 4)
    references.ensure(examples, [np.arange(5), np.arange(5, 9)])
    assert seen[-1] == (9, 9)
    before = examples.reference.copy()
    references.ensure(examples, [np.arange(9), np.arange(3, 11)])
    assert seen[-1] == (2, 2)
    np.testing.assert_array_equal(examples.reference[:9], before[:9])


def test_other_tasks_have_no_reference(tiny_folder: Path) -> None:
    prepared = prepare(tiny.config(tiny_folder))
    assert not has_reference(prepared.task)
    References(prepared.engine.adapted, prepared.task, Stages(), 4).ensure(prepared.train, [np.arange(3)])


def test_a_model_that_computes_nan_is_named(decoders: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(decoders / "llama-lm")
    model.lm_head.weight.data[:] = float("nan")
    task = PreferenceTuning(CausalLM(tiny_decoders.tokenizer(pads=True), 16))
    rows = tiny_preferences.make_rows()[:3]
    examples = task.encode(datasets.Dataset.from_list(rows).rename_column("prompt", "text"))
    with refused("model.name"):
        fill_reference(task, model, examples, np.arange(3), CPU, 2)
    fill_reference(task, model, examples, np.arange(2), CPU, 2, survives=True)
    assert np.isinf(examples.reference[:2]).all()


SHAPES = {"l/A": (3, 4), "l/B": (5, 3), "extras/bias": (2,)}
STEPS = 25
SGD = OptimizerSpec(name="sgd", lr=0.05, momentum=0.9, weight_decay=0.1)
ADAMW = OptimizerSpec(name="adamw", lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)


def _start(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=rng, dtype=dtype) for name, shape in SHAPES.items()}


def _gradients(tensors: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """Of a quadratic plus noise keyed by the step: they depend on where the tensors are."""
    rng = torch.Generator().manual_seed(100 + step)
    return {
        name: 0.3 * value.detach() + torch.randn(value.shape, generator=rng, dtype=value.dtype)
        for name, value in tensors.items()
    }


def _run(optimizer: LocalOptimizer, live: dict[str, Tensor], steps: range) -> None:
    for step in steps:
        optimizer.step(_gradients(live, step))


def _torch_sgd(parameters: list[dict], spec: OptimizerSpec) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay)


def _torch_adamw(parameters: list[dict], spec: OptimizerSpec) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay, foreach=False
    )


GROUPS = (Group(("l/B",), lr_scale=5.0), Group(("l/A",)), Group(("extras/bias",), lr_scale=0.5, weight_decay=0.0))
SPECS = [
    pytest.param(SGD, _torch_sgd, id="sgd"),
    pytest.param(replace(SGD, momentum=0.0), _torch_sgd, id="sgd without momentum"),
    pytest.param(replace(SGD, weight_decay=0.0), _torch_sgd, id="sgd without decay"),
    pytest.param(ADAMW, _torch_adamw, id="adamw"),
    pytest.param(replace(ADAMW, weight_decay=0.0), _torch_adamw, id="adamw without decay"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("spec", "build"), SPECS)
def test_equals_torch_optim(
    spec: OptimizerSpec, build: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, tolerance: float
) -> None:
    ours, theirs = _start(dtype), _start(dtype)
    optimizer = LocalOptimizer(spec, GROUPS, ours)
    parameters = []
    for group in GROUPS:
        decay = spec.weight_decay if group.weight_decay is None else group.weight_decay
        own = [theirs[name].requires_grad_() for name in group.names]
        parameters.append({"params": own, "lr": spec.lr * group.lr_scale, "weight_decay": decay})
    reference = build(parameters, spec)
    for step in range(STEPS):
        gradients = _gradients(theirs, step)
        for name, value in theirs.items():
            value.grad = gradients[name]
        optimizer.step(_gradients(ours, step))
        reference.step()
        for name in SHAPES:
            assert torch.allclose(ours[name], theirs[name].detach(), rtol=tolerance, atol=tolerance), (step, name)


@pytest.mark.parametrize("spec", [SGD, ADAMW], ids=["sgd", "adamw"])
@given(st.integers(0, STEPS))
@settings(max_examples=10, deadline=None)
def test_a_state_carried_over_continues_bit_for_bit(spec: OptimizerSpec, cut: int) -> None:
    whole, split = _start(), _start()
    _run(LocalOptimizer(spec, GROUPS, whole), whole, range(STEPS))
    first = LocalOptimizer(spec, GROUPS, split)
    _run(first, split, range(cut))
    state = first.copy_state()
    copies = {kind: {name: value.clone() for name, value in values.items()} for kind, values in state.moments.items()}
    _run(LocalOptimizer(spec, GROUPS, split, state), split, range(cut, STEPS))
    for name in SHAPES:
        assert torch.equal(whole[name], split[name])
    for kind, values in copies.items():  # the state is a value: nobody writes to it
        for name, value in values.items():
            assert torch.equal(state.moments[kind][name], value)
    assert set(state.steps.values()) == ({cut} if cut else set())


@pytest.mark.parametrize("spec", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_masked_entries_are_frozen_and_the_others_train_as_if_alone(spec: OptimizerSpec) -> None:
    live, start = _start(), _start()
    mask = torch.zeros(3, 4, dtype=torch.float64)
    mask[1] = 1.0
    alone = {"l/A": start["l/A"][1:2].clone()}
    optimizer = LocalOptimizer(spec, (Group(("l/A",)),), live, masks={"l/A": mask})
    row = LocalOptimizer(spec, (Group(("l/A",)),), alone)
    for step in range(STEPS):
        gradient = _gradients(live, step)["l/A"]
        optimizer.step({"l/A": gradient})
        row.step({"l/A": gradient[1:2]})
    assert torch.equal(live["l/A"][[0, 2]], start["l/A"][[0, 2]])
    assert torch.equal(live["l/A"][1:2], alone["l/A"])
    assert not torch.equal(live["l/A"][1], start["l/A"][1])


@pytest.mark.parametrize("spec", [SGD, replace(SGD, weight_decay=0.0), ADAMW], ids=["sgd with decay", "sgd", "adamw"])
def test_masked_entries_gather_no_moments(spec: OptimizerSpec) -> None:
    live = _start()
    mask = torch.zeros(3, 4, dtype=torch.float64)
    mask[1] = 1.0
    optimizer = LocalOptimizer(spec, (Group(("l/A",)),), live, masks={"l/A": mask})
    _run(optimizer, live, range(3))
    for values in optimizer.copy_state().moments.values():
        assert values["l/A"][1].all()
        assert not values["l/A"][[0, 2]].any()


@pytest.mark.parametrize("correct", [(True, True), (True, False), (False, True), (False, False)])
def test_bias_correction_of_either_moment(correct: tuple[bool, bool]) -> None:
    """By hand, from a warm second moment, as FedGaLore hands it down."""
    spec = replace(ADAMW, bias_correction=correct)
    live, x = _start(), _start()["l/A"]
    warm = torch.rand((3, 4), generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    state = OptimizerState({"exp_avg_sq": {"l/A": warm.clone()}})
    optimizer = LocalOptimizer(spec, (Group(("l/A",)),), live, state)
    m, v = torch.zeros_like(x), warm
    for step in range(STEPS):
        g = _gradients(live, step)["l/A"]
        optimizer.step({"l/A": g})
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
        m_hat = m / (1 - 0.8 ** (step + 1)) if correct[0] else m
        v_hat = v / (1 - 0.95 ** (step + 1)) if correct[1] else v
        x = x * (1 - 0.05 * 0.1) - 0.05 * m_hat / (v_hat.sqrt() + 1e-6)
        assert torch.allclose(live["l/A"], x, rtol=0, atol=1e-12)
    assert torch.allclose(optimizer.copy_state().moments["exp_avg_sq"]["l/A"], v, rtol=0, atol=1e-12)


def test_moments_of_what_does_not_train_wait_untouched() -> None:
    """RoLoRA: A's moments survive a round that trains B alone, and its steps do not count."""
    live = _start()
    first = LocalOptimizer(ADAMW, (Group(("l/A",)),), live)
    _run(first, live, range(3))
    before, A = first.copy_state(), live["l/A"].clone()
    second = LocalOptimizer(ADAMW, (Group(("l/B",)),), live, before)
    _run(second, live, range(3, 8))
    after = second.copy_state()
    assert after.steps == {"l/A": 3, "l/B": 5}
    assert torch.equal(live["l/A"], A)
    for kind in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(after.moments[kind]["l/A"], before.moments[kind]["l/A"])
    assert second.names == ("l/B",)


def test_a_zero_gradient_still_decays_as_in_torch() -> None:
    live = _start()
    optimizer = LocalOptimizer(ADAMW, (Group(("l/A",)),), live)
    optimizer.step({"l/A": torch.zeros(3, 4, dtype=torch.float64)})
    assert torch.allclose(live["l/A"], _start()["l/A"] * (1 - 0.05 * 0.1), rtol=0, atol=1e-15)
