"""SLoRA's two stages against dense weights: masked gradient descent, a truncated SVD by hand, then FedIT."""

import pytest
import torch
from torch import Tensor

from fedspan.core.parametrization import draw_entries
from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import Reduced
from fedspan.methods.slora import SLoRA
from helpers.toys.oracle import Pairs, average, copied, descend
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Federation, close, sgd, with_extras

LR, STEPS, R, S, SEED, DENSITY = 0.2, 2, 2, 1.5, 4, 0.3
SHAPES = {"fc1": (8, 5), "fc2": (6, 8)}
COHORTS = [(0, 1, 2, 3), (1, 2), (0, 3), (0, 1, 2), (2, 3)]


def _mask(one: str) -> Tensor:
    """1 where an entry trains."""
    mask = torch.zeros(SHAPES[one], dtype=torch.float64)
    for position in draw_entries(SHAPES[one], DENSITY, SEED, one).tolist():
        mask[position // SHAPES[one][1], position % SHAPES[one][1]] = 1.0
    return mask


@pytest.mark.parametrize("lr_scale", [1.0, 0.25])
@pytest.mark.parametrize("sparse_rounds", [1, 2, 3])
def test_matches_a_dense_oracle(sparse_rounds: int, lr_scale: float) -> None:
    problem = Problem()
    method = SLoRA(
        spec=problem.adapted().spec,
        seed=SEED,
        r=R,
        lora_alpha=S * R,
        sparse_rounds=sparse_rounds,
        density=DENSITY,
        sparse_lr_scale=lr_scale,
    )
    training = sgd(LR, steps=STEPS)
    federation = Federation(with_extras(method), problem, training, ranks=None, lora_alpha=S * R)
    W0, head = problem.to_dense(*LAYERS), problem.to_dense(*HEAD)
    W, pairs = dict(W0), Pairs()
    for number, positions in enumerate(COHORTS):
        cohort = [problem.client_ids[position] for position in positions]
        federation.round(cohort)
        shares, models = problem.shares(cohort), list[tuple[float, dict[str, Tensor]]]()
        for id in cohort:
            own_head = dict(head)
            if number < sparse_rounds:
                own = dict(W)
                for _ in range(STEPS):
                    dense = problem.gradients(id, {**own, **own_head})
                    own = {one: own[one] - LR * lr_scale * _mask(one) * dense[one] for one in LAYERS}
                    own_head = {name: own_head[name] - LR * dense[name] for name in HEAD}
                models.append((shares[id], {**own, **own_head}))
            else:
                mine = copied(pairs)
                descend(problem, id, W0, own_head, mine, S, LR, STEPS)
                flat = {join_tensor_name(one, slot): mine[one][slot] for one in LAYERS for slot in "AB"}
                models.append((shares[id], {**flat, **own_head}))
        mean = average(models)
        head = {name: mean[name] for name in HEAD}
        if number < sparse_rounds:
            W = {one: mean[one] for one in LAYERS}
        if number + 1 == sparse_rounds:
            for one in LAYERS:
                U, sigma, Vt = torch.linalg.svd(W[one] - W0[one], full_matrices=False)
                kept = (U[:, :R] * sigma[:R]) @ Vt[:R]
                A, B = (federation.state.tensors[join_tensor_name(one, slot)] for slot in "AB")
                assert close(S * B @ A, kept)
                assert close(A @ A.T, torch.eye(R).double())  # all of the singular values stand in B
                assert (W[one] - W0[one] - kept).norm() > 1e-3  # the cut loses something here
                assert not federation.state.base.moved  # W0 again
                pairs[one] = {"A": A.double(), "B": B.double()}
        elif number >= sparse_rounds:
            pairs = {one: {slot: mean[join_tensor_name(one, slot)] for slot in "AB"} for one in LAYERS}
        for one in LAYERS:
            second = number + 1 >= sparse_rounds
            expected = W0[one] + S * pairs[one]["B"] @ pairs[one]["A"] if second else W[one]
            assert close(federation.get_weight(one), expected)
        for name in HEAD:
            assert close(federation.state.tensors[f"extras/{name}"], head[name])


def test_only_masked_values_are_transmitted_and_only_they_move() -> None:
    problem = Problem()
    method = SLoRA(spec=problem.adapted().spec, seed=SEED, r=R, sparse_rounds=2, density=DENSITY)
    federation = Federation(with_extras(method), problem, sgd(LR))
    for number in range(4):
        federation.round()
        for id, reply in federation.replies.items():
            slots = {name.partition("/")[2] for name in reply.tensors} - set(HEAD)
            assert slots == ({"values"} if number < 2 else {"A", "B"})
            assert federation.elements[id] == federation.declare_claims(id, number)
        if number == 0:
            assert federation.elements["client-0"] == (0, round(0.3 * 40) + round(0.3 * 48))
            for one in LAYERS:
                moved = federation.get_weight(one) - problem.to_dense(one)[one] != 0
                assert torch.equal(moved.double(), _mask(one))


def test_a_first_stage_that_changed_nothing_is_no_dead_end() -> None:
    """B = 0 and A orthonormal, as LoRA begins: with both at 0 nothing would ever train."""
    problem = Problem()
    method = SLoRA(spec=problem.adapted().spec, r=R, sparse_rounds=1, density=DENSITY)
    state = method.init(problem.adapted())
    after = method.update(state, Reduced(mean=state.tensors, count=1))
    for one in LAYERS:
        assert not after.tensors[f"{one}/B"].any()
        assert close(after.tensors[f"{one}/A"] @ after.tensors[f"{one}/A"].T, torch.eye(R), 1e-6)
