"""What a federation that was run shows of its method's claims."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from fedspan.core.method import Method, Traffic
from fedspan.core.values import Spec
from fedspan.federation.serialization import encode
from fedspan.planning.shape_inference import count_traffic, rewrap_method, unwrap_method

from .watched_rounds import MethodRun, Round, Watched


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


def count_layers(method: Method, ranks: Iterable[int], cohorts: Sequence[Sequence[int]]) -> list[dict[int, Traffic]]:
    """By round and rank: the bytes over all target layers to and from a client that participated in every round."""
    if isinstance(method, Watched):  # it compares values
        method = method.inner
    bare, ranks = unwrap_method(method), list(ranks)
    layers = [
        count_traffic(
            rewrap_method(method, replace(bare, spec=Spec((layer,), clients=bare.spec.clients))), ranks, cohorts
        )
        for layer in bare.spec.layers
    ]
    return [
        {rank: Traffic(sum(row[rank].down for row in rows), sum(row[rank].up for row in rows)) for rank in ranks}
        for rows in zip(*layers, strict=True)
    ]


def require_declared_traffic(run: MethodRun, policy: str) -> None:
    """Bytes sent to and by clients that participated in every round are those that its functions give on shapes."""
    steady, ranks = set(run.federation.clients), {id: one.client.rank for id, one in run.federation.clients.items()}
    cohorts = [[ranks[id] for id in round.result.cohort] for round in run.rounds]
    counted = count_layers(run.federation.method, ranks.values(), cohorts)
    extras = sum(math.prod(shape) for shape in run.federation.method.spec.extras.values())
    for number, round in enumerate(run.rounds):
        cohort, sent, payloads = round.result.cohort, round.messages(), Counter[tuple[str, str]]()
        for transfer, message in zip(round.result.transfers, sent, strict=True):
            assert transfer.bytes == len(encode(message))
            payloads[transfer.client, transfer.direction] += transfer.payload
        for (client, direction), payload in payloads.items():
            if direction == "down" and client not in steady:
                continue
            layers = getattr(counted[number][ranks[client]], direction)
            travel = policy == "average" or (direction == "down" and number == 0)
            expected = layers + 4 * travel * extras
            if run.federation.method.declare_claims().adaptive_rank and direction == "down":
                assert 4 * travel * extras <= payload <= expected
            else:
                assert payload == expected
        steady &= set(cohort)
    assert steady, "nobody took part in every round"
