"""A federation whose clients are all in this process: their ranks, examples and presence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from fedspan.assembly.engine import RunTrainer
from fedspan.assembly.head import find_new_head
from fedspan.clients.mappings import LazyMapping
from fedspan.config import RunConfig
from fedspan.core.method import Method, RegisteredMethod, compute_scaling
from fedspan.core.tensors import create_generator
from fedspan.core.values import Client
from fedspan.crypto import require_packages
from fedspan.data.partition import Partition
from fedspan.errors import FedspanError, suggest_nearest
from fedspan.federation.conditions import Conditions
from fedspan.federation.config import (
    MIN_SECURE_CLIENTS,
    Arrivals,
    FractionRanks,
    RandomRanks,
    RoundSettings,
)
from fedspan.federation.federation import Federation
from fedspan.federation.presence import Presence
from fedspan.federation.progress import ClientData
from fedspan.logs import read_lines
from fedspan.run_folder import RunFolder
from fedspan.tasks.task import Examples, get_labels
from fedspan.transports.in_process import InProcess, create_transport

if TYPE_CHECKING:
    from fedspan.clients.secagg import SecureClient


def build_simulated_federation(
    trainer: RunTrainer, clients: Mapping[str, ClientData], train: Examples, key: bytes | None
) -> Federation:
    """Build a run's federation, with all clients in this process."""
    config, transport = trainer.config, build_simulated_transport(trainer, clients, train)
    host = transport.host
    return Federation(
        host.method,
        host.engine,
        host.clients,
        host.examples,
        _read_arrivals(config.build_simulation_settings(key)),
        transport,
        presence=_build_presence(config, tuple(clients)),
    )


def build_simulated_transport(trainer: RunTrainer, clients: Mapping[str, ClientData], train: Examples) -> InProcess:
    """Build the host of all clients of a simulation, and the transport to it."""
    config = trainer.config
    conditions = None if config.simulation is None else config.simulation.build_conditions(config.seed)
    return create_transport(
        wrap_method(trainer),
        trainer.engine,
        clients,
        _flip_labels(train, clients, conditions, len(trainer.task_settings.labels)),
        _secure_clients(config, clients),
        conditions,
    )


def wrap_method(trainer: RunTrainer) -> Method:
    """Return a run's method with its wrappers."""
    return trainer.config.wrap_method(trainer.method, find_new_head(trainer.config, trainer.model))


def _build_presence(config: RunConfig, ids: Sequence[str]) -> Presence:
    """Build the rounds in which the clients of a simulation are present."""
    if config.simulation is None or not config.simulation.present:
        return Presence()
    known, present = set(ids), config.simulation.present
    for id, span in present.items():
        if id not in known:
            problem = f"no client is named {id!r}. {suggest_nearest(id, ids)}"
            raise FedspanError(f"simulation.present.{id}", list(span), problem=problem)
    presence, required = config.simulation.build_presence(), config.federation.min_replies
    needs = [(required, "federation.min_replies")]
    if config.federation.secure is not None:
        needs.append((MIN_SECURE_CLIENTS, "federation.secure"))
    for round in range(config.federation.most_rounds):
        try:
            for least, reason in needs:
                presence.require_enough(len(ids), round, least, reason)
        except FedspanError as error:
            raise FedspanError("simulation.present", error.value, error.expected, problem=error.problem) from None
    return presence


def _secure_clients(config: RunConfig, clients: Mapping[str, ClientData]) -> Mapping[str, SecureClient] | None:
    """Each simulated client's half of secure aggregation, with its state in memory; None: the run has none."""
    if config.federation.secure is None:
        return None
    require_packages()
    from fedspan.clients.secagg import SecureClient  # needs fedspan[secagg]
    from fedspan.clients.secagg_store import MemorySessionStore

    ids, sessions = tuple(clients), MemorySessionStore()
    return LazyMapping(ids, lambda index: SecureClient(ids[index], sessions))


def _flip_labels(
    train: Examples, clients: Mapping[str, ClientData], conditions: Conditions | None, labels: int
) -> Examples:
    """Return the training examples, with label K - 1 - k instead of k for clients that train on flipped labels."""
    faults = None if conditions is None else conditions.faults
    if conditions is None or faults is None or faults.kind != "label-flip":
        return train
    flipped = get_labels(train, np.arange(len(train)))
    for id in conditions.draw_faulty(sorted(clients)):
        indices = clients[id].train
        flipped[indices] = labels - 1 - flipped[indices]
    if not is_dataclass(train) or isinstance(train, type):
        expected = "a task whose encoded examples are a dataclass with `labels`"
        raise FedspanError("simulation.faults.kind", "label-flip", expected)
    return replace(train, labels=flipped)


def build_clients(
    config: RunConfig, method: RegisteredMethod, parts: Partition, ignored: np.ndarray | None = None
) -> LazyMapping[ClientData]:
    """Build the clients whose examples are in this process.

    Args:
        ignored: Examples that count as their client's and are in none of its parts, int64; None: there are none.
    """
    ids = parts.parts.ids
    cohort = config.federation.clients_per_round
    if cohort is not None and cohort > len(ids):
        raise FedspanError("federation.clients_per_round", cohort, f"at most {len(ids)}, the number of clients")
    ranks = np.fromiter(compute_client_ranks(config, method, ids).values(), np.int64, len(ids))

    def build_client(index: int) -> ClientData:
        part, rank = parts.parts[index], int(ranks[index])
        weight = 1.0 if config.federation.weights == "uniform" else float(len(part.train))
        client = Client(part.id, rank, compute_client_scaling(config, method, rank), len(part.train), weight)
        rows = (part.train, part.validation, part.test)
        train, validation, test = (split if ignored is None else split[~np.isin(split, ignored)] for split in rows)
        return ClientData(client, train, validation, test, ignored=len(part.train) - len(train))

    return LazyMapping(ids, build_client)


def _read_arrivals(settings: RoundSettings) -> RoundSettings:
    """Return the settings of rounds with the arrivals of the run that the config repeats, if it repeats one."""
    if settings.buffered is None or settings.buffered.replay is None:
        return settings
    run = RunFolder(settings.buffered.replay)
    rows = list(read_lines(run.metrics)) if run.metrics.is_file() else []
    rounds = [row for row in rows if row["round"]]
    if not rounds or not all("arrivals" in row for row in rounds):
        expected = "the folder of a run with federation.buffered"
        raise FedspanError("federation.buffered.replay", str(run.path), expected)
    if len(rounds) < settings.rounds and settings.early_stopping is None:  # with it, the run may end as early
        problem = f"the record has the arrivals of {len(rounds)} rounds, and federation.rounds is {settings.rounds}"
        raise FedspanError("federation.buffered.replay", str(run.path), problem=problem)
    arrivals: Arrivals = tuple(_parse_row(cast(Any, row)) for row in rounds)
    return settings.model_copy(update={"arrivals": arrivals})


def _parse_row(row: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    """Return the clients of a round's arrivals with the round of each one's order, from 0."""
    return tuple((str(id), int(row["round"]) - 1 - int(staleness)) for id, staleness in row["arrivals"])


def compute_client_ranks(config: RunConfig, method: RegisteredMethod, ids: Sequence[str]) -> dict[str, int]:
    """Determine the rank of every client."""
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
