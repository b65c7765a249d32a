"""Fed-SB against dense weights: the gradient of a round without steps, its SVD by hand, R by the chain rule."""

import pytest
import torch
from torch import Tensor

from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import Reduced
from fedspan.methods.fed_sb import FedSB
from helpers.toys.oracle import average
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Federation, close, sgd, with_extras

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
