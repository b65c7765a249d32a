"""Runs whose clients train on the workers of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fedspan.clients.host import Host
from fedspan.config import RunConfig
from fedspan.data.partition import Partition
from fedspan.federation.evaluation import Evaluator
from fedspan.federation.federation import Federation
from fedspan.runs.folder import RunFolder
from fedspan.runs.privacy_budget import load_noise_key
from fedspan.runs.session import RunReport
from fedspan.runs.setup import Prepared, build_trainer, choose_device, simulated_federation
from fedspan.tasks.task import Examples
from fedspan.transports.in_process import InProcess

__all__ = ["WorkerKit", "build_host", "cluster_simulation"]


@dataclass(frozen=True)
class WorkerKit:
    """Everything that a worker builds its host from.

    Args:
        config: Config of the run.
        labels: Names of the labels by index.
        partition: The clients' examples.
        examples: The encoded examples, whose arrays the workers of a machine share.
        key: Secret key of the noise, if it has one.
    """

    config: RunConfig
    labels: tuple[str, ...]
    partition: Partition
    examples: Examples
    key: bytes | None


def build_host(kit: WorkerKit) -> Host:
    """Build the host of a worker, in the worker's process.

    Raises:
        FedspanError: If the model cannot be loaded there.
    """
    config = kit.config
    assert config.cluster is not None
    device = choose_device("cuda" if config.cluster.gpus_per_worker else "cpu")
    trainer = build_trainer(config, kit.labels, len(kit.partition.clients), device, kit.key)
    return host_of(simulated_federation(config, trainer, kit.partition, kit.examples, kit.key))


def host_of(federation: Federation) -> Host:
    """Return the host of all clients of a simulation in this process."""
    assert isinstance(federation.transport, InProcess)
    return federation.transport.host


def cluster_simulation(place: RunFolder, prepared: Prepared, played: Callable[[Prepared], RunReport]) -> RunReport:
    """Run a federation with its clients on the workers of a cluster (``runs.session.Host``).

    Raises:
        FedspanError: If there is no cluster or a worker does not start; also any error that ``played`` raises.
    """
    from fedspan.transports.ray.team import Resources, open_team
    from fedspan.transports.ray.transport import ClusterTransport

    config, here = prepared.config, prepared.federation
    wanted, partition, local = config.cluster, prepared.partition, here.transport
    assert wanted is not None
    assert partition is not None
    assert isinstance(local, InProcess)
    resources = Resources(
        wanted.address, wanted.workers, wanted.threads_per_worker, wanted.gpus_per_worker, wanted.start_seconds
    )
    key = load_noise_key(place.path, config)
    kit = WorkerKit(config, prepared.labels, partition, prepared.train, key)
    stages = prepared.engine.stages
    with open_team(resources) as team:
        with stages.stage("workers", wanted.workers, "workers"):
            team.build(build_host, kit)
        transport = ClusterTransport(local.host, team, local.conditions)
        federation = here.with_transport(transport)
        evaluator = Evaluator(federation, config.evaluation.batch_size, config.evaluation.clients)
        return played(replace(prepared, federation=federation, evaluator=evaluator))
