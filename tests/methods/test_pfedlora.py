"""pFedLoRA's two variants against hand-written gradient descent on dense weights."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from fedspan.core.factors import draw_personal_pair
from fedspan.core.tensors import join_tensor_name
from fedspan.methods.pfedlora import PFedLoRA
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Federation, close, sgd, with_extras

LR, STEPS, PERSONAL_STEPS, ALPHA = 0.2, 3, 2, 1.5
RANKS = {"client-0": 1, "client-1": 2, "client-2": 3, "client-3": 2}
Weights = dict[str, Tensor]


def _descend(problem: Problem, id: str, weights: Weights, own: Weights, steps: int, train: str) -> None:
    """Gradient descent, in place: on the pair (``train`` holds L and U), on the weight and the head (W), or on all."""
    scaling = ALPHA / RANKS[id]
    for _ in range(steps):
        effective = {one: weights[one] + scaling * own[f"{one}/L"] @ own[f"{one}/U"] for one in LAYERS}
        dense = problem.gradients(id, {**effective, **{name: weights[name] for name in HEAD}})
        for one in LAYERS:
            L, U, G = own[f"{one}/L"], own[f"{one}/U"], dense[one]
            if "L" in train:
                own[f"{one}/L"] = L - LR * scaling * G @ U.T
                own[f"{one}/U"] = U - LR * scaling * L.T @ G
            if "W" in train:
                weights[one] = weights[one] - LR * G
        for name in HEAD if "W" in train else ():
            weights[name] = weights[name] - LR * dense[name]


@pytest.mark.parametrize("variant", [1, 2])
def test_matches_a_dense_oracle(variant: Literal[1, 2]) -> None:
    problem = Problem()
    method = PFedLoRA(spec=problem.adapted().spec, seed=5, variant=variant, personal_epochs=PERSONAL_STEPS)
    training = sgd(LR, epochs=STEPS)
    federation = Federation(with_extras(method), problem, training, ranks=RANKS, lora_alpha=ALPHA)
    server = problem.to_dense()
    personal: dict[str, Weights] = {}
    for id, party in federation.parties.items():
        pair = draw_personal_pair(method, RANKS[id], party.client)
        personal[id] = {name: value.double() for name, value in pair.items()}

    for positions in [(0, 1, 2), (1, 3), (0, 1, 2, 3)]:
        cohort = [problem.client_ids[position] for position in positions]
        federation.round(cohort)
        shares = problem.shares(cohort)
        after = {name: torch.zeros_like(value) for name, value in server.items()}
        for id in cohort:
            mine = dict(server)
            if variant == 1:
                _descend(problem, id, mine, personal[id], steps=PERSONAL_STEPS, train="LU")
                _descend(problem, id, mine, personal[id], steps=STEPS, train="W")
            else:
                _descend(problem, id, mine, personal[id], steps=STEPS, train="WLU")
            for name in after:
                after[name] += shares[id] * mine[name]
        server = after

        for one in LAYERS:
            assert close(federation.state.tensors[join_tensor_name(one, "W")], server[one])
            for id, party in federation.parties.items():
                if party.memory:
                    assert close(party.memory[f"{one}/L"], personal[id][f"{one}/L"])
                    assert close(party.memory[f"{one}/U"], personal[id][f"{one}/U"])
                own = ALPHA / RANKS[id] * personal[id][f"{one}/L"] @ personal[id][f"{one}/U"]
                assert close(federation.get_weight(one, id), server[one] + own)
            assert close(federation.get_weight(one), server[one])  # the global model has no personal part
        for name in HEAD:
            assert close(federation.state.tensors[f"extras/{name}"], server[name])
