"""pFedLoRA's two variants against hand-written gradient descent on dense weights."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from fedspan.core.tensors import tensor_name

from .pfedlora import PFedLoRA
from .pfedloru import personal_pair
from .problem import HEAD, LAYERS, Problem
from .rounds import Federation, close, sgd, with_extras

LR, PERSONAL_SCALING = 0.2, 0.5
Weights = dict[str, Tensor]


def _descend(problem: Problem, id: str, weights: Weights, own: Weights, steps: int, train: str) -> None:
    """Gradient descent, in place, on the pair (``train`` holds L and U), the dense weight (W) or both; and the head."""
    for _ in range(steps):
        effective = {one: weights[one] + PERSONAL_SCALING * own[f"{one}/L"] @ own[f"{one}/U"] for one in LAYERS}
        dense = problem.gradients(id, {**effective, **{name: weights[name] for name in HEAD}})
        for one in LAYERS:
            L, U, G = own[f"{one}/L"], own[f"{one}/U"], dense[one]
            if "L" in train:
                own[f"{one}/L"] = L - LR * PERSONAL_SCALING * G @ U.T
                own[f"{one}/U"] = U - LR * PERSONAL_SCALING * L.T @ G
            if "W" in train:
                weights[one] = weights[one] - LR * G
        for name in HEAD:
            weights[name] = weights[name] - LR * dense[name]


@pytest.mark.parametrize("variant", [1, 2])
def test_matches_a_dense_oracle(variant: Literal[1, 2]) -> None:
    problem = Problem()
    method = PFedLoRA(
        spec=problem.adapted().spec, seed=5, variant=variant, personal_r=2, personal_scaling=PERSONAL_SCALING
    )
    federation = Federation(with_extras(method), problem, sgd(LR))
    server = problem.dense()
    personal: dict[str, Weights] = {}
    for id, party in federation.parties.items():
        pair = personal_pair(method.spec, 2, 5, party.client)
        personal[id] = {name: value.double() for name, value in pair.items()}

    for members in [(0, 1, 2), (1, 3), (0, 1, 2, 3)]:
        cohort = [problem.client_ids[member] for member in members]
        federation.round(cohort)
        shares = problem.shares(cohort)
        after = {name: torch.zeros_like(value) for name, value in server.items()}
        for id in cohort:
            mine = dict(server)
            if variant == 1:
                _descend(problem, id, mine, personal[id], steps=2, train="LU")
                _descend(problem, id, mine, personal[id], steps=3, train="W")
            else:
                _descend(problem, id, mine, personal[id], steps=5, train="WLU")
            for name in after:
                after[name] += shares[id] * mine[name]
        server = after

        for one in LAYERS:
            assert close(federation.state.tensors[tensor_name(one, "W")], server[one])
            for id, party in federation.parties.items():
                if party.memory:
                    assert close(party.memory[f"{one}/L"], personal[id][f"{one}/L"])
                    assert close(party.memory[f"{one}/U"], personal[id][f"{one}/U"])
                own = PERSONAL_SCALING * personal[id][f"{one}/L"] @ personal[id][f"{one}/U"]
                assert close(federation.weight(one, id), server[one] + own)
            assert close(federation.weight(one), server[one])  # the global model has no personal part
        for name in HEAD:
            assert close(federation.state.tensors[f"extras/{name}"], server[name])
