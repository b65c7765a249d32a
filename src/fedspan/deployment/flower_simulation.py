"""Clients of a run in Flower's simulation: each reply may come from another process, which shares the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fedspan.assembly.federation import wrap_method
from fedspan.assembly.run import load_run
from fedspan.assembly.server import secure_client
from fedspan.clients.host import Host
from fedspan.clients.refusals import refuse_any
from fedspan.clients.store import DiskClientStore
from fedspan.federation.protocol import Envelope
from fedspan.federation.secagg.messages import decode_request
from fedspan.run_folder import RunFolder
from fedspan.runs.integrity import read_resolved_config
from fedspan.runs.privacy_budget import load_noise_key
from fedspan.runs.report import read_partition

if TYPE_CHECKING:
    from fedspan.clients.secagg import SecureClient


def get_nodes_folder(run: Path) -> Path:
    """Return the folder where the clients of a simulation store their state."""
    return run / "nodes"


def reply_as(run: str, threads: int, envelope: Envelope) -> Envelope:
    """Reply as a client of a simulated run; a process loads model and data on its first request and caches them."""
    order = decode_request(envelope)
    try:
        host = _load_host(run)
        torch.set_num_threads(threads)  # not the number that the config sets for the whole run
        return host.reply(order)
    except Exception as error:  # any error: the server receives a refusal
        return refuse_any(order, error)


@lru_cache(maxsize=1)
def _load_host(run: str) -> Host:
    run_folder = RunFolder(run)
    config = read_resolved_config(run_folder.path)
    local = load_run(config, read_partition(run), load_noise_key(run_folder.path, config))
    folder = get_nodes_folder(run_folder.path)
    secure: Mapping[str, SecureClient] | None = None
    if config.federation.secure is not None:
        halves = {id: secure_client(config, id, folder) for id in local.clients}
        secure = {id: client for id, client in halves.items() if client is not None}
    return Host(
        wrap_method(local),
        local.engine,
        local.clients,
        local.train,
        DiskClientStore(folder),
        config.evaluation.batch_size,
        secure=secure,
    )
