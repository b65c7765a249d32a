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
        method: registry key, with those of its wrappers: ``fedit+fedprox``.
        task: kind of problem.
        metric: by which rounds were compared.
        rounds: played.
        best_round: with the best validation score (the last one if there is no validation part).
        scores: of the best round's models: ``test`` (held-out set; mean over clients for personal methods),
            ``clients`` (own test parts: mean, worst).
        by_client: the best round's metrics on each client's own test part.
        bytes: serialized, ``down`` and ``up``, of the training.
        seconds: wall-clock time of the rounds.
        baselines: scores of local-only and centralised training, where asked for.
        adapters: folders of the exported adapters, as seen from the run's, by client id, or under ``global``.
        examples: predictions on a few held-out texts.
        privacy: what was spent (``epsilon``, ``delta``) and how; empty without ``privacy`` in the config.
        other_bytes: where clients are elsewhere, ``down`` and ``up`` of what was sent to ``evaluate`` and ``export``.
        failures: by client, how often its reply did not count, or it was not measured or did not export: ``count``,
            and of the last time ``round`` and ``reason``.
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
