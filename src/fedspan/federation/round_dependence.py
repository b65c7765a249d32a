"""Test by running it that a method's jobs and states can be mixed across rounds, as asynchronous rounds do."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedspan.core.method import Method
from fedspan.core.values import Client, Job, Reduced, ServerState
from fedspan.federation.validation import compute_origin


@dataclass(frozen=True)
class _DiagonalWeights:
    """A pretrained model of diagonal matrices, whose singular values differ, so that every method can decompose it."""

    method: Method

    def get_weight(self, layer: str) -> Tensor:
        rows, columns = next(spec.shape for spec in self.method.spec.layers if spec.name == layer)
        weight = torch.zeros(rows, columns)
        weight.diagonal().copy_(torch.linspace(1.0, 2.0, min(rows, columns)))
        return weight

    def get_extra(self, parameter: str) -> Tensor:
        return torch.zeros(self.method.spec.extras[parameter])


def explain_round_dependence(method: Method, rounds: int) -> str | None:
    """Explain why a reply to an earlier round cannot enter a later one, as a clause; None if it can.

    Claims that rule it out are named first. Otherwise the method's own functions run for all rounds without training:
    from one state a job must be the same in every round, and no round may change the base or re-initialize tensors.

    Args:
        method: The method with its wrappers, bound to a small model.
        rounds: Number of rounds of the run.
    """
    claims = method.declare_claims()
    reasons = {
        "its rounds have a second exchange, with the clients that replied in the first": claims.second_exchange,
        "its server needs the single replies of a round, and not their sum": claims.reduction != "sum",
        "its clients send nothing": claims.sends == "nothing",
        "its clients also send something other than new values, or changes, of what they started from": claims.sends
        == "other",
        "its factors are re-initialized in every round, so that changes of two rounds have other coordinates": (
            claims.reinitializes
        ),
        "its rounds move the base, from which changes of earlier rounds do not start": claims.moves_base,
    }
    if reason := next((reason for reason, applies in reasons.items() if applies), None):
        return reason
    client = Client("client", method.get_rank(None), 1.0, 1, 1.0)
    state = method.init(_DiagonalWeights(method))
    first = _start(method, state, client)
    for number in range(rounds):
        after = method.update(
            state, Reduced(compute_origin(method, method.sync(state, client), client, number), count=1)
        )
        if after.generation != state.generation or after.base.round != state.base.round:
            return f"it re-initializes its factors after round {number + 1}"
        if number + 1 < rounds and not _are_alike(_start(method, after, client), first):
            return f"a client trains something else in round {number + 2} than in round 1"
        state = after
    return None


def _start(method: Method, state: ServerState, client: Client) -> Job:
    return method.start(method.sync(state, client), client, {}, state.round)


def _are_alike(left: Job, right: Job) -> bool:
    """Check whether two jobs train the same tensors from the same values in the same way."""
    for ours, theirs in ((left.tensors, right.tensors), (left.masks, right.masks)):
        if ours.keys() != theirs.keys() or not all(torch.equal(value, theirs[name]) for name, value in ours.items()):
            return False
    left, right = (replace(job, tensors={}, masks={}, penalties=(), scalars={}) for job in (left, right))
    return left == right
