"""FLoRG against dense Gram matrices, their eigendecomposition and the chain rule by hand."""

from __future__ import annotations

import torch

from fedspan.core.tensors import tensor_name

from .florg import FLoRG
from .oracle import average
from .problem import HEAD, LAYERS, Problem
from .rounds import Federation, close, sgd, with_extras

LR, STEPS = 0.2, 2


def _method(problem: Problem) -> FLoRG:
    return FLoRG(spec=problem.adapted().spec, seed=11, r=2)


def test_rounds_match_dense_gram_matrices() -> None:
    problem = Problem()
    method = _method(problem)
    federation = Federation(with_extras(method), problem, sgd(LR, steps=STEPS))
    W, head = problem.dense(*LAYERS), problem.dense(*HEAD)
    bases = {layer.name: tuple(basis.double() for basis in method.bases(layer)) for layer in method.spec.layers}
    A = {layer: federation.state.tensors[tensor_name(layer, "A")].double() for layer in LAYERS}

    for members in [(0, 1, 2, 3), (0, 2, 3), (0, 1, 2, 3)]:
        cohort = [problem.client_ids[member] for member in members]
        federation.round(cohort)
        shares = problem.shares(cohort)
        trained = {}
        for id in cohort:
            mine, my_head = dict(A), dict(head)
            for _ in range(STEPS):
                full = {one: W[one] + bases[one][0] @ mine[one].T @ mine[one] @ bases[one][1] for one in LAYERS}
                dense = problem.gradients(id, {**full, **my_head})
                for one in LAYERS:
                    H = bases[one][0].T @ dense[one] @ bases[one][1].T  # gradient by A^T A
                    mine[one] = mine[one] - LR * mine[one] @ (H + H.T)
                my_head = {name: my_head[name] - LR * dense[name] for name in HEAD}
            trained[id] = mine, my_head
        head = average((shares[id], own) for id, (_, own) in trained.items())
        for one in LAYERS:
            Q = sum((shares[id] * mine[one].T @ mine[one] for id, (mine, _) in trained.items()), torch.zeros(()))
            eigenvalues, eigenvectors = torch.linalg.eigh(Q)
            assert eigenvalues.min() > 1e-8  # full rank, so that A~ is well defined in float64
            A_tilde = eigenvalues.sqrt()[:, None] * eigenvectors.T
            U, _, Vt = torch.linalg.svd(A[one] @ A_tilde.T, full_matrices=False)
            A[one] = U @ Vt @ A_tilde
            assert close(federation.state.tensors[tensor_name(one, "A")], A[one])
            change = bases[one][0] @ A[one].T @ A[one] @ bases[one][1]
            assert close(federation.weight(one), W[one] + change)
        for name in HEAD:
            assert close(federation.state.tensors[f"extras/{name}"], head[name])


def test_bases_are_orthonormal_and_never_travel() -> None:
    problem = Problem()
    method = _method(problem)
    for layer in method.spec.layers:
        L, R = method.bases(layer)
        assert close(L.T @ L, torch.eye(L.shape[1]), 1e-6)
        assert close(R @ R.T, torch.eye(R.shape[0]), 1e-6)
    federation = Federation(with_extras(method), problem, sgd(LR))
    for number in range(2):
        federation.round()
        for id in problem.client_ids:
            assert federation.elements[id] == federation.declared(id, number) == (2 * (5 + 6), 2 * (5 + 6))


def test_alignment_keeps_the_factor_close_to_its_predecessor() -> None:
    """What Procrustes is for: with identical replies A~ is a rotation of A, and the rotation is undone."""
    problem = Problem(clients=3)
    method = _method(problem)
    federation = Federation(with_extras(method), problem, sgd(lr=0.0))
    before = {layer: federation.state.tensors[tensor_name(layer, "A")] for layer in LAYERS}
    federation.round()
    for layer in LAYERS:
        assert close(federation.state.tensors[tensor_name(layer, "A")], before[layer])
