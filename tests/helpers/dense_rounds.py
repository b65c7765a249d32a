"""Whole rounds of a LoRA method in float64 beside an oracle that keeps every weight as a dense matrix.

The federation is that of the toys: a perceptron with target layers of 8 x 5 and 6 x 8, four clients of unequal size,
full-batch gradient descent. An oracle says what each client trains, and what the server makes of it.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from fedspan.core.base import BaseUpdate, Increment
from fedspan.core.lowrank import LowRank
from fedspan.core.method import Method
from fedspan.core.tensors import join_tensor_name

from .toys.oracle import Pairs, average, descend
from .toys.problem import HEAD, LAYERS, Problem
from .toys.rounds import Federation, close, sgd, to_double, with_extras

LR, STEPS, ALPHA = 0.3, 2, 4.0
EVERYBODY = (0, 1, 2, 3)
COHORTS = (EVERYBODY, (0, 2, 3), (1, 3), EVERYBODY)
RANKS = {"client-0": 1, "client-1": 2, "client-2": 3, "client-3": 4}

Weights = dict[str, Tensor]


class Oracle(Protocol):
    """A method's two halves on dense weights."""

    def start(self, id: str) -> tuple[Weights, Pairs]:
        """What a client holds frozen, by layer, and the pairs that it trains."""
        ...

    def finish(self, trained: Mapping[str, Pairs], shares: Mapping[str, float]) -> None:
        """The server's step."""
        ...

    def model(self) -> Weights:
        """The global model's weights."""
        ...


def scaling(id: str, ranks: Mapping[str, int] | None = None) -> float:
    """A client's factor on B A."""
    return ALPHA / (ranks or {}).get(id, 2)


def federation(method: Method, ranks: Mapping[str, int] | None = None, uniform: bool = False) -> Federation:
    """A federation of a method of rank 2 and scaling 2, whose state is in float64 from the beginning."""
    made = Federation(
        with_extras(method), Problem(), sgd(LR, steps=STEPS), ranks=ranks, lora_alpha=ALPHA, uniform=uniform
    )
    base = BaseUpdate()
    for increment in made.state.base.recent:
        deltas = {layer: delta.to(torch.float64) for layer, delta in increment.deltas.items()}
        base = base.add(Increment(increment.round, deltas))
    made.state = replace(made.state, tensors=to_double(made.state.tensors), base=base)
    return made


def get_pairs(made: Federation) -> Pairs:
    """The pairs in a federation's state."""
    tensors = made.state.tensors
    return {one: {slot: tensors[join_tensor_name(one, slot)].clone() for slot in "AB"} for one in LAYERS}


class PairOracle:
    """The server's pairs, which every client trains, on dense weights; ``finish`` is the method's."""

    def __init__(self, made: Federation) -> None:
        self.W, self.pairs = made.problem.to_dense(*LAYERS), get_pairs(made)

    def start(self, id: str) -> tuple[Weights, Pairs]:
        """All train the same."""
        return self.W, self.pairs

    def model(self) -> Weights:
        """W + s B A."""
        return {one: self.W[one] + 2.0 * self.pairs[one]["B"] @ self.pairs[one]["A"] for one in LAYERS}


def follow(
    made: Federation,
    oracle: Oracle,
    *,
    cohorts: Sequence[Sequence[int]] = COHORTS,
    train: str = "AB",
    ranks: Mapping[str, int] | None = None,
    uniform: bool = False,
    tolerance: float = 1e-9,
) -> None:
    """Run both; after every round the models, the heads and what was transmitted are compared.

    Elements are compared with those declared while everybody participates in every round.
    """
    problem = made.problem
    head, steady = problem.to_dense(*HEAD), ranks is None
    for number, cohort in enumerate(cohorts):
        ids = [problem.client_ids[client_number] for client_number in cohort]
        made.round(ids)
        shares = dict.fromkeys(ids, 1 / len(ids)) if uniform else problem.shares(ids)
        trained: dict[str, Pairs] = {}
        heads: dict[str, Weights] = {}
        for id in ids:
            (W, pairs), heads[id] = oracle.start(id), dict(head)
            trained[id] = {layer: dict(pair) for layer, pair in pairs.items()}
            descend(problem, id, W, heads[id], trained[id], scaling(id, ranks), LR, STEPS, train=train)
        head = average((shares[id], heads[id]) for id in ids)
        oracle.finish(trained, shares)
        model = oracle.model()
        for layer in LAYERS:
            assert close(made.get_weight(layer), model[layer], tolerance), (number, layer)
        require_state(made, head, tolerance=tolerance)
        steady = steady and len(cohort) == len(problem.client_ids)
        if steady:
            assert all(made.elements[id] == made.declare_claims(id, number) for id in ids)
    assert all(float((model[layer] - problem.to_dense(layer)[layer]).norm()) > 0.01 for layer in LAYERS)


def require_state(made: Federation, head: Weights, pairs: Pairs | None = None, tolerance: float = 1e-9) -> None:
    """Check the server's head and, if they are given, its pairs."""
    for name in HEAD:
        assert close(made.state.tensors[f"extras/{name}"], head[name], tolerance), name
    for one, slot in [] if pairs is None else itertools.product(LAYERS, "AB"):
        assert close(made.state.tensors[join_tensor_name(one, slot)], pairs[one][slot], tolerance), (one, slot)


def product_mean(trained: Mapping[str, Pairs], shares: Mapping[str, float], ranks: Mapping[str, int] | None) -> Weights:
    """``sum_i p_i s_i B_i A_i`` as dense matrices."""
    return average(
        (share, {one: scaling(id, ranks) * trained[id][one]["B"] @ trained[id][one]["A"] for one in LAYERS})
        for id, share in shares.items()
    )


def factor_mean(trained: Mapping[str, Pairs], shares: Mapping[str, float]) -> Pairs:
    """``sum_i p_i A_i`` and ``sum_i p_i B_i``."""
    return {one: average((share, trained[id][one]) for id, share in shares.items()) for one in LAYERS}


def dense(delta: LowRank | Tensor) -> Tensor:
    """A change of weight as a matrix."""
    return delta.to_dense() if isinstance(delta, LowRank) else delta
