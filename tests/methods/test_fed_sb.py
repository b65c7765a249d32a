"""Fed-SB and RAVAN against dense weights and gradients: SVDs by hand, R by the chain rule, and head by head."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedspan.core.tensors import join_tensor_name, select_slots
from fedspan.core.values import Reduced
from fedspan.methods.fed_sb import FedSB
from fedspan.methods.ravan import RAVAN
from helpers.dense_rounds import COHORTS, require_state
from helpers.toys.oracle import average
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Federation, close, sgd, to_double, with_extras

LR, STEPS, R, S, STEP = 0.3, 3, 2, 1.5, 0.05


def _method(problem: Problem) -> FedSB:
    return FedSB(spec=problem.adapted().spec, r=R, lora_alpha=S * R, init_step=STEP)


@pytest.mark.parametrize("first", [(0, 1, 2, 3), (1, 3)])
def test_matches_a_dense_oracle(first: tuple[int, ...]) -> None:
    problem = Problem()
    federation = Federation(with_extras(_method(problem)), problem, sgd(LR, steps=STEPS), lora_alpha=S * R)
    W, head = problem.to_dense(*LAYERS), problem.to_dense(*HEAD)
    cohort = [problem.client_ids[position] for position in first]
    federation.round(cohort)
    shares = problem.shares(cohort)
    gradient = average((shares[id], problem.gradients(id, problem.to_dense())) for id in cohort)
    factors: dict[str, dict[str, Tensor]] = {}
    for one in LAYERS:
        U, sigma, Vt = torch.linalg.svd(-STEP * torch.sign(gradient[one]), full_matrices=False)
        begun = federation.get_weight(one) - W[one]  # not taken off W0: the first step is taken
        assert close(begun, (U[:, :R] * sigma[:R]) @ Vt[:R])
        A, B = (federation.state.tensors[join_tensor_name(one, slot)].double() for slot in "AB")
        assert close(B.T @ B, torch.eye(R).double())
        assert close(A @ A.T, torch.eye(R).double())
        factors[one] = {"A": A, "B": B, "R": federation.state.tensors[join_tensor_name(one, "R")].double()}
        assert close(factors[one]["R"], torch.diag(sigma[:R] / S))
    for name in HEAD:
        assert torch.equal(federation.state.tensors[f"extras/{name}"].double(), head[name])  # no step was taken
    for positions in [(0, 1), (1, 2, 3), (0, 3)]:
        cohort = [problem.client_ids[position] for position in positions]
        federation.round(cohort)
        shares, models = problem.shares(cohort), list[tuple[float, dict[str, Tensor]]]()
        for id in cohort:
            own, own_head = {one: factors[one]["R"] for one in LAYERS}, dict(head)
            for _ in range(STEPS):
                full = {one: W[one] + S * factors[one]["B"] @ own[one] @ factors[one]["A"] for one in LAYERS}
                dense = problem.gradients(id, {**full, **own_head})
                for one in LAYERS:
                    own[one] = own[one] - LR * S * factors[one]["B"].T @ dense[one] @ factors[one]["A"].T
                own_head = {name: own_head[name] - LR * dense[name] for name in HEAD}
            models.append((shares[id], {**own, **own_head}))
        mean = average(models)
        head = {name: mean[name] for name in HEAD}
        for one in LAYERS:
            factors[one]["R"] = mean[one]
            assert close(federation.get_weight(one), W[one] + S * factors[one]["B"] @ mean[one] @ factors[one]["A"])
            for id in problem.client_ids:  # whoever was away, or never asked, has the same model
                assert close(federation.get_weight(one, id), federation.get_weight(one), 1e-15)


def test_after_the_first_rounds_only_r_squared_is_transmitted() -> None:
    problem = Problem()
    federation = Federation(with_extras(_method(problem)), problem, sgd(LR))
    seen: list[tuple[int, int]] = []
    for number in range(4):
        federation.round()
        for id in problem.client_ids:
            assert federation.elements[id] == federation.declare_claims(id, number)
        seen.append(federation.elements["client-0"])
    factors = R * (8 + 5) + R * (6 + 8)
    assert seen == [(0, 40 + 48), (factors + 2 * R**2, 2 * R**2), (2 * R**2, 2 * R**2), (2 * R**2, 2 * R**2)]


def test_a_layer_without_a_gradient_can_still_be_trained() -> None:
    """sign(0) = 0: R = 0 between orthonormal B and A, whose gradient s B^T G A^T need not vanish."""
    problem = Problem()
    method = _method(problem)
    zeros = {join_tensor_name(layer.name, "gradient"): torch.zeros(layer.shape) for layer in method.spec.layers}
    after = method.update(method.init(problem.adapted()), Reduced(mean=zeros, count=1))
    for one in LAYERS:
        assert not after.tensors[f"{one}/R"].any()
        assert close(after.tensors[f"{one}/B"].T @ after.tensors[f"{one}/B"], torch.eye(R), 1e-6)
        assert close(after.tensors[f"{one}/A"] @ after.tensors[f"{one}/A"].T, torch.eye(R), 1e-6)


HEADS, RAVAN_S = 3, 2.0
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
        change += RAVAN_S * scales[head] * fixed["B"][:, part] @ cores[head] @ fixed["A"][part]
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
                        inner = RAVAN_S * fixed[one]["B"][:, part].T @ dense[one] @ fixed[one]["A"][part].T
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
        require_state(made, head)
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
