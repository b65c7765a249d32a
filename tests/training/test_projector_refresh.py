"""When projectors are renewed, what becomes of the finished segments, and which projectors follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedspan.core.lowrank import LowRank
from fedspan.core.parametrization import Projected
from fedspan.core.projectors import compute_svd_projector, draw_projector
from fedspan.core.values import Job, Refresh
from fedspan.training.loop import LoopEngine
from fedspan.training.projector_refresh import (
    build_untrained_tensors,
    close_segment,
    refresh_due,
    refresh_projectors,
)
from helpers.toys.problem import LAYERS, Problem
from helpers.toys.rounds import sgd

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


def test_between_refreshes_nothing_changes() -> None:
    before, live, _, _ = refreshed(Refresh(2, "random"), 3)
    assert live.keys() == before.keys()
    assert all(torch.equal(live[name], before[name]) for name in before)


def test_after_the_last_measured_one_refreshes_are_random() -> None:
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
