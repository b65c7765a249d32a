"""FedLoRU and mFedLoRU against dense weights moved by hand: forms, pre-training, nested factors by the chain rule."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspan.core.base import to_dense
from fedspan.core.lowrank import LowRank
from fedspan.core.tensors import create_generator, join_tensor_name
from fedspan.core.values import Client, Reduced, ServerState, StackItem
from fedspan.methods.fedloru import FedLoRU
from fedspan.methods.mfedloru import MFedLoRU
from helpers.dense_rounds import factor_mean, require_state
from helpers.refusals import refused
from helpers.toys.oracle import Pairs, average, copied, descend, effective
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Federation, close, sgd, with_extras

LR, SCALING, STEPS = 0.2, 2.0, 2
COHORTS = [(0, 1, 2, 3), (1, 2), (0, 2, 3), (0, 1), (0, 1, 2, 3)]  # clients 0 and 3 miss the first accumulation


def _pairs(method: FedLoRU | MFedLoRU, accumulations: int) -> Pairs:
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
        shares, trained, heads = problem.shares(cohort), dict[str, Pairs](), {id: dict(head) for id in cohort}
        for id in cohort:
            trained[id] = copied(pairs)
            descend(problem, id, W, heads[id], trained[id], SCALING, LR, STEPS)
        head, pairs = average((shares[id], heads[id]) for id in cohort), factor_mean(trained, shares)
        if (number + 1) % tau == 0:
            accumulations += 1
            W = effective(W, pairs, SCALING)
            pairs = _pairs(method, accumulations)
            assert not any(pair["B"].any() for pair in pairs.values())  # also from scratch: the weight must not jump
        for one, expected in effective(W, pairs, SCALING).items():
            assert close(federation.get_weight(one), expected)
            for id in cohort:  # each holds a base of its own, from its patches alone
                held = federation.parties[id].base
                assert held.rho == (0.0 if from_scratch else 1.0)
        require_state(federation, head)
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
    with refused("model.dtype"):
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


NESTED_LR, NESTED_STEPS, TAU, R, ALPHA, NESTED, SEED = 0.2, 3, 2, 3, 4.5, 0.7, 11
S = ALPHA / R
RANKS = {"client-0": 1, "client-1": 3, "client-2": 2, "client-3": 5}  # 3 is r; 5 is more
NESTED_COHORTS = [(0, 1, 2, 3), (0, 2), (1, 3), (0, 1, 2)]


def _uniform(rows: int, columns: int, *key: int | str) -> Tensor:
    """U(-1/sqrt(columns), 1/sqrt(columns)), in float32, then exact in float64."""
    bound = columns**-0.5
    drawn = torch.empty(rows, columns).uniform_(-bound, bound, generator=create_generator(SEED, *map(str, key)))
    return drawn.double()


def _nested(id: str, round: int, pairs: Pairs) -> dict[str, dict[str, Tensor]]:
    rank, nested = RANKS[id], dict[str, dict[str, Tensor]]()
    for one in LAYERS:
        (rows, _), (_, columns) = pairs[one]["B"].shape, pairs[one]["A"].shape
        nested[one] = {
            "A_d": torch.zeros(R, rank, dtype=torch.float64),
            "A_u": _uniform(rank, columns, "A_u", one, round, id),
            "B_d": torch.zeros(rows, rank, dtype=torch.float64),
            "B_u": _uniform(rank, R, "B_u", one, round, id),
        }
    return nested


def _outer(pair: dict[str, Tensor], own: dict[str, Tensor], n: float) -> dict[str, Tensor]:
    return {slot: pair[slot] + n * own[f"{slot}_d"] @ own[f"{slot}_u"] for slot in "AB"}


def _descend_nested(
    problem: Problem, id: str, W: dict[str, Tensor], head: dict[str, Tensor], pairs: Pairs, round: int
) -> Pairs:
    nested, n = _nested(id, round, pairs), NESTED
    for _ in range(NESTED_STEPS):
        full = {one: _outer(pairs[one], nested[one], n) for one in LAYERS}
        dense = problem.gradients(id, {**{o: W[o] + S * full[o]["B"] @ full[o]["A"] for o in LAYERS}, **head})
        for one in LAYERS:
            by_factor = {"B": S * dense[one] @ full[one]["A"].T, "A": S * full[one]["B"].T @ dense[one]}
            for slot, G in by_factor.items():
                d, u = nested[one][f"{slot}_d"], nested[one][f"{slot}_u"]
                nested[one][f"{slot}_d"] = d - NESTED_LR * n * G @ u.T
                nested[one][f"{slot}_u"] = u - NESTED_LR * n * d.T @ G
        for name in HEAD:
            head[name] = head[name] - NESTED_LR * dense[name]
    return {one: _outer(pairs[one], nested[one], n) for one in LAYERS}


def test_nested_factors_match_a_dense_oracle() -> None:
    problem = Problem()
    method = MFedLoRU(spec=problem.adapted().spec, seed=SEED, r=R, lora_alpha=ALPHA, tau=TAU, nested_scaling=NESTED)
    federation = Federation(
        with_extras(method), problem, sgd(NESTED_LR, steps=NESTED_STEPS), ranks=RANKS, lora_alpha=ALPHA
    )
    W, head = problem.to_dense(*LAYERS), problem.to_dense(*HEAD)

    pairs = _pairs(method, 0)
    for number, positions in enumerate(NESTED_COHORTS):
        cohort = [problem.client_ids[position] for position in positions]
        federation.round(cohort)
        shares, trained, heads = problem.shares(cohort), dict[str, Pairs](), {id: dict(head) for id in cohort}
        for id in cohort:
            trained[id] = copied(pairs)
            if RANKS[id] < R:
                trained[id] = _descend_nested(problem, id, W, heads[id], pairs, number)
            else:
                descend(problem, id, W, heads[id], trained[id], S, NESTED_LR, NESTED_STEPS)
        head, pairs = average((shares[id], heads[id]) for id in cohort), factor_mean(trained, shares)
        if (number + 1) % TAU == 0:
            W = effective(W, pairs, S)
            pairs = _pairs(method, (number + 1) // TAU)
            for one in LAYERS:
                assert close(to_dense(federation.state.base.total[one]), W[one] - problem.to_dense(one)[one])
        for one, expected in effective(W, pairs, S).items():
            assert close(federation.get_weight(one), expected)
            for id in problem.client_ids:  # whatever its rank, a client's model before training is the global one
                assert close(federation.get_weight(one, id), expected)
        require_state(federation, head, pairs)


def test_only_nested_factors_are_uploaded() -> None:
    problem = Problem()
    method = MFedLoRU(spec=problem.adapted().spec, seed=SEED, r=R, tau=TAU)
    federation = Federation(with_extras(method), problem, sgd(NESTED_LR), ranks=RANKS)
    for number in range(3):
        federation.round()
        for id, reply in federation.replies.items():
            slots = {name.partition("/")[2] for name in reply.tensors} - set(HEAD)
            assert slots == ({"A_d", "A_u", "B_d", "B_u"} if RANKS[id] < R else {"A", "B"})
            assert federation.elements[id] == federation.declare_claims(id, number)
    # r_A (m + r) + r_B (r + n) of the paper, with the letters swapped: fc1 is 8 x 5, fc2 6 x 8.
    assert federation.elements["client-0"][1] == (8 + R) + (R + 5) + (6 + R) + (R + 8)


@given(
    ranks=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.1, 10.0), min_size=4, max_size=4),
    scaling=st.floats(0.1, 2.0),
    seed=st.integers(0, 1000),
)
@settings(max_examples=50, deadline=None)
def test_the_server_averages_what_the_clients_would_hold(
    ranks: list[int], weights: list[float], scaling: float, seed: int
) -> None:
    """Random replies, ranks and weights: A = sum p_k A_k of eq. 85, through the dense matrices A_k."""
    problem = Problem(clients=1)
    method = MFedLoRU(spec=problem.adapted().spec, r=4, tau=100, nested_scaling=scaling)
    state = method.init(problem.adapted())
    rng = torch.Generator().manual_seed(seed)
    total = sum(weights[: len(ranks)])
    items, expected = [], {name: torch.zeros_like(value, dtype=torch.float64) for name, value in state.tensors.items()}
    for index, rank in enumerate(ranks):
        client = Client(f"c{index}", rank, 1.0, 1, weights[index])
        job = method.start(method.sync(state, client), client, {}, state.round)
        trained = {name: torch.randn(job.tensors[name].shape, generator=rng) for name in job.trainable_names}
        items.append(StackItem(client, weights[index] / total, trained))
        for layer in method.spec.layers:
            for slot in "AB":
                name = join_tensor_name(layer.name, slot)
                if rank >= 4:
                    own = trained[name].double()
                else:
                    nested = trained[f"{name}_d"].double() @ trained[f"{name}_u"].double()
                    own = state.tensors[name].double() + scaling * nested
                expected[name] += weights[index] / total * own
    after = method.update(state, Reduced(stack=tuple(items), count=len(items)))
    for name, value in expected.items():
        assert close(after.tensors[name], value, 1e-6)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_nested_product_starts_at_zero_and_again_every_round(rank: int) -> None:
    problem = Problem(clients=1)
    method = MFedLoRU(spec=problem.adapted().spec, r=R, tau=100)
    client = Client("c", rank, 9.0, 1, 1.0)  # the client's own scaling means nothing here: A and B are of rank r
    state, drawn = method.init(problem.adapted()), list[Tensor]()
    for number in range(3):
        job = method.start(method.sync(state, client), client, {}, state.round)
        for one in LAYERS:
            pair = job.parametrization[one].compute_effective(
                {k.partition("/")[2]: v for k, v in job.tensors.items() if one in k}
            )
            assert pair.pair.scale == method.get_scaling(None)
            assert torch.equal(pair.pair.B, job.tensors[f"{one}/B"])
            assert torch.equal(pair.pair.A, job.tensors[f"{one}/A"])
            assert job.tensors[f"{one}/B_u"].any()
        assert job.generation == number
        drawn.append(job.tensors["fc1/A_u"])
        state = state.advance_round()
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
