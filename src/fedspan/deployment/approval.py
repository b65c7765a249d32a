"""Approval of jobs by a node's operator: a node does nothing for a run before that, unless ``limits.approve`` is auto.

A job is a run's name with its whole config and the files of the base model that the server offers. If a server changes
one of them, it is another job, which needs an approval of its own. Requests and decisions are files in ``jobs/`` of the
node's folder, so that ``fedspan approve`` reaches a node at work.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from fedspan.config.node import NodeConfig
from fedspan.deployment.base_offers import compute_offer_digest
from fedspan.deployment.columns import describe_columns
from fedspan.deployment.handshake import Invitation, get_minor_release, parse_run_config
from fedspan.errors import FedspanError, escape_controls
from fedspan.files import convert_disk_errors, from_json, read_bytes, to_json, write_atomic
from fedspan.logs import AuditLog

_FOLDER = "jobs"
_WAITING = 32
"""Number of jobs that may wait for a decision; further ones are refused, so that no server fills the disk."""

_LONGEST = 200
"""Number of characters of a value that a summary shows."""


def _list_fields(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


SHOWN: Mapping[str, tuple[str, ...]] = {
    "task": ("task", "task_options"),
    "problem": _list_fields("data", "labels label_separator prompt chat system packing"),
    "model": _list_fields("model", "name revision adapter pretrained dtype quantization pooling pooling_normalize"),
    "input": _list_fields("model", "max_length image_size"),
    "adapted layers": _list_fields("model", "target_modules exclude_modules layers_to_transform layers_pattern"),
    "trained in full": _list_fields("model", "modules_to_save extras extras_lr_scale"),
    "method": ("method.*",),
    "federation": (
        "partition.clients",
        *_list_fields("federation", "rounds clients_per_round over_select weights ranks scaling buffered late_joiners"),
    ),
    "training": ("training.*",),
    "privacy": ("privacy.*",),
    "secure aggregation": ("federation.secure",),
    "evaluation": ("evaluation.*",),
    "head": ("model.head_init", "model.head_rounds"),
}
"""The fields of a config that decide what leaves a node, by the lines of a summary; `*`: all of a section."""

SILENT = frozenset(
    {
        *("seed", "device", "threads", "deterministic", "simulation", "cluster", "baselines", "centralized_lr"),
        *_list_fields("model", "device_map max_memory attention gradient_checkpointing"),
        *_list_fields(
            "federation", "early_stopping final_rounds max_weight_ratio reduction clip_ratio max_norm trim min_replies"
        ),
        *_list_fields("federation", "deadline max_missed_rounds reconnect_timeout retries require_tags min_examples"),
        *_list_fields("federation", "message_mib max_norm_ratio"),
        *("engine.*", "data.*", "partition.*"),
    }
)
"""Fields that do not change what leaves a node: they are about machines or the server, or the node's file has them."""

_NOTHING: Mapping[str, str] = {
    "input": "as the node's own trainer reads it",
    "adapted layers": "PEFT's default for the model",
    "privacy": "none: updates are sent without noise",
    "secure aggregation": "none: the server sees this node's updates",
}


class NotApprovedError(FedspanError):
    """The operator has not decided about a job yet.

    Attributes:
        job: The beginning of it, which is enough for ``fedspan approve``.
    """

    def __init__(self, job: str) -> None:
        self.job = job[:12]
        problem = f"the node's operator has to approve job {self.job} first (on the node: fedspan approve)"
        super().__init__("limits.approve", job, problem=problem)


@dataclass(frozen=True)
class JobRequest:
    """A job that a server asked for.

    Args:
        job: SHA-256 of the run's name, config and offered base model.
        requested_at: Time of the request, UTC.
        decision: The operator's decision; None: none yet.
        base_sha256: Digest of the offer of a base model, over the names, sizes and SHA-256 of its files; empty: the
            server offers none.
        base_bytes: Size of the offered files, in bytes.
    """

    job: str
    run: str
    config: Mapping[str, Any]
    requested_at: str
    decision: Literal["approved", "refused"] | None = None
    reason: str = ""
    base_sha256: str = ""
    base_bytes: int = 0

    def summarize(self, node: NodeConfig) -> dict[str, str]:
        """Return what the job asks for, as text that a terminal can show: what a decision depends on, in few lines."""
        try:
            values = parse_run_config(self.config)
        except FedspanError as error:  # of another version
            facts = {"run": self.run, "problem": f"this version cannot read its config: {error}"}
            return {name: escape_controls(value) for name, value in {**facts, "decision": self.decision or ""}.items()}
        config = values.model_dump(mode="json")  # with the defaults of what the server left out
        if values.training.local_steps is not None:
            del config["training"]["local_epochs"]  # steps replace epochs
        if not node.data:  # a trainer has batches and inputs of its own
            config["model"]["max_length"] = config["evaluation"]["batch_size"] = None
            config["training"] |= dict.fromkeys(("batch_size", "gradient_accumulation_steps", "group_by_length"))
        offer = f"{self.base_bytes / 2**20:.1f} MiB, SHA-256 of its files {self.base_sha256}"
        facts = {
            "run": self.run,
            "requested": self.requested_at,
            "columns": describe_columns(node, self.config),
            "offered model": offer if self.base_sha256 else "none: this node has its own copy",
            **{title: _format_fields(config, fields) or _NOTHING.get(title, "none") for title, fields in SHOWN.items()},
            "decision": self.decision or "waits for fedspan approve",
        }
        return {name: escape_controls(value) for name, value in facts.items()}

    def format_settings(self) -> str:
        """Return the whole config as YAML that a terminal can show."""
        text = yaml.safe_dump(dict(self.config), sort_keys=False, allow_unicode=True)
        return "\n".join(escape_controls(line) for line in text.splitlines())


