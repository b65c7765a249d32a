"""FedHM against dense weights, truncated by hand for every client's rank."""

from __future__ import annotations

import torch

from fedspan.core.tensors import tensor_name

from .fedhm import FedHM
from .oracle import average
from .problem import HEAD, LAYERS, Problem
from .rounds import Federation, close, sgd, with_extras

LR, STEPS = 0.2, 3
RANKS = {"client-0": 1, "client-1": 2, "client-2": 4, "client-3": 6}  # more than fc1's 5 singular values


def test_ranks_of_their_own_average_in_dense_space() -> None:
    problem = Problem()
    method = FedHM(spec=problem.adapted().spec)
    federation = Federation(with_extras(method), problem, sgd(LR, steps=STEPS), ranks=RANKS)
    # The server's SVD of round 0 is that of W0 in float32: start from the same factors.
    factors = {name: value.double() for name, value in federation.state.memory.items()}
    head = problem.dense(*HEAD)
    for number in range(3):
        federation.round()
        shares = problem.shares(problem.client_ids)
        products, heads = {}, {}
        for id, rank in RANKS.items():
            U = {one: factors[f"{one}/U"][:, :rank] for one in LAYERS}
            V = {one: factors[f"{one}/V"][:rank] for one in LAYERS}
            own_head = dict(head)
            for _ in range(STEPS):
                dense = problem.gradients(id, {**{one: U[one] @ V[one] for one in LAYERS}, **own_head})
                for one in LAYERS:
                    G = dense[one]
                    U[one], V[one] = U[one] - LR * G @ V[one].T, V[one] - LR * U[one].T @ G
                own_head = {name: own_head[name] - LR * dense[name] for name in HEAD}
            products[id], heads[id] = {one: U[one] @ V[one] for one in LAYERS}, own_head
            assert federation.elements[id] == federation.declared(id, number)
        W = average((shares[id], own) for id, own in products.items())
        head = average((shares[id], own) for id, own in heads.items())
        factors = {}
        for one in LAYERS:
            assert close(federation.state.tensors[tensor_name(one, "W")], W[one])
            assert close(federation.weight(one), W[one])  # the global model is the dense one
            U, S, Vt = torch.linalg.svd(W[one], full_matrices=False)
            factors[f"{one}/U"], factors[f"{one}/V"] = U * S.sqrt(), S.sqrt()[:, None] * Vt
            for id, rank in RANKS.items():
                kept = U[:, :rank] * S[:rank] @ Vt[:rank]  # Eckart-Young: the best of that rank
                assert close(federation.weight(one, id), kept)
                lost = torch.linalg.norm(federation.weight(one, id) - W[one])
                assert torch.isclose(lost, S[rank:].norm(), atol=1e-9)


def test_the_pretrained_weight_takes_no_part() -> None:
    """No frozen base: whatever the module's weight holds, only the factors count."""
    problem = Problem()
    federation = Federation(with_extras(FedHM(spec=problem.adapted().spec)), problem, sgd(LR), ranks=RANKS)
    before = federation.loss("client-1")
    with torch.no_grad():
        for layer in federation.adapted.layers.values():
            layer.stored_weight.fill_(1e6)
    assert federation.loss("client-1") == before
