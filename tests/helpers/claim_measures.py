"""What a federation that was run shows of its method's claims."""

from __future__ import annotations

import math

from torch import Tensor

from fedspan.federation.serialization import encode
from helpers.counted_traffic import count_layers
from helpers.watched_rounds import MethodRun, Round


def relative(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius norm of the difference."""
    return float((actual - expected).norm() / expected.norm())


def errors(method_run: MethodRun, round: Round) -> dict[str, float]:
    """By layer: how far the aggregated change of weight is from the mean of the clients' changes."""
    names = [layer.name for layer in method_run.layers]
    return {
        name: relative(method_run.global_change(name, round.after), method_run.mean_change(name, round))
        for name in names
    }


def require_declared_traffic(run: MethodRun, policy: str) -> None:
    """Bytes sent to and by clients that participated in every round are those that its functions give on shapes."""
    steady, ranks = set(run.federation.clients), {id: one.client.rank for id, one in run.federation.clients.items()}
    cohorts = [[ranks[id] for id in round.result.cohort] for round in run.rounds]
    counted = count_layers(run.federation.method, ranks.values(), cohorts)
    extras = sum(math.prod(shape) for shape in run.federation.method.spec.extras.values())
    for number, round in enumerate(run.rounds):
        cohort, sent = round.result.cohort, round.messages()
        for transfer, message in zip(round.result.transfers, sent, strict=True):
            assert transfer.bytes == len(encode(message))
            if transfer.direction == "down" and transfer.client not in steady:
                continue
            layers = getattr(counted[number][ranks[transfer.client]], transfer.direction)
            travel = policy == "average" or (transfer.direction == "down" and number == 0)
            expected = layers + 4 * travel * extras
            if run.federation.method.declare_claims().adaptive_rank and transfer.direction == "down":
                assert 4 * travel * extras <= transfer.payload <= expected
            else:
                assert transfer.payload == expected
        steady &= set(cohort)
    assert steady, "nobody took part in every round"
