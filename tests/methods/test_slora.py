"""SLoRA's two stages and LoRA-A2 against masked gradient descent by hand, on dense weights."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedspan.core.parametrization import draw_entries
from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import Reduced
from fedspan.methods.lora_a2 import LoRAA2
from fedspan.methods.slora import SLoRA
from fedspan.training.jobs import Assignment
from helpers.dense_rounds import factor_mean, require_state
from helpers.toys.oracle import Pairs, average, copied, descend, pair_gradients
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
        trained = dict[str, Pairs]()
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
                trained[id] = copied(pairs)
                descend(problem, id, W0, own_head, trained[id], S, LR, STEPS)
                models.append((shares[id], own_head))
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
            pairs = factor_mean(trained, shares)
        for one in LAYERS:
            second = number + 1 >= sparse_rounds
            assert federation.state.generation == int(second)
            expected = W0[one] + S * pairs[one]["B"] @ pairs[one]["A"] if second else W[one]
            assert close(federation.get_weight(one), expected)
        require_state(federation, head)


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


A2_LR, SCALING, A2_R, A2_STEPS = 0.1, 2.0, 4, 3
RANKS = {"client-0": 1, "client-1": 2, "client-2": 3, "client-3": 1}


def _federation(problem: Problem, **changes: object) -> Federation:
    method = LoRAA2(spec=problem.adapted().spec, seed=2, r=A2_R, lora_alpha=SCALING * A2_R, b_lr_scale=5.0)
    return Federation(with_extras(method, "frozen"), problem, sgd(A2_LR, epochs=A2_STEPS, **changes), ranks=RANKS)


def _norms(pairs: Pairs, layer: str, slot: str) -> Tensor:
    return pairs[layer][slot].square().sum(0 if slot == "B" else 1).sqrt()


def _selected(before: Pairs, after: Pairs, slot: str, rank: int) -> dict[str, set[int]]:
    """The rank * layers slots of greatest importance, over all layers."""
    other = "A" if slot == "B" else "B"
    change = {one: {slot: after[one][slot] - before[one][slot]} for one in LAYERS}
    scores = {
        (one, j): float((_norms(change, one, slot) * _norms(before, one, other))[j])
        for one in LAYERS
        for j in range(A2_R)
    }
    best = sorted(scores, key=lambda key: -scores[key])[: rank * len(LAYERS)]
    return {one: {j for layer, j in best if layer == one} for one in LAYERS}


def _masked(value: Tensor, slots: set[int], slot: str) -> Tensor:
    result = torch.zeros_like(value)
    for j in slots:
        if slot == "B":
            result[:, j] = value[:, j]
        else:
            result[j] = value[j]
    return result


def test_probe_selection_masks_and_aggregation_match_the_oracle() -> None:
    problem = Problem()
    federation = _federation(problem)
    W, head = problem.to_dense(*LAYERS), problem.to_dense(*HEAD)
    server = {one: {s: federation.state.tensors[join_tensor_name(one, s)].double() for s in "AB"} for one in LAYERS}
    for number in range(4):
        slot, lr = ("B", 5 * A2_LR) if number % 2 == 0 else ("A", A2_LR)
        federation.round()
        shares = problem.shares(problem.client_ids)
        moved = {one: torch.zeros_like(server[one][slot]) for one in LAYERS}
        for id in problem.client_ids:
            probed = copied(server)
            descend(problem, id, W, head, probed, SCALING, lr, steps=1, train=slot, train_head=False)
            selected = _selected(server, probed, slot, RANKS[id])
            mine = copied(server)
            for _ in range(A2_STEPS):
                gradients, _ = pair_gradients(problem, id, W, head, mine, SCALING)
                for one in LAYERS:
                    mine[one][slot] = mine[one][slot] - lr * _masked(gradients[one][slot], selected[one], slot)
            reply = federation.replies[id].tensors
            for one in LAYERS:
                assert set(reply[join_tensor_name(one, "slots")].tolist()) == selected[one]
                moved[one] += shares[id] * (mine[one][slot] - server[one][slot])
            travelled = sum(reply[join_tensor_name(one, "d" + slot)].shape[1 if slot == "B" else 0] for one in LAYERS)
            assert travelled == RANKS[id] * len(LAYERS)
        for one in LAYERS:
            server[one][slot] = server[one][slot] + moved[one]
            for s in "AB":
                assert close(federation.state.tensors[join_tensor_name(one, s)], server[one][s])
            assert close(federation.get_weight(one), W[one] + SCALING * server[one]["B"] @ server[one]["A"])
    assert {len(value) for value in selected.values()} != {RANKS["client-3"]}  # the budget is one over all layers


def test_clipping_sees_only_what_trains() -> None:
    problem = Problem(clients=1)
    federation = _federation(problem, max_grad_norm=1e-3)
    job = federation.job("client-0")
    name = join_tensor_name("fc2", "B")
    masks = {n: torch.zeros_like(job.tensors[n]) for n in job.trainable_names}
    masks[name][:, 0] = 1.0
    masked = federation.engine.train(
        Assignment("client-0", 0, replace(job, masks=masks, steps=1, epochs=None), problem.indices["client-0"], 1.0),
        problem.examples,
    )
    moved = masked.tensors[name] - job.tensors[name]
    # One step of SGD at lr 5 (b_lr_scale) along a gradient that was clipped to norm 1e-3.
    assert abs(float(moved.norm()) - 5e-3) < 1e-6


def test_the_head_does_not_train_in_a_probe() -> None:
    problem = Problem(clients=1)
    method = LoRAA2(spec=problem.adapted().spec, seed=2, r=A2_R, lora_alpha=SCALING * A2_R)
    everything = dict.fromkeys(problem.client_ids, A2_R)
    federation = Federation(with_extras(method), problem, sgd(A2_LR, epochs=A2_STEPS), ranks=everything)
    W, head = problem.to_dense(*LAYERS), problem.to_dense(*HEAD)
    mine = {one: {s: federation.state.tensors[join_tensor_name(one, s)].double() for s in "AB"} for one in LAYERS}
    federation.round()
    for _ in range(A2_STEPS):
        gradients, by_head = pair_gradients(problem, "client-0", W, head, mine, SCALING)
        for one in LAYERS:
            mine[one]["B"] = mine[one]["B"] - 5 * A2_LR * gradients[one]["B"]
        head = {name: head[name] - A2_LR * by_head[name] for name in HEAD}
    require_state(federation, head)


def test_a_client_sends_as_many_slots_as_its_budget_and_never_more_than_there_are() -> None:
    """Elements up: budget * layers columns of B, and where they stand; down: the factor that changed last."""
    problem = Problem()
    ranks = {"client-0": 1, "client-1": 3, "client-2": 4, "client-3": 9}
    method = LoRAA2(spec=problem.adapted().spec, r=A2_R)
    federation = Federation(with_extras(method, "frozen"), problem, sgd(A2_LR, epochs=1), ranks=ranks)
    for number in range(3):
        federation.round()
        for id, rank in ranks.items():
            down, up = federation.elements[id]
            slots = sum(len(federation.replies[id].tensors[join_tensor_name(one, "slots")]) for one in LAYERS)
            assert slots == min(rank, A2_R) * len(LAYERS)
            if rank >= A2_R:  # all are chosen, so that it does not matter which
                assert (down, up) == federation.declare_claims(id, number)
