"""Runs whose clients are elsewhere: the server's half of a prepared run, and the clients' half as a service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedspan.clients.host import Host, refuse_any
from fedspan.clients.store import DiskClientStore
from fedspan.config import RunConfig, parse_config, parse_text
from fedspan.core.method import Memory, RegisteredMethod
from fedspan.core.values import Client, Spec
from fedspan.crypto import require
from fedspan.federation.aggregation.aggregation import AggregationFactory
from fedspan.federation.aggregation.plaintext import PlaintextAggregation
from fedspan.federation.evaluation import Evaluator
from fedspan.federation.evaluation_exchange import RemoteEvaluator
from fedspan.federation.federation import Federation
from fedspan.federation.orders import Transport
from fedspan.federation.progress import ClientData
from fedspan.federation.protocol import Envelope
from fedspan.federation.secagg.messages import decode_request
from fedspan.federation.validation import ReplyRules
from fedspan.runs.engine_setup import make_engine
from fedspan.runs.folder import RunFolder
from fedspan.runs.model_setup import build_model
from fedspan.runs.privacy_budget import load_noise_key
from fedspan.runs.ranks import client_ranks, client_scaling
from fedspan.runs.session import load_partition
from fedspan.runs.setup import Prepared, choose_device, max_length, prepare, require_private_model
from fedspan.runs.task_setup import PROBLEMS, Facts
from fedspan.transports.in_process import simulate

if TYPE_CHECKING:
    from fedspan.clients.secagg import SecureClient

__all__ = ["connect", "method_for", "nodes_folder", "prepare_server", "reply_as", "secure_client", "server_clients"]


def nodes_folder(run: Path) -> Path:
    """Where the clients of a simulation keep what they must remember."""
    return run / "nodes"


class Nothing:
    """The examples of a server: none."""

    lengths = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return 0


def prepare_server(config: RunConfig, key: bytes | None = None) -> Prepared:
    """Build the server's half of a deployment: everything but data and clients (``connect`` brings those).

    Args:
        config: of ``meeting.server_config``.
        key: of the noise, where it is a secret one.

    Raises:
        FedspanError: for anything in the config that does not fit the model.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    labels = tuple(config.data.labels or ())
    model = build_model(config, labels, choose_device(config.device))
    require_private_model(config, model.adapted)
    facts = Facts.of(config, labels, max_length(config, model.processor, model.adapted.model))
    task = PROBLEMS[config.task].task(model.processor, facts, config)
    method = config.wrapped(method_for(config, model.adapted.spec))
    engine = make_engine(config, model.adapted, task, config.training_settings(key))
    nothing = Nothing()
    federation = simulate(method, engine, {}, nothing, config.round_settings(key))
    evaluator = Evaluator(federation, config.evaluation.batch_size, config.evaluation.clients)
    return Prepared(config, labels, facts, None, task, engine, federation, evaluator, nothing, None, (), model)


def method_for(config: RunConfig, spec: Spec) -> RegisteredMethod:
    """The run's method with the federation's number of clients, which a node's own config does not tell."""
    return config.build_method(replace(spec, clients=config.partition.clients))


def server_clients(config: RunConfig, spec: Spec, examples: Mapping[str, int]) -> dict[str, ClientData]:
    """What a server knows of its clients.

    Args:
        config: the run's.
        spec: of its model.
        examples: their numbers of training examples, by client id.
    """
    method, nobody = method_for(config, spec), np.zeros(0, np.int64)
    ids = sorted(examples)
    ranks = client_ranks(config, method, ids)
    members: dict[str, ClientData] = {}
    for id in ids:
        weight = 1.0 if config.federation.weights == "uniform" else float(examples[id])
        client = Client(id, ranks[id], client_scaling(config, method, ranks[id]), examples[id], weight)
        members[id] = ClientData(client, nobody, nobody, nobody)
    return members


def connect(
    prepared: Prepared,
    transport: Transport,
    rules: ReplyRules,
    *,
    members: Mapping[str, ClientData] | None = None,
    nodes: Path | None = None,
    run: str = "",
) -> Prepared:
    """A prepared run with its clients behind a transport.

    Args:
        prepared: the run.
        transport: to its clients.
        rules: when a round stands.
        members: the clients; None: those of the prepared run.
        nodes: where the clients keep what they remember, if that can be seen from here.
        run: its name, for nodes that may know several.

    Raises:
        FedspanError: if the config asks for secure sums, and the libraries for them are not installed.
    """
    here, config = prepared.federation, prepared.config
    known = here.members if members is None else members
    federation = Federation(
        here.method,
        prepared.engine,
        known,
        here.examples,
        here.settings,
        transport,
        rules,
        _aggregating(config),
        run,
        exporting=nodes is None,
    )
    keeper = None if nodes is None else DiskClientStore(nodes)

    def memory(client: str, round: int) -> Memory:
        assert keeper is not None
        return keeper.load(client, round).memory

    evaluator = RemoteEvaluator(
        federation, config.evaluation.batch_size, config.evaluation.clients, None if keeper is None else memory
    )
    return replace(prepared, federation=federation, evaluator=evaluator)


def _aggregating(config: RunConfig) -> AggregationFactory:
    """The kind of aggregation that a config asks for."""
    secure = config.federation.secure_settings()
    if secure is None:
        return PlaintextAggregation
    require()
    from fedspan.federation.aggregation.secure import SecureAggregation  # needs fedspan[secagg]

    return partial(SecureAggregation, secure=secure)


def secure_client(config: RunConfig, id: str, folder: Path, least: int = 2) -> SecureClient | None:
    """What masks a client's replies; None: the run has no secure sums.

    Args:
        config: the run's, as the client was told.
        id: of the client.
        folder: where it keeps what it must remember of the run.
        least: clients without whom it hides in no sum.

    Raises:
        FedspanError: if the libraries are not installed.
    """
    if config.federation.secure is None:
        return None
    require()
    from fedspan.clients.secagg import SecureClient  # needs fedspan[secagg]
    from fedspan.clients.secagg_store import DiskSessionStore

    return SecureClient(id, DiskSessionStore(folder), least)


def reply_as(run: str, threads: int, number: int, envelope: Envelope) -> Envelope:
    """Answer as a client of a simulated run; the process that is asked first loads model and data, and keeps them.

    Args:
        run: the run's folder.
        threads: of this process.
        number: the client's place among the ids.
        envelope: the server's order.
    """
    asked = decode_request(envelope)
    try:
        host = _host(run)
        torch.set_num_threads(threads)  # not those that the config gives the whole run
        return host.reply(asked)
    except Exception as error:  # whatever it was, the server is told that there is no reply
        return refuse_any(asked, error)


@lru_cache(maxsize=1)
def _host(run: str) -> Host:
    place = RunFolder(run)
    config = parse_config(parse_text(place.config_text(), str(place.config)))
    prepared = prepare(config, load_partition(place), load_noise_key(place.path, config))
    federation, folder = prepared.federation, nodes_folder(place.path)
    secure: Mapping[str, SecureClient] | None = None
    if config.federation.secure is not None:
        made = {id: secure_client(config, id, folder) for id in federation.members}
        secure = {id: client for id, client in made.items() if client is not None}
    return Host(
        federation.method,
        prepared.engine,
        federation.members,
        prepared.train,
        DiskClientStore(folder),
        config.evaluation.batch_size,
        secure=secure,
    )
