"""LoRA-A2 against masked gradient descent by hand."""

from dataclasses import replace

import torch
from torch import Tensor

from fedspan.core.tensors import join_tensor_name
from fedspan.methods.lora_a2 import LoRAA2
from fedspan.training.jobs import Assignment
from helpers.toys.oracle import Pairs, copied, descend, pair_gradients
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Federation, close, sgd, with_extras

LR, SCALING, R, STEPS = 0.1, 2.0, 4, 3
RANKS = {"client-0": 1, "client-1": 2, "client-2": 3, "client-3": 1}


def _federation(problem: Problem, **changes: object) -> Federation:
    method = LoRAA2(spec=problem.adapted().spec, seed=2, r=R, lora_alpha=SCALING * R, b_lr_scale=5.0)
    return Federation(with_extras(method, "frozen"), problem, sgd(LR, epochs=STEPS, **changes), ranks=RANKS)


def _norms(pairs: Pairs, layer: str, slot: str) -> Tensor:
    return pairs[layer][slot].square().sum(0 if slot == "B" else 1).sqrt()


def _selected(before: Pairs, after: Pairs, slot: str, rank: int) -> dict[str, set[int]]:
    """The rank * layers slots of greatest importance, over all layers."""
    other = "A" if slot == "B" else "B"
    change = {one: {slot: after[one][slot] - before[one][slot]} for one in LAYERS}
    scores = {
        (one, j): float((_norms(change, one, slot) * _norms(before, one, other))[j]) for one in LAYERS for j in range(R)
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
        slot, lr = ("B", 5 * LR) if number % 2 == 0 else ("A", LR)
        federation.round()
        shares = problem.shares(problem.client_ids)
        moved = {one: torch.zeros_like(server[one][slot]) for one in LAYERS}
        for id in problem.client_ids:
            probed = copied(server)
            descend(problem, id, W, head, probed, SCALING, lr, steps=1, train=slot, train_head=False)
            selected = _selected(server, probed, slot, RANKS[id])
            mine = copied(server)
            for _ in range(STEPS):
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
    method = LoRAA2(spec=problem.adapted().spec, seed=2, r=R, lora_alpha=SCALING * R)
    everything = dict.fromkeys(problem.client_ids, R)
    federation = Federation(with_extras(method), problem, sgd(LR, epochs=STEPS), ranks=everything)
    W, head = problem.to_dense(*LAYERS), problem.to_dense(*HEAD)
    mine = {one: {s: federation.state.tensors[join_tensor_name(one, s)].double() for s in "AB"} for one in LAYERS}
    federation.round()
    for _ in range(STEPS):
        gradients, by_head = pair_gradients(problem, "client-0", W, head, mine, SCALING)
        for one in LAYERS:
            mine[one]["B"] = mine[one]["B"] - 5 * LR * gradients[one]["B"]
        head = {name: head[name] - LR * by_head[name] for name in HEAD}
    for name in HEAD:
        assert close(federation.state.tensors[f"extras/{name}"], head[name])


def test_a_client_sends_as_many_slots_as_its_budget_and_never_more_than_there_are() -> None:
    """Elements up: budget * layers columns of B, and where they stand; down: the factor that changed last."""
    problem = Problem()
    ranks = {"client-0": 1, "client-1": 3, "client-2": 4, "client-3": 9}
    method = LoRAA2(spec=problem.adapted().spec, r=R)
    federation = Federation(with_extras(method, "frozen"), problem, sgd(LR, epochs=1), ranks=ranks)
    for number in range(3):
        federation.round()
        for id, rank in ranks.items():
            down, up = federation.elements[id]
            slots = sum(len(federation.replies[id].tensors[join_tensor_name(one, "slots")]) for one in LAYERS)
            assert slots == min(rank, R) * len(LAYERS)
            if rank >= R:  # all are chosen, so that it does not matter which
                assert (down, up) == federation.declare_claims(id, number)
