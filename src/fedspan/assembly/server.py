"""Runs with remote clients: the server's half, the clients' half as a service."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedspan.assembly.engine import RunTrainer, build_trainer, choose_device
from fedspan.assembly.federation import compute_client_ranks, compute_client_scaling, wrap_method
from fedspan.assembly.head import build_head_start
from fedspan.assembly.run import Prepared
from fedspan.clients.store import DiskClientStore
from fedspan.config import RunConfig
from fedspan.core.method import RegisteredMethod
from fedspan.core.values import Client, Spec
from fedspan.crypto import require_packages
from fedspan.errors import FedspanError
from fedspan.federation.config import RoundSettings
from fedspan.federation.evaluation import RemoteEvaluator
from fedspan.federation.federation import Federation
from fedspan.federation.head_start import HeadStart
from fedspan.federation.presence import Presence
from fedspan.federation.progress import ClientData
from fedspan.federation.transport import Transport
from fedspan.training.stages import Stages

if TYPE_CHECKING:
    from fedspan.clients.secagg import SecureClient


class Nothing:
    """The empty set of examples of a server."""

    lengths = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class ServerRun(RunTrainer):
    """The server's half of a deployment: everything except data and clients (``connect`` adds the clients).

    Args:
        head: How the head starts; None: as loaded.
    """

    settings: RoundSettings
    head: HeadStart | None
    notes: tuple[str, ...]


def prepare_server(config: RunConfig, key: bytes | None = None, stages: Stages | None = None) -> ServerRun:
    """Build the server's half of a deployment."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.evaluation.by is not None:
        problem = "the examples are on the nodes, and the server has no held-out set to score by value"
        raise FedspanError("evaluation.by", config.evaluation.by, problem=problem)
    labels, device = tuple(config.data.labels or ()), choose_device(config.device)
    trainer = build_trainer(config, labels, config.partition.clients, device, key, stages)
    head, notes = build_head_start(config, trainer.model)
    return ServerRun(**vars(trainer), settings=config.build_round_settings(key), head=head, notes=notes)


def build_method(config: RunConfig, spec: Spec) -> RegisteredMethod:
    """Build the run's method with the federation's number of clients, which a node's own config does not contain."""
    return config.build_method(replace(spec, clients=config.partition.clients))


def build_server_clients(
    config: RunConfig,
    spec: Spec,
    examples: Mapping[str, int],
    max_examples: Mapping[str, int] | None = None,
    identities: Mapping[str, str] | None = None,
) -> dict[str, ClientData]:
    """Build the client data of a server: ranks, scalings and weights, without data indices.

    Args:
        max_examples: Number of examples up to which a declared one counts, by client id; others count in full.
        identities: Public keys that have to sign the session keys of secure sums, by client id; others need none.
    """
    method, no_indices = build_method(config, spec), np.zeros(0, np.int64)
    ids = sorted(examples)
    ranks = compute_client_ranks(config, method, ids)
    clients: dict[str, ClientData] = {}
    for id in ids:
        weight = 1.0 if config.federation.weights == "uniform" else float(examples[id])
        client = Client(id, ranks[id], compute_client_scaling(config, method, ranks[id]), examples[id], weight)
        limit, identity = (max_examples or {}).get(id), (identities or {}).get(id, "")
        clients[id] = ClientData(client, no_indices, no_indices, no_indices, limit, identity)
    return clients


def connect(
    built: ServerRun | Prepared,
    transport: Transport,
    *,
    clients: Mapping[str, ClientData] | None = None,
    nodes: Path | None = None,
    run: str = "",
    agreed: str = "",
    least: int = 1,
    presence: Presence | None = None,
    begin_round: Callable[[int], tuple[Mapping[str, ClientData], Presence]] | None = None,
) -> Prepared:
    """Connect a run to its clients through a transport.

    Args:
        built: The server's half; or a run with all clients in this process, whose replies come from other processes.
        clients: The clients; None: those of a run in this process.
        nodes: Folder where the clients store their state, if this process can read it.
        agreed: Digest of the config that all nodes were sent.
        least: Number of accepted replies that a round needs in any case, unless its cohort is smaller.
        presence: The rounds in which each client is present; None: every client in every round.
        begin_round: Decides before a round about the clients (``Federation``); None: they stay.
    """
    config, training = built.config, built.engine.settings
    if isinstance(built, Prepared):
        own = built.federation
        method, examples, settings, training = own.method, own.examples, own.settings, own.training
        clients = own.clients if clients is None else clients
    else:
        method, examples, settings, clients = wrap_method(built), Nothing(), built.settings, clients or {}
    federation = Federation(
        method,
        built.engine,
        clients,
        examples,
        settings.model_copy(update={**dict(config.federation), "agreed": agreed, "least": least, "validates": True}),
        transport,
        run,
        exporting=nodes is None,
        training=training,
        presence=presence,
        begin_round=begin_round,
    )
    store = None if nodes is None else DiskClientStore(nodes)
    evaluator = RemoteEvaluator(
        federation, config.evaluation.batch_size, config.evaluation.clients, None if store is None else store.load
    )
    if isinstance(built, Prepared):
        return replace(built, federation=federation, evaluator=evaluator)
    shared = {name: value for name, value in vars(built).items() if name != "settings"}
    return Prepared(**shared, clients=clients, train=examples, federation=federation, evaluator=evaluator)


def secure_client(
    config: RunConfig, id: str, folder: Path, sums: Path | None = None, **owner: Any
) -> SecureClient | None:
    """Build the secure aggregation half of a client, which masks its replies; None: the run has none.

    Args:
        sums: Folder of the sums of all runs of the client; None: those of this run alone count.
        owner: What the client's owner requires: the limits, ``identity``, ``known`` and ``check`` of ``SecureClient``.
    """
    if config.federation.secure is None:
        return None
    require_packages()
    from fedspan.clients.secagg import SecureClient  # needs fedspan[secagg]
    from fedspan.clients.secagg_store import DiskSessionStore

    return SecureClient(id, DiskSessionStore(folder, sums), **owner)
