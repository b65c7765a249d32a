"""Bytes that a method's messages are expected to hold, counted on shapes, over several target layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fedspan.core.method import Method, Traffic
from fedspan.core.values import Spec
from fedspan.planning.shape_inference import count_traffic, rewrap_method, unwrap_method
from helpers.watched_rounds import Watched


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
