"""The local optimizers against ``torch.optim``, step for step, and what they add: masks, states, partial moments."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspan.core.values import Group, OptimizerSpec, OptimizerState
from fedspan.training.optimizers import LocalOptimizer

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
