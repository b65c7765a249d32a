"""Notes beside a run's scores: what a constant prediction reaches, and how to continue a run that still improves."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np

from fedspan.runs.predictions import Items
from fedspan.runs.report import RunReport

__all__ = ["describe_extension", "describe_majority"]


def describe_majority(metric: str, items: Items | None) -> str:
    """Describe the accuracy of always predicting the most frequent class; empty for other metrics."""
    if metric != "accuracy" or items is None:
        return ""
    share = np.bincount(items.targets).max() / len(items.targets)
    return f"Majority class: {100 * share:.1f} % of the held-out examples have the most frequent label."


def describe_extension(report: RunReport, folder: Path) -> str:
    """Say how to extend a run whose last round is the best by validation; empty for another run."""
    # Under privacy more rounds spend more, which is the owners' decision.
    if report.privacy or not report.selected or not report.rounds or report.best_round != report.rounds:
        return ""
    rounds = report.rounds + max(1, report.rounds // 2)
    resumed = f"fedspan run --resume {shlex.quote(str(folder))} --set federation.rounds={rounds}"
    return f"Validation still improves: extend with {resumed}"
