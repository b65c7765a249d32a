"""A run in which a node participates: its config with the node's data, its model, and its limits on every order."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedspan.assembly.federation import wrap_method
from fedspan.assembly.run import LocalRun
from fedspan.assembly.server import build_method, secure_client
from fedspan.clients.host import Host
from fedspan.clients.job_checkpoints import JobCheckpoints
from fedspan.clients.metric_noise import MetricLimits, round_count
from fedspan.clients.statistics import StatisticsLimits
from fedspan.clients.store import DiskClientStore
from fedspan.config import RunConfig, parse_config
from fedspan.config.node import NodeConfig
from fedspan.core.base import BaseUpdate
from fedspan.core.heads import HeadKind
from fedspan.core.values import Job
from fedspan.crypto import require_packages
from fedspan.data.content import compute_content_digest
from fedspan.deployment.base_checks import require_weights_of_config
from fedspan.deployment.base_files import find_received_base, is_received
from fedspan.deployment.base_offers import find_local_base
from fedspan.deployment.handshake import Invitation, build_node_values, compute_base_digest, compute_extras_digest
from fedspan.deployment.limits import (
    OrderTerms,
    list_config_ranks,
    refuse_statistics,
    require_frozen_words,
    require_workload,
)
from fedspan.deployment.node_folder import SESSIONS, STATE, SUMS, TRAINING, get_run_folder
from fedspan.errors import FedspanError
from fedspan.federation.protocol import ScoredPart
from fedspan.files import convert_disk_errors
from fedspan.runs.privacy_budget import generate_key, has_key, load_noise_key, store_noise_key
from fedspan.runs.trained_models import write_model
from fedspan.training.stages import Stages

Load = Callable[[RunConfig, None, bytes | None, Stages], LocalRun]
"""Loads a run from its config, the secret key of its noise, if any, and the stages that it reports to."""

log = logging.getLogger("fedspan.node")


@dataclass(frozen=True)
class JoinedRun:
    """A run in which this node participates, with its model loaded.

    Args:
        base: Digest of the frozen model.
        extras: Digest of the paths of what trains in full.
        context: What replies depended on besides their orders when it was loaded (``_compute_context``).
    """

    host: Host
    base: str
    extras: str
    terms: OrderTerms
    context: str


class JoinedRunBuilder:
    """Builds runs on a node, as its operator's file allows.

    Args:
        compute_content: Returns the digest of the training data; None: a trainer's own.
    """

    def __init__(self, node: NodeConfig, load: Load, stages: Stages, compute_content: Callable[[], str | None]) -> None:
        self.node, self._load_local, self._stages = node, load, stages
        self.folder, self._compute_content = Path(node.folder), compute_content
        self._start = secrets.token_hex(16)

    def build(self, invitation: Invitation) -> JoinedRun:
        """Build a run, and load its model and this node's data."""
        config = parse_config(self.build_values(invitation))
        folder = get_run_folder(self.folder, invitation.run)
        context = self._compute_context(invitation)  # before the data are read, so that a change in between is noticed
        if is_received(self.node, config.model.name):
            require_weights_of_config(Path(config.model.name))
        local = self._load_local(config, None, self._load_key(folder, config), self._stages)
        separator = local.task_settings.columns.get("label_separator")
        if separator is not None and config.data.label_separator is None:
            problem = "several labels in a text need a named separator in a deployment, because files differ"
            expected = f"the separator of the labels, such as {separator!r}"
            raise FedspanError("data.label_separator", None, expected, problem=problem)
        (data,) = local.clients.values()
        sizes: dict[ScoredPart, int] = {}
        if local.partition is not None:  # with the examples whose labels the run does not have
            (part,) = local.partition.clients
            sizes = {"validation": len(part.validation), "test": len(part.test)}
            if ignored := len(part.train) - len(data.train):
                log.warning(
                    "%d of %d training examples have labels that %s does not have, and are left out",
                    *(ignored, len(part.train), invitation.run),
                )
        own = data.client.examples
        declared = self.node.examples or round_count(own)
        weight = 1.0 if config.federation.weights == "uniform" else float(declared)
        data = replace(data, client=replace(data.client, id=self.node.id, examples=declared, weight=weight))
        require_frozen_words(self.node.limits, config, local.engine.adapted)
        require_workload(config, own, self.node.limits, wrap_method(local), local.count_passes)
        store = DiskClientStore(folder / STATE)
        server_config = parse_config({**invitation.read_values(), "data": config.data.model_dump(mode="json")})
        plain = build_method(server_config, local.engine.adapted.spec)
        method = wrap_method(replace(local, method=plain))

        def export(job: Job, base: BaseUpdate, round: int) -> None:
            write_model(local, job, base, folder / "adapter", round, self.node.id)
            log.info("round %d: own adapter written to %s", round, folder / "adapter")

        ranks = list_config_ranks(server_config.federation, plain.r, self.node.id)
        terms = OrderTerms(server_config, plain, data.client, ranks, invitation.digest)
        owner = dict[str, Any]()
        sums = self.folder / SUMS / hashlib.sha256(self.node.data_id.encode()).hexdigest()[:32]
        if config.federation.secure is not None:
            owner = {
                "min_clients": self.node.min_secure_clients,
                "colluders": self.node.limits.colluders,
                "identity": self._load_identity(),
                "known": self.node.peers,
                "check": terms.require_agreement,
            }
        sessions = get_run_folder(self.folder / SESSIONS, invitation.run)
        secure = secure_client(config, self.node.id, sessions, sums, **owner)
        limits, kind = self.node.limits, config.head_kind[0]
        announced: tuple[HeadKind, ...] = () if kind is None else (kind,)
        statistics = StatisticsLimits(
            *(refuse_statistics(limits, config), limits.class_examples, announced, limits.statistics_examples)
        )
        host = Host(
            method,
            local.engine,
            {self.node.id: data},
            local.train,
            store,
            config.evaluation.batch_size,
            export,
            None if secure is None else {self.node.id: secure},
            limits=statistics,
            checkpoints=_build_checkpoints(folder / TRAINING, config, context),
            agreed=invitation.digest,
            metric_limits=MetricLimits(
                limits.evaluation_epsilon, limits.evaluation_examples, sizes, config.task_definition.metrics
            ),
            train_examples=limits.train_examples,
            min_batch=limits.min_batch,
        )
        model = local.model
        return JoinedRun(host, compute_base_digest(model), compute_extras_digest(model), terms, context)

    def build_values(self, invitation: Invitation) -> dict[str, object]:
        """Return a run's config for this node, with this node's data and its copies of models."""
        node = self.node.model_dump(include={"data", "validation", "test", "split_seed", "device", "threads"})
        values = build_node_values(invitation.read_values(), node)
        model = dict(values.get("model") or {})
        for field in ("name", "adapter"):
            if model.get(field) in self.node.models:
                model[field] = self.node.models[model[field]]
        received = None
        if model.get("name") == (invitation.read_values().get("model") or {}).get("name"):  # not the node's own folder
            received = find_received_base(self.node, invitation.base_files)
        if received is not None and find_local_base(str(model["name"]), model.get("revision")) is None:
            model["name"] = str(received)
        return {**values, "model": model}

    def _compute_context(self, invitation: Invitation) -> str:
        """Return a digest of what training and replies depend on besides the order: run, data and node file.

        Progress and replies with another context are not used: the owner may have withdrawn an example or set a limit.
        What a trainer reads is not known, so these do not outlive its process.
        """
        content, test = self._compute_content() or self._start, self.node.data.get("test")
        test_content = compute_content_digest(test, "data.test") if isinstance(test, str) else None
        text = f"{invitation.digest} {content} {test_content} {self.node.model_dump_json()}"
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()

    def _load_identity(self) -> Any:
        """Return the key that signs this node's session keys of secure aggregation; None: it has no key."""
        if self.node.key is None:
            return None
        require_packages()
        from fedspan.crypto.identity import load_identity  # needs fedspan[secagg]

        try:
            return load_identity(Path(self.node.key))
        except (OSError, ValueError) as error:
            raise FedspanError("key", self.node.key, f"an elliptic-curve key without a passphrase ({error})") from error

    def _load_key(self, folder: Path, config: RunConfig) -> bytes | None:
        """Return the secret key of this node's noise in a run; it is created at the start of the run."""
        key = generate_key(config)
        if key is None:
            return None
        with convert_disk_errors(self.folder, "free some space on the node"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not has_key(folder):
            store_noise_key(folder, key)
        return load_noise_key(folder, config)


def _build_checkpoints(folder: Path, config: RunConfig, context: str) -> JobCheckpoints | None:
    """Build the storage of a run's progress within a round; None: the config asks for none."""
    steps, minutes = config.training.checkpoint_steps, config.training.checkpoint_minutes
    return None if steps is None and minutes is None else JobCheckpoints(folder, context, steps, minutes)
