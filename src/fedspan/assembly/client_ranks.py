"""Ranks and scalings of a run's clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from fedspan.config import RunConfig
from fedspan.config.federation import FractionRanks, RandomRanks
from fedspan.core.method import RegisteredMethod, compute_scaling
from fedspan.core.tensors import create_generator
from fedspan.errors import FedspanError, suggest_nearest


def compute_client_ranks(config: RunConfig, method: RegisteredMethod, ids: Sequence[str]) -> dict[str, int]:
    """Determine the rank of every client.

    Args:
        config: Config of the run.
        method: The method, bound to the model's target layers.
        ids: Ids of the clients, in their order.

    Raises:
        FedspanError: If a client does not exist, a rank is larger than the layers allow, or ranks differ and the method
            supports only one.
    """
    requested = _get_requested_ranks(config, ids)
    max_rank, whose = _compute_max_rank(method)
    client_ids = set(ids)
    for id, rank in requested.items():
        field = f"federation.ranks.{id}"
        if id not in client_ids:
            raise FedspanError(field, rank, problem=f"no client is named {id!r}. {suggest_nearest(id, ids)}")
        if rank > max_rank:
            raise FedspanError(field, rank, f"a rank from 1 to {max_rank}, {whose}")
        if rank != method.r and not method.claims.heterogeneous_ranks:
            raise FedspanError(field, rank, f"{method.r}, because {config.method.name} needs one rank for all clients")
    return {id: requested.get(id, method.r) for id in ids}


def compute_client_scaling(config: RunConfig, method: RegisteredMethod, rank: int) -> float:
    """Return the factor on a client's B A."""
    counted = method.r if config.federation.scaling == "equal" else rank
    return compute_scaling(method.lora_alpha, counted, method.use_rslora)


def _compute_max_rank(method: RegisteredMethod) -> tuple[int, str]:
    """Return the highest rank and its source: adapters have one rank for all layers, full weights one per layer."""
    layers = method.spec.layers
    if method.claims.adapter:
        return min(min(layer.shape) for layer in layers), "the smallest layer's side"
    return max(min(layer.rectangle) for layer in layers), "the full rank of the largest layer"


def _get_requested_ranks(config: RunConfig, ids: Sequence[str]) -> Mapping[str, int]:
    match config.federation.ranks:
        case None:
            return {}
        case list() as turns:
            return {id: turns[index % len(turns)] for index, id in enumerate(ids)} if turns else {}
        case dict() as by_client:
            return by_client
        case RandomRanks() as drawn:
            seed = config.data_seed if drawn.seed is None else drawn.seed
            count = len(drawn.of)
            return {
                id: drawn.of[int(torch.randint(count, (), generator=create_generator(seed, "rank", id)))] for id in ids
            }
        case FractionRanks() as fractions:
            seed = config.data_seed if fractions.seed is None else fractions.seed
            order = torch.randperm(len(ids), generator=create_generator(seed, "ranks")).tolist()
            ranks = _allocate(fractions.of, len(ids))
            return {ids[int(position)]: rank for position, rank in zip(order, ranks, strict=True)}


def _allocate(shares: Mapping[int, float], clients: int) -> list[int]:
    """List the clients' ranks, ascending, each as often as its share demands; the largest remainders are rounded up."""
    exact = {rank: share * clients for rank, share in sorted(shares.items())}
    counts = {rank: math.floor(value + 1e-9) for rank, value in exact.items()}
    remainders = sorted(exact, key=lambda rank: counts[rank] - exact[rank])
    for rank in remainders[: clients - sum(counts.values())]:
        counts[rank] += 1
    return [rank for rank, count in counts.items() for _ in range(count)]
