"""Runs whose clients train on the workers of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedspan.assembly.engine import build_trainer, choose_device
from fedspan.assembly.federation import build_clients, build_simulated_transport
from fedspan.assembly.run import Prepared
from fedspan.clients.host import Host
from fedspan.config import RunConfig
from fedspan.data.partition import Partition
from fedspan.federation.evaluation import Evaluator
from fedspan.tasks.task import Examples
from fedspan.training.references import copy_reference
from fedspan.transports.in_process import InProcess

if TYPE_CHECKING:
    from fedspan.transports.ray.team import Team


@dataclass(frozen=True)
class WorkerKit:
    """Everything that a worker builds its host from.

    Args:
        targets: Paths of the target layers, which the driver found by PEFT's rules.
        examples: The encoded examples, whose arrays the workers of a machine share.
    """

    config: RunConfig
    labels: tuple[str, ...]
    targets: tuple[str, ...]
    partition: Partition
    examples: Examples
    key: bytes | None


def build_host(kit: WorkerKit) -> Host:
    """Build the host of a worker, in the worker's process."""
    config = kit.config
    assert config.cluster is not None
    device = choose_device("cuda" if config.cluster.gpus_per_worker else "cpu")
    clients = len(kit.partition.clients)
    trainer = build_trainer(config, kit.labels, clients, device, kit.key, targets=kit.targets)
    examples = copy_reference(trainer.task, kit.examples)
    return build_simulated_transport(trainer, build_clients(config, trainer.method, kit.partition), examples).host


def connect_workers(
    prepared: Prepared, team: Team, key: bytes | None = None, build: Callable[[WorkerKit], Host] = build_host
) -> Prepared:
    """Build the workers' hosts, and connect a prepared run to them."""
    from fedspan.transports.ray.transport import ClusterPredictor, ClusterTransport

    config, local_federation, partition = prepared.config, prepared.federation, prepared.partition
    local = local_federation.transport
    assert partition is not None
    assert isinstance(local, InProcess)
    with prepared.engine.stages.stage("workers", len(team.handles), "workers"):
        targets = tuple(prepared.model.adapted.layers)
        team.build(build, WorkerKit(config, prepared.labels, targets, partition, prepared.train, key))
    federation = local_federation.replace_transport(ClusterTransport(local.host, team, local.conditions))
    predictor = ClusterPredictor(team, prepared.engine, federation.examples)
    evaluator = Evaluator(federation, config.evaluation.batch_size, config.evaluation.clients, predictor)
    return replace(prepared, federation=federation, evaluator=evaluator)
