"""mFedLoRU against dense weights, with nested factors that are trained by the chain rule written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspan.core.base import to_dense
from fedspan.core.tensors import create_generator, join_tensor_name
from fedspan.core.values import Client, Reduced, StackItem
from fedspan.methods.mfedloru import MFedLoRU
from helpers.toys.oracle import Pairs, average, copied, descend
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Federation, close, sgd, with_extras

LR, STEPS, TAU, R, ALPHA, NESTED, SEED = 0.2, 3, 2, 3, 4.5, 0.7, 11
S = ALPHA / R
RANKS = {"client-0": 1, "client-1": 3, "client-2": 2, "client-3": 5}  # 3 is r; 5 is more
COHORTS = [(0, 1, 2, 3), (0, 2), (1, 3), (0, 1, 2)]


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
    for _ in range(STEPS):
        full = {one: _outer(pairs[one], nested[one], n) for one in LAYERS}
        dense = problem.gradients(id, {**{o: W[o] + S * full[o]["B"] @ full[o]["A"] for o in LAYERS}, **head})
        for one in LAYERS:
            by_factor = {"B": S * dense[one] @ full[one]["A"].T, "A": S * full[one]["B"].T @ dense[one]}
            for slot, G in by_factor.items():
                d, u = nested[one][f"{slot}_d"], nested[one][f"{slot}_u"]
                nested[one][f"{slot}_d"] = d - LR * n * G @ u.T
                nested[one][f"{slot}_u"] = u - LR * n * d.T @ G
        for name in HEAD:
            head[name] = head[name] - LR * dense[name]
    return {one: _outer(pairs[one], nested[one], n) for one in LAYERS}


def test_matches_a_dense_oracle() -> None:
    problem = Problem()
    method = MFedLoRU(spec=problem.adapted().spec, seed=SEED, r=R, lora_alpha=ALPHA, tau=TAU, nested_scaling=NESTED)
    federation = Federation(with_extras(method), problem, sgd(LR, steps=STEPS), ranks=RANKS, lora_alpha=ALPHA)
    W, head = problem.to_dense(*LAYERS), problem.to_dense(*HEAD)

    def fresh(generation: int) -> Pairs:
        drawn = method.create_factors(generation)
        return {one: {slot: drawn[join_tensor_name(one, slot)].double() for slot in "AB"} for one in LAYERS}

    pairs = fresh(0)
    for number, positions in enumerate(COHORTS):
        cohort = [problem.client_ids[position] for position in positions]
        federation.round(cohort)
        shares, models = problem.shares(cohort), list[tuple[float, dict[str, Tensor]]]()
        for id in cohort:
            mine, my_head = copied(pairs), dict(head)
            if RANKS[id] < R:
                mine = _descend_nested(problem, id, W, my_head, pairs, number)
            else:
                descend(problem, id, W, my_head, mine, S, LR, STEPS)
            flat = {join_tensor_name(one, slot): mine[one][slot] for one in LAYERS for slot in "AB"}
            models.append((shares[id], {**flat, **my_head}))
        mean = average(models)
        head = {name: mean[name] for name in HEAD}
        pairs = {one: {slot: mean[join_tensor_name(one, slot)] for slot in "AB"} for one in LAYERS}
        if (number + 1) % TAU == 0:
            W = {one: W[one] + S * pairs[one]["B"] @ pairs[one]["A"] for one in LAYERS}
            pairs = fresh((number + 1) // TAU)
            for one in LAYERS:
                assert close(to_dense(federation.state.base.total[one]), W[one] - problem.to_dense(one)[one])
        for one in LAYERS:
            for slot in "AB":
                assert close(federation.state.tensors[join_tensor_name(one, slot)], pairs[one][slot])
            expected = W[one] + S * pairs[one]["B"] @ pairs[one]["A"]
            assert close(federation.get_weight(one), expected)
            for id in problem.client_ids:  # whatever its rank, a client's model before training is the global one
                assert close(federation.get_weight(one, id), expected)
        for name in HEAD:
            assert close(federation.state.tensors[f"extras/{name}"], head[name])


def test_only_nested_factors_are_uploaded() -> None:
    problem = Problem()
    method = MFedLoRU(spec=problem.adapted().spec, seed=SEED, r=R, tau=TAU)
    federation = Federation(with_extras(method), problem, sgd(LR), ranks=RANKS)
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
