"""RAVAN against dense gradients written out head by head."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedspan.core.tensors import join_tensor_name, select_slots
from fedspan.methods.ravan import RAVAN
from helpers.dense_rounds import COHORTS, LR
from helpers.toys.oracle import average
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Federation, close, sgd, to_double, with_extras

HEADS, R, S, STEPS = 3, 2, 2.0, 3
Slots = dict[str, dict[str, Tensor]]


def _federation(fixed_factors: str = "orthonormal") -> Federation:
    method = RAVAN(spec=Problem().adapted().spec, r=R, lora_alpha=4, heads=HEADS, fixed_factors=fixed_factors)
    made = Federation(with_extras(method), Problem(), sgd(LR, steps=STEPS), lora_alpha=4.0)
    made.state = replace(made.state, tensors=to_double(made.state.tensors))
    return made


def _fixed(made: Federation) -> Slots:
    """B and A of each layer, which nobody is sent."""
    tensors = made.job().tensors
    return {one: {slot: select_slots(tensors, one)[slot].double() for slot in "AB"} for one in LAYERS}


def _change(fixed: dict[str, Tensor], cores: Tensor, scales: Tensor) -> Tensor:
    change = torch.zeros(len(fixed["B"]), fixed["A"].shape[1], dtype=torch.float64)
    for head in range(HEADS):
        part = slice(head * R, (head + 1) * R)
        change += S * scales[head] * fixed["B"][:, part] @ cores[head] @ fixed["A"][part]
    return change


@pytest.mark.parametrize("fixed_factors", ["orthonormal", "gaussian"])
def test_rounds_match_heads_by_hand(fixed_factors: str) -> None:
    problem, made = Problem(), _federation(fixed_factors)
    W, head, fixed = problem.to_dense(*LAYERS), problem.to_dense(*HEAD), _fixed(made)
    cores = {one: torch.zeros(HEADS, R, R, dtype=torch.float64) for one in LAYERS}
    largest = 0.0
    for number, positions in enumerate(COHORTS):
        ids = [problem.client_ids[position] for position in positions]
        made.round(ids)
        shares, replies, heads = problem.shares(ids), {}, {}
        for id in ids:
            own, heads[id] = {one: value.clone() for one, value in cores.items()}, dict(head)
            scales = {one: torch.ones(HEADS, dtype=torch.float64) for one in LAYERS}
            for _ in range(STEPS):
                now = {one: W[one] + _change(fixed[one], own[one], scales[one]) for one in LAYERS}
                dense = problem.gradients(id, {**now, **heads[id]})
                for one in LAYERS:
                    by_core, by_scale = torch.zeros_like(own[one]), torch.zeros_like(scales[one])
                    for j in range(HEADS):
                        part = slice(j * R, (j + 1) * R)
                        inner = S * fixed[one]["B"][:, part].T @ dense[one] @ fixed[one]["A"][part].T
                        by_core[j], by_scale[j] = scales[one][j] * inner, (own[one][j] * inner).sum()
                    own[one], scales[one] = own[one] - LR * by_core, scales[one] - LR * by_scale
                heads[id] = {name: value - LR * dense[name] for name, value in heads[id].items()}
            largest = max(largest, *(float((value - 1).abs().max()) for value in scales.values()))
            replies[id] = {one: scales[one][:, None, None] * own[one] for one in LAYERS}
        cores = average((shares[id], replies[id]) for id in ids)
        head = average((shares[id], heads[id]) for id in ids)
        for one in LAYERS:
            expected = W[one] + _change(fixed[one], cores[one], torch.ones(HEADS, dtype=torch.float64))
            assert close(made.get_weight(one), expected), (number, one)
            assert close(made.state.tensors[join_tensor_name(one, "R")], cores[one])
        for name in HEAD:
            assert close(made.state.tensors[f"extras/{name}"], head[name])
        if len(positions) == len(problem.client_ids):
            count = len(LAYERS) * HEADS * R * R
            assert all(made.elements[id] == (count, count) for id in ids)
    assert largest > 0.01  # the scales trained


def test_fixed_factors_are_orthonormal_as_far_as_a_layer_allows() -> None:
    """8 x 5 and 6 x 8 layers, six columns: A of the first has a set of five rows and one more."""
    fixed = _fixed(_federation())
    identity = torch.eye(6, dtype=torch.float64)
    assert close(fixed["fc1"]["B"].T @ fixed["fc1"]["B"], identity, 1e-6)
    assert close(fixed["fc2"]["B"].T @ fixed["fc2"]["B"], identity, 1e-6)
    assert close(fixed["fc2"]["A"] @ fixed["fc2"]["A"].T, identity, 1e-6)
    assert close(fixed["fc1"]["A"][:5] @ fixed["fc1"]["A"][:5].T, identity[:5, :5], 1e-6)
    assert float(fixed["fc1"]["A"][5].norm()) == pytest.approx(1.0, abs=1e-6)
