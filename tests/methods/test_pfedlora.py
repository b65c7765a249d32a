"""pFedLoRA's variants and pFedLoRU's phases against hand-written gradient descent on dense weights."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from fedspan.core.base import to_dense
from fedspan.core.factors import draw_personal_pair
from fedspan.core.tensors import join_tensor_name
from fedspan.methods.pfedlora import PFedLoRA
from fedspan.methods.pfedloru import PFedLoRU
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


PFEDLORU_LR, TAU, SCALING, PERSONAL_SCALING = 0.3, 2, 2.0, 0.5
PFEDLORU_PERSONAL_STEPS, GLOBAL_STEPS = 2, 3
COHORTS = [(0, 1, 2, 3), (1, 2), (0, 2, 3), (0, 1), (0, 1, 2, 3)]  # client 0 and 3 miss the first accumulation

Pairs = dict[str, dict[str, Tensor]]


def _effective(W: dict[str, Tensor], shared: Pairs, own: Pairs) -> dict[str, Tensor]:
    return {
        layer: W[layer]
        + SCALING * shared[layer]["B"] @ shared[layer]["A"]
        + PERSONAL_SCALING * own[layer]["L"] @ own[layer]["U"]
        for layer in LAYERS
    }


def _descend_phase(problem: Problem, id: str, W: dict, head: dict, shared: Pairs, own: Pairs, personal: bool) -> None:
    """One phase of one client, in place: the chain rule from the dense gradient by hand."""
    for _ in range(PFEDLORU_PERSONAL_STEPS if personal else GLOBAL_STEPS):
        dense = problem.gradients(id, {**_effective(W, shared, own), **head})
        for layer in LAYERS:
            pair, up, down, scale = (
                (own[layer], "L", "U", PERSONAL_SCALING) if personal else (shared[layer], "B", "A", SCALING)
            )
            d_up, d_down = scale * dense[layer] @ pair[down].T, scale * pair[up].T @ dense[layer]
            pair[up], pair[down] = pair[up] - PFEDLORU_LR * d_up, pair[down] - PFEDLORU_LR * d_down
        for name in () if personal else HEAD:  # the head belongs to the global model: it rests in the first phase
            head[name] = head[name] - PFEDLORU_LR * dense[name]


def test_two_phases_personal_memory_and_accumulation_match_a_dense_oracle() -> None:
    problem = Problem()
    method = PFedLoRU(
        spec=problem.adapted().spec,
        seed=3,
        r=2,
        lora_alpha=4.0,
        tau=TAU,
        personal_r=1,
        personal_alpha=PERSONAL_SCALING,
        personal_epochs=PFEDLORU_PERSONAL_STEPS,
    )
    federation = Federation(with_extras(method), problem, sgd(PFEDLORU_LR, epochs=GLOBAL_STEPS))

    W = problem.to_dense(*LAYERS)
    head = problem.to_dense(*HEAD)
    fresh = method.create_factors(0)
    shared = {one: {s: fresh[join_tensor_name(one, s)].double() for s in "AB"} for one in LAYERS}
    personal: dict[str, Pairs] = {}
    for id, party in federation.parties.items():
        pair = draw_personal_pair(method, 1, party.client)
        personal[id] = {one: {s: pair[join_tensor_name(one, s)].double() for s in "LU"} for one in LAYERS}

    accumulations = 0
    for number, positions in enumerate(COHORTS):
        cohort = [problem.client_ids[position] for position in positions]
        federation.round(cohort)
        shares = problem.shares(cohort)
        after = {one: {s: torch.zeros_like(shared[one][s]) for s in "AB"} for one in LAYERS}
        head_after = {name: torch.zeros_like(value) for name, value in head.items()}
        for id in cohort:
            mine, my_head = {one: dict(shared[one]) for one in LAYERS}, dict(head)
            _descend_phase(problem, id, W, my_head, mine, personal[id], personal=True)
            _descend_phase(problem, id, W, my_head, mine, personal[id], personal=False)
            for one in LAYERS:
                for slot in "AB":
                    after[one][slot] += shares[id] * mine[one][slot]
            for name in HEAD:
                head_after[name] += shares[id] * my_head[name]
        shared, head = after, head_after
        if (number + 1) % TAU == 0:
            accumulations += 1
            fresh = method.create_factors(accumulations)
            for one in LAYERS:
                W[one] = W[one] + SCALING * shared[one]["B"] @ shared[one]["A"]
                shared[one] = {slot: fresh[join_tensor_name(one, slot)].double() for slot in "AB"}

        state = federation.state
        for one in LAYERS:
            for slot in "AB":
                assert close(state.tensors[join_tensor_name(one, slot)].double(), shared[one][slot])
            if accumulations:
                assert close(to_dense(state.base.total[one]), W[one] - problem.to_dense(one)[one])
            assert close(federation.get_weight(one), W[one] + SCALING * shared[one]["B"] @ shared[one]["A"])
        for id, party in federation.parties.items():
            for one in LAYERS:
                for slot, value in personal[id][one].items():
                    if party.memory:
                        assert close(party.memory[join_tensor_name(one, slot)], value)
                assert close(federation.get_weight(one, id), _effective(W, shared, personal[id])[one])
            expected = problem.loss(id, {**_effective(W, shared, personal[id]), **head})
            assert abs(federation.loss(id) - float(expected)) < 1e-6  # predictions come back in float32

    assert accumulations == 2
    assert state.base.round == 4


def test_a_lost_reply_advances_neither_memory_nor_base() -> None:
    problem = Problem()
    method = PFedLoRU(spec=problem.adapted().spec, r=2, tau=1)
    federation = Federation(with_extras(method), problem, sgd(PFEDLORU_LR))
    federation.round()
    before = federation.parties["client-1"]
    federation.round(lost=["client-1"])
    assert federation.parties["client-1"] is before
    federation.round()
    assert federation.parties["client-1"].base.round == 2
    for id in problem.client_ids:
        for layer in LAYERS:
            held = to_dense(federation.parties[id].base.total[layer])
            assert torch.equal(held, to_dense(federation.parties["client-1"].base.total[layer]))
