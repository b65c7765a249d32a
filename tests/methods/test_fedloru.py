"""FedLoRU against dense weights that are moved by hand; both of its forms, and pre-training from zeros."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspan.core.base import to_dense
from fedspan.core.lowrank import LowRank
from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import Client, Reduced, ServerState
from fedspan.errors import FedspanError
from fedspan.methods.fedloru import FedLoRU
from helpers.toys.oracle import Pairs, average, copied, descend
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Federation, close, sgd, with_extras

LR, SCALING, STEPS = 0.2, 2.0, 2
COHORTS = [(0, 1, 2, 3), (1, 2), (0, 2, 3), (0, 1), (0, 1, 2, 3)]  # clients 0 and 3 miss the first accumulation


def _pairs(method: FedLoRU, accumulations: int) -> Pairs:
    fresh = method.create_factors(accumulations)
    return {one: {slot: fresh[join_tensor_name(one, slot)].double() for slot in "AB"} for one in LAYERS}


def _method(problem: Problem, **options: object) -> FedLoRU:
    return FedLoRU(spec=problem.adapted().spec, seed=3, r=2, lora_alpha=4.0, **options)


@pytest.mark.parametrize("from_scratch", [False, True])
@pytest.mark.parametrize("tau", [1, 2, 3])
def test_matches_a_dense_oracle(tau: int, from_scratch: bool) -> None:
    problem = Problem()
    method = _method(problem, tau=tau, from_scratch=from_scratch)
    federation = Federation(with_extras(method), problem, sgd(LR, steps=STEPS))
    W, head = problem.to_dense(*LAYERS), problem.to_dense(*HEAD)
    if from_scratch:
        W = {one: torch.zeros_like(value) for one, value in W.items()}
    pairs, accumulations = _pairs(method, 0), 0
    assert all(bool(pair["B"].any()) == from_scratch for pair in pairs.values())
    for number, positions in enumerate(COHORTS):
        cohort = [problem.client_ids[position] for position in positions]
        federation.round(cohort)
        shares, models = problem.shares(cohort), list[tuple[float, dict[str, Tensor]]]()
        for id in cohort:
            mine, my_head = copied(pairs), dict(head)
            descend(problem, id, W, my_head, mine, SCALING, LR, STEPS)
            flat = {join_tensor_name(one, slot): mine[one][slot] for one in LAYERS for slot in "AB"}
            models.append((shares[id], {**flat, **my_head}))
        mean = average(models)
        head = {name: mean[name] for name in HEAD}
        pairs = {one: {slot: mean[join_tensor_name(one, slot)] for slot in "AB"} for one in LAYERS}
        if (number + 1) % tau == 0:
            accumulations += 1
            W = {one: W[one] + SCALING * pairs[one]["B"] @ pairs[one]["A"] for one in LAYERS}
            pairs = _pairs(method, accumulations)
            assert not any(pair["B"].any() for pair in pairs.values())  # also from scratch: the weight must not jump
        for one in LAYERS:
            expected = W[one] + SCALING * pairs[one]["B"] @ pairs[one]["A"]
            assert close(federation.get_weight(one), expected)
            for id in cohort:  # each holds a base of its own, from its patches alone
                held = federation.parties[id].base
                assert held.rho == (0.0 if from_scratch else 1.0)
        for name in HEAD:
            assert close(federation.state.tensors[f"extras/{name}"], head[name])
        for id in cohort:
            loss = problem.loss(id, {**{one: federation.get_weight(one) for one in LAYERS}, **head})
            assert abs(federation.loss(id) - float(loss)) < 1e-6  # predictions come back in float32


def test_from_scratch_the_pretrained_target_weights_take_no_part() -> None:
    """Other seeds of W0, the rest of the model alike: the same bits; and the zeros are transmitted as a scalar."""
    states = []
    for scale in (1.0, -3.0):
        problem = Problem()
        for one in LAYERS:
            problem.parameters[f"{one}.weight"] *= scale
        federation = Federation(with_extras(_method(problem, tau=2, from_scratch=True)), problem, sgd(LR))
        for number in range(3):
            federation.round()
            for id in problem.client_ids:
                assert federation.elements[id] == federation.declare_claims(id, number)
        states.append(federation.state)
    assert states[0].tensors.keys() == states[1].tensors.keys()
    for name, value in states[0].tensors.items():
        assert torch.equal(value, states[1].tensors[name])


def test_from_scratch_needs_a_base_that_can_be_scaled() -> None:
    """In bf16 nobody writes into W0, so it cannot be taken away either."""
    problem = Problem()
    adapted = problem.adapted()
    adapted.model.to(torch.bfloat16)
    state = _method(problem, from_scratch=True).init(adapted)
    with pytest.raises(FedspanError, match=r"model\.dtype"):
        adapted.set_base(state.base)


def _update(method: FedLoRU, state: ServerState, seed: int) -> tuple[ServerState, dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    mean = {name: torch.randn(value.shape, generator=rng) for name, value in state.tensors.items()}
    return method.update(state, Reduced(mean=mean, count=1)), mean


def test_the_fine_tuning_form_s_list_of_pairs_is_there_until_it_outgrows_the_weight() -> None:
    """fc1 is 8 x 5: one pair of rank 2 has 26 elements, two have 52, more than 40. fc2 is 6 x 8: 28, 56, 48."""
    problem = Problem()
    for r, kept in ((1, 3), (2, 1)):
        method = replace(_method(problem, tau=1), r=r)
        state, pairs = method.init(problem.adapted()), list[dict[str, Tensor]]()
        for number in range(4):
            state, mean = _update(method, state, number)
            pairs.append(mean)
            for one in LAYERS:
                total, scaling = state.base.total[one], method.get_scaling(None)
                expected = sum(scaling * past[f"{one}/B"].double() @ past[f"{one}/A"].double() for past in pairs)
                assert close(to_dense(total), expected, 1e-6)
                assert isinstance(total, LowRank) == (number < kept)
                if isinstance(total, LowRank):
                    for index, past in enumerate(pairs):
                        rows = slice(index * r, (index + 1) * r)
                        assert torch.equal(total.A[rows], past[f"{one}/A"])
                        assert torch.equal(total.B[:, rows], scaling * past[f"{one}/B"])


def test_neither_form_writes_into_a_narrow_weight() -> None:
    problem = Problem()
    adapted = problem.adapted()
    adapted.model.to(torch.bfloat16)
    before = {one: adapted.layers[one].get_original().clone() for one in LAYERS}
    method = _method(problem, tau=1)
    state = method.init(adapted)
    for number in range(3):
        state, _ = _update(method, state, number)
        adapted.set_base(state.base)
        for one in LAYERS:
            assert torch.equal(adapted.layers[one].stored_weight, before[one])


@given(tau=st.integers(1, 4), absent=st.integers(0, 9), from_scratch=st.booleans())
@settings(max_examples=30, deadline=None)
def test_whoever_was_away_is_sent_no_more_than_it_misses(tau: int, absent: int, from_scratch: bool) -> None:
    """Held since ``absent`` of ten rounds: the accumulations after it, or the whole total where that is smaller."""
    problem = Problem(clients=1)
    method = _method(problem, tau=tau, from_scratch=from_scratch)
    state = method.init(problem.adapted())
    for number in range(10):
        state, _ = _update(method, state, number)
    missed = 10 // tau - absent // tau
    patch = method.sync(state, Client("late", 2, SCALING, 1, 1.0, last_round=absent)).base
    if not missed:
        assert patch is None
        return
    whole = sum(delta.numel() for delta in state.base.total.values())
    one_pair = sum(2 * sum(layer.shape) for layer in method.spec.layers)
    assert patch.numel() == min(whole, missed * one_pair)