def _format_fields(config: Mapping[str, Any], fields: Collection[str]) -> str:
    """Return the fields of a config that are set, each as name and value; a long value is cut."""
    pairs: list[str] = []
    for field in fields:
        section, _, name = field.rpartition(".")
        values = (config.get(section) or {}) if section else config
        if name == "*":
            pairs += [f"{key} {_format_value(value)}" for key, value in values.items() if _is_set(value)]
        elif _is_set(value := values.get(name)):
            pairs.append(f"{name} {_format_value(value)}")
    return ", ".join(pairs)


def _is_set(value: object) -> bool:
    return value not in (None, "", [], {})


def _format_value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... (--settings shows all)"


def compute_job_digest(invitation: Invitation) -> str:
    """Return the SHA-256 that names the job of an invitation."""
    values = [invitation.run, get_minor_release(invitation.version), invitation.config]
    if invitation.base_files:
        values.append(compute_offer_digest(invitation.base_files))
    content = json.dumps(values)
    return hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()


class Approvals:
    """The requests of servers and the operator's decisions, in a node's folder."""

    def __init__(self, folder: Path, audit: AuditLog) -> None:
        self.folder, self.audit = folder, audit

    def require(self, invitation: Invitation) -> None:
        """Check that the operator approved the job of an invitation; a new one is stored for the operator.

        Raises:
            NotApprovedError: If there is no decision yet.
            FedspanError: If the operator refused, or too many jobs wait.
        """
        job = compute_job_digest(invitation)
        path = self._build_path(job)
        if not path.is_file():
            self._ask(job, invitation)
        request = self._read(path)
        if request.decision == "refused":
            reason = f": {request.reason}" if request.reason else ""
            raise FedspanError("limits.approve", job, problem=f"the node's operator refused job {job[:12]}{reason}")
        if request.decision is None:
            raise NotApprovedError(job)

    def _ask(self, job: str, invitation: Invitation) -> None:
        if sum(request.decision is None for request in self.list_requests()) >= _WAITING:
            problem = f"{_WAITING} jobs are already waiting for the operator of this node"
            raise FedspanError("limits.approve", job, problem=problem)
        requested_at = datetime.now(UTC).isoformat(timespec="seconds")
        files = invitation.base_files
        request = JobRequest(job, invitation.run, invitation.read_values(), requested_at)
        if files:
            size = sum(file.size for file in files)
            request = replace(request, base_sha256=compute_offer_digest(files), base_bytes=size)
        self._store(request)
        self.audit.write("job requested", job=job, run=escape_controls(invitation.run))

    def list_requests(self) -> list[JobRequest]:
        """Return all requests, the oldest first."""
        requests = [self._read(path) for path in sorted((self.folder / _FOLDER).glob("*.json"))]
        return sorted(requests, key=lambda request: (request.requested_at, request.job))

    def decide(self, job: str, decision: Literal["approved", "refused"], reason: str = "") -> JobRequest:
        """Record the operator's decision about a job; a later one replaces it, also while the run is at work.

        Args:
            job: The beginning of the job's name, long enough to mean one job.

        Raises:
            FedspanError: If it means no job, or several.
        """
        matches = [request for request in self.list_requests() if job and request.job.startswith(job)]
        if len(matches) != 1:
            names = ", ".join(request.job[:16] for request in self.list_requests()) or "none"
            raise FedspanError("JOB", job, f"the beginning of one of these: {names}")
        decided = replace(matches[0], decision=decision, reason=reason[:500])
        self.audit.write(f"job {decision}", job=decided.job, run=escape_controls(decided.run), reason=decided.reason)
        self._store(decided)
        return decided

    def _build_path(self, job: str) -> Path:
        return self.folder / _FOLDER / f"{job}.json"

    def _store(self, request: JobRequest) -> None:
        with convert_disk_errors(self.folder, "free some space on the node"):
            (self.folder / _FOLDER).mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomic(
                self._build_path(request.job), to_json(vars(request), indent=1).encode(errors="replace"), 0o600
            )

    def _read(self, path: Path) -> JobRequest:
        try:
            values = from_json(read_bytes(path))
        except ValueError:
            values = None
        match values:
            case {
                "job": str() as job,
                "run": str() as run,
                "config": dict() as config,
                "requested_at": str() as requested_at,
                "decision": None | "approved" | "refused" as decision,
                "reason": str() as reason,
                "base_sha256": str() as base_sha256,
                "base_bytes": int() as base_bytes,
            } if job == path.stem and re.fullmatch("[0-9a-f]{64}", job):
                return JobRequest(
                    *(job, run, config, requested_at, decision, reason, base_sha256, base_bytes)  # pyright: ignore[reportArgumentType]
                )
            case _:
                raise FedspanError(str(path), None, problem="the file is damaged. Remove it, and decide again")
