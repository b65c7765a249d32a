"""HetLoRA against a hand-written loop with the penalty's gradient written out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedspan.core.tensors import tensor_name

from .hetlora import RANK, HetLoRA
from .oracle import Pairs, pair_gradients
from .problem import HEAD, LAYERS, Problem
from .rounds import Federation, close, sgd, with_extras

LR, ALPHA, R_MAX, STRENGTH, STEPS = 0.2, 4.0, 4, 0.3, 3


def _penalty_gradients(pair: dict[str, Tensor], first: int) -> dict[str, Tensor]:
    """d/dB of lambda ||B[:, g:]|| ||A[g:]|| is lambda ||A[g:]|| B[:, g:] / ||B[:, g:]||, and the like for A."""
    tail_B, tail_A = pair["B"][:, first:], pair["A"][first:]
    norm_B, norm_A = tail_B.square().sum().sqrt(), tail_A.square().sum().sqrt()
    gradients = {"B": torch.zeros_like(pair["B"]), "A": torch.zeros_like(pair["A"])}
    if norm_B > 0:  # else the subgradient 0
        gradients["B"][:, first:] = STRENGTH * norm_A * tail_B / norm_B
        gradients["A"][first:] = STRENGTH * norm_B * tail_A / norm_A
    return gradients


def _product(pairs: Pairs, first: int) -> float:
    return sum(float(pair["B"][:, first:].norm() * pair["A"][first:].norm()) for pair in pairs.values())


def test_pruning_padding_and_sparsity_weights_match_the_oracle() -> None:
    problem = Problem()
    ranks = {"client-0": 1, "client-1": 2, "client-2": 4, "client-3": 4}
    method = HetLoRA(spec=problem.adapted().spec, seed=1, r=R_MAX, lora_alpha=ALPHA, strength=STRENGTH, gamma=0.5)
    federation = Federation(with_extras(method), problem, sgd(LR, steps=STEPS), ranks=ranks, lora_alpha=ALPHA)
    W, head = problem.dense(*LAYERS), problem.dense(*HEAD)
    server = {one: {s: federation.state.tensors[tensor_name(one, s)].double() for s in "AB"} for one in LAYERS}
    pruned = 0
    for _ in range(4):
        federation.round()
        padded, heads, weights = {}, {}, {}
        for id, rank in list(ranks.items()):
            first, scaling = rank // 2, ALPHA / rank
            mine = {one: {"A": server[one]["A"][:rank], "B": server[one]["B"][:, :rank]} for one in LAYERS}
            before, own_head = _product(mine, first), dict(head)
            for _ in range(STEPS):
                gradients, by_head = pair_gradients(problem, id, W, own_head, mine, scaling)
                for one in LAYERS:
                    extra = _penalty_gradients(mine[one], first) if first else {"A": 0.0, "B": 0.0}
                    mine[one] = {s: mine[one][s] - LR * (gradients[one][s] + extra[s]) for s in "AB"}
                own_head = {name: own_head[name] - LR * by_head[name] for name in HEAD}
            if first and _product(mine, first) < before:
                ranks[id] = first
                pruned += 1
                mine = {one: {"A": mine[one]["A"][:first], "B": mine[one]["B"][:, :first]} for one in LAYERS}
            scaling = ALPHA / ranks[id]
            weights[id] = math.sqrt(sum(float((scaling * p["B"] @ p["A"]).square().sum()) for p in mine.values()))
            padded[id] = {one: {s: torch.zeros_like(server[one][s]) for s in "AB"} for one in LAYERS}
            for one in LAYERS:
                padded[id][one]["A"][: ranks[id]] = mine[one]["A"]
                padded[id][one]["B"][:, : ranks[id]] = mine[one]["B"]
            heads[id] = own_head
        total = sum(weights.values())
        for one in LAYERS:
            for s in "AB":
                server[one][s] = sum(
                    (weights[id] / total * padded[id][one][s] for id in ranks), torch.zeros_like(server[one][s])
                )
                assert close(federation.state.tensors[tensor_name(one, s)], server[one][s])
        head = {
            name: sum((weights[id] / total * heads[id][name] for id in ranks), torch.zeros_like(head[name]))
            for name in HEAD
        }
        for id, rank in ranks.items():
            assert federation.state.scalars[f"{RANK}/{id}"] == rank
            assert federation.job(id).tensors[tensor_name("fc1", "A")].shape == (rank, 5)
            scaled = ALPHA / rank * server["fc1"]["B"][:, :rank] @ server["fc1"]["A"][:rank]
            assert close(federation.weight("fc1", id), W["fc1"] + scaled)
    assert pruned >= 2
