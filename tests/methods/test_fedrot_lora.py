"""FedRot-LoRA against rotations found by brute force and written-out Procrustes problems."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from fedspan.core.tensors import join_tensor_name
from fedspan.methods.fedrot_lora import FedRotLoRA
from helpers.dense_rounds import Pairs, Weights, factor_mean, federation, follow, given
from helpers.toys.problem import LAYERS, Problem
from helpers.toys.rounds import close
from helpers.watched_rounds import RunMethod, differences


def rotation(angle: Tensor) -> Tensor:
    """Rank 2: SO(2) is an angle."""
    return torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])


def best_angle(target: Tensor, source: Tensor) -> Tensor:
    """The angle of the rotation of ``source`` (2, N) that is nearest to ``target``: a root of the derivative."""
    cross = target @ source.T
    return torch.atan2(cross[1, 0] - cross[0, 1], cross[0, 0] + cross[1, 1])


class _Oracle:
    """Rank 2. The nearest rotation to (1 - lambda) I + lambda R(angle) is by an angle again."""

    def __init__(self, W: Weights, pairs: Pairs, strength: float) -> None:
        self.W, self.pairs, self.strength, self.round = W, pairs, strength, 0

    def start(self, id: str) -> tuple[Weights, Pairs]:
        return self.W, self.pairs

    def finish(self, trained: Mapping[str, Pairs], shares: Mapping[str, float]) -> None:
        turned: dict[str, Pairs] = {id: {} for id in trained}
        for id, pairs in trained.items():
            for one, pair in pairs.items():
                if self.round % 2:
                    angle = best_angle(self.pairs[one]["A"], pair["A"])
                else:
                    angle = best_angle(self.pairs[one]["B"].T, pair["B"].T)
                sine, cosine = self.strength * angle.sin(), 1 - self.strength + self.strength * angle.cos()
                R = rotation(torch.atan2(sine, cosine) if self.round else torch.zeros((), dtype=torch.float64))
                turned[id][one] = {"A": R @ pair["A"], "B": pair["B"] @ R.T}
        self.pairs, self.round = factor_mean(turned, shares), self.round + 1

    def model(self) -> Weights:
        return {one: self.W[one] + 2.0 * self.pairs[one]["B"] @ self.pairs[one]["A"] for one in LAYERS}


@pytest.mark.parametrize("strength", [0.0, 0.4, 1.0])
def test_rounds_match_rotations_by_an_angle(strength: float) -> None:
    problem = Problem()
    method = FedRotLoRA(spec=problem.adapted().spec, r=2, lora_alpha=4, strength=strength)
    made = federation(method)
    follow(made, _Oracle(problem.to_dense(*LAYERS), given(made), strength))


def test_what_is_sent_is_what_was_trained_rotated_towards_the_global_factor(run_method: RunMethod) -> None:
    """The product stays, the factor of the round's turn comes nearer, and no reflection is among the rotations."""
    run = run_method("fedrot-lora", method={"strength": 1.0})
    for number, round in enumerate(run.rounds):
        uploads = {call.args[2].id: call.result[0].tensors for call in round.of("finish")}
        moved = 0.0
        for local in round.trained:
            for layer in run.layers:
                a, b = join_tensor_name(layer.name, "A"), join_tensor_name(layer.name, "B")
                before, after, sent = local.job.tensors, local.trained.tensors, uploads[local.client]
                product = after[b].double() @ after[a].double()
                assert close(sent[b].double() @ sent[a].double(), product, 1e-6)
                turn = torch.linalg.lstsq(after[a].double().T, sent[a].double().T).solution
                assert torch.linalg.det(turn) > 0
                chosen = a if number % 2 else b
                assert (sent[chosen] - before[chosen]).norm() <= (after[chosen] - before[chosen]).norm() * (1 + 1e-6)
                moved = max(moved, float((sent[a] - after[a]).norm()))
        assert (moved > 1e-3) == (number > 0)


def test_moments_of_another_frame_are_dropped(run_method: RunMethod) -> None:
    """Two steps a round are all that a factor's moments have seen, though moments are kept."""
    run = run_method("fedrot-lora")
    name = join_tensor_name(run.layers[0].name, "A")
    for round in run.rounds:
        assert {local.trained.optimizer_state.steps[name] for local in round.trained} == {2}


def test_strength_0_is_fedit(run_method: RunMethod) -> None:
    """Weights to rounding; the first round bit for bit. FedIT keeps its moments, so both runs reset them."""
    reset = {"optimizer_state": "reset"}
    ours = run_method("fedrot-lora", method={"strength": 0.0}, training=reset)
    theirs = run_method("fedit", training=reset)
    assert differences(ours.rounds[0].after.state.tensors, theirs.rounds[0].after.state.tensors) == []
    for name, value in theirs.rounds[-1].after.state.tensors.items():
        assert torch.allclose(ours.rounds[-1].after.state.tensors[name], value, atol=1e-5)


def test_averaging_aligned_factors_loses_less_than_averaging_rotated_ones() -> None:
    """Clients that agree up to a rotation: FedIT's average is wrong, the aligned one is not."""
    method = FedRotLoRA(spec=Problem().adapted().spec, r=2, lora_alpha=4, strength=1.0)
    made = federation(method)
    made.round()
    for one in LAYERS:
        pair = given(made)[one]
        angles = [torch.tensor(angle, dtype=torch.float64) for angle in (0.0, 1.0, 2.0, -2.5)]
        rotated = [(pair["B"] @ rotation(angle).T, rotation(angle) @ pair["A"]) for angle in angles]
        naive = sum(B for B, _ in rotated) @ sum(A for _, A in rotated) / len(angles) ** 2
        ideal = pair["B"] @ pair["A"]
        assert float((naive - ideal).norm() / ideal.norm()) > 0.5
        found = [rotation(best_angle(pair["A"], A)) for _, A in rotated]
        aligned = [(B @ R.T, R @ A) for (B, A), R in zip(rotated, found, strict=True)]
        mean = sum(B for B, _ in aligned) @ sum(A for _, A in aligned) / len(angles) ** 2
        assert close(mean, ideal)
    assert math.isfinite(made.loss("client-0"))
