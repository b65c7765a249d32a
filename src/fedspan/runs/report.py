"""The summary of a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RunReport"]


@dataclass(frozen=True)
class RunReport:
    """The summary of a finished run; ``report.json`` holds the same.

    Args:
        method: Registry key of the method, with those of its wrappers: ``fedit+fedprox``.
        task: Kind of problem.
        metric: The metric that rounds were compared by.
        rounds: Number of rounds that were run.
        best_round: The round with the best validation score (the last one if there is no validation part).
        scores: Scores of the best round's models: ``test`` (held-out set; mean over clients for personal methods),
            ``clients`` (own test parts: mean, worst).
        by_client: Metrics of the best round on each client's own test part.
        bytes: Serialized bytes of the training, ``down`` and ``up``.
        seconds: Wall-clock time of the rounds.
        baselines: Scores of local-only and centralized training, if requested.
        adapters: Folders of the exported adapters, relative to the run folder, by client id, or under ``global``.
        examples: Predictions on a few held-out texts.
        privacy: The spent privacy budget (``epsilon``, ``delta``) and the settings; empty without ``privacy`` in the
            config.
        other_bytes: Bytes sent for ``evaluate`` and ``export``, ``down`` and ``up``, if clients are remote.
        failures: Failures by client: ``count``, how often its reply did not count, or it was not evaluated or did not
            export, and the ``round`` and ``reason`` of the last failure.
    """

    method: str
    task: str
    metric: str
    rounds: int
    best_round: int
    scores: Mapping[str, Any]
    by_client: Mapping[str, Mapping[str, float]]
    bytes: Mapping[str, int]
    seconds: float
    baselines: Mapping[str, Any] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    examples: tuple[Mapping[str, str], ...] = ()
    privacy: Mapping[str, Any] = field(default_factory=dict)
    other_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    failures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
