"""Metrics that leave a data owner: means over examples, with noise that hides each of them.

The server chooses the model, so a metric is the answer to a question about the examples, and rounding hides nothing: a
server moves a bias until the rounded metric changes, and then learns with every further answer about one example. So
the sums behind the metrics get noise (the Laplace mechanism, Dwork et al., TCC 2006, in its discrete form: Ghosh et
al., STOC 2009), whose scale is the most that an example may contribute, over epsilon. Metrics that are no means over
examples have no such bound and stay.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from fedspan.federation.protocol import ScoredPart, Scores
from fedspan.tasks.losses import BoundsExamples, get_loss_bound
from fedspan.tasks.metrics import METRICS
from fedspan.tasks.task import Task
from fedspan.tasks.trainer import TrainerTask
from fedspan.training.jobs import is_explained

log = logging.getLogger("fedspan.node")

_STEPS = 1024
"""Steps between the least and the most that an example contributes. The noise of whole numbers has no low bits, which
for floats would depend on the sum."""


@dataclass(frozen=True)
class MetricLimits:
    """A data owner's limits on metrics and losses.

    Args:
        epsilon: Epsilon of an evaluation of a part; None: metrics and training losses are sent as measured.
        examples: Minimum number of examples of a part.
        sizes: Numbers of examples of the parts, with those that no run evaluates (unknown labels); empty: all are.
        metrics: Names of the metrics of the run's task, which an evaluation with noise does not find out.
    """

    epsilon: float | None = None
    examples: int = 1
    sizes: Mapping[ScoredPart, int] = field(default_factory=dict)
    metrics: Collection[str] = ()


def draw_noise(scale: float) -> int:
    """Draw a whole number z with a probability proportional to exp(-abs(z) / scale), from the system's generator."""
    up, down = (int(-math.log(1.0 - secrets.SystemRandom().random()) * scale) for _ in range(2))
    return up - down


def list_released_metrics(task: Task) -> list[str]:
    """Return the metrics of a task that an evaluation releases: the run's own and the loss, if they are means.

    Every further one would need more noise in each. Nothing bounds what an example adds to those of a user's trainer.
    """
    if isinstance(task, TrainerTask):
        return []
    names = ["loss"] if isinstance(task, BoundsExamples) else []
    metric = getattr(task, "metric", "loss")
    return names + [metric] * (metric in METRICS and METRICS[metric].is_mean)


def round_count(count: int) -> int:
    """Round a number of examples down to two significant digits."""
    step = 10 ** max(0, len(str(count)) - 2)
    return count // step * step


def measure(
    evaluate: Callable[[np.ndarray, bool], dict[str, float]], indices: np.ndarray, bounded: bool
) -> tuple[dict[str, float], int]:
    """Return the metrics of examples and their number, under a bound without those on which the model fails."""
    try:
        return evaluate(indices, bounded), len(indices)
    except Exception as error:
        if not bounded or is_explained(error):
            raise
        log.warning("an example on which the model fails has the worst metrics: %s", error, exc_info=error)
        if len(indices) == 1:
            return {}, 0
        kept = [row for row in np.split(indices, len(indices)) if measure(evaluate, row, bounded)[1]]
        return measure(evaluate, np.concatenate(kept), bounded) if 0 < len(kept) < len(indices) else ({}, 0)


def score_parts(
    parts: Mapping[ScoredPart, np.ndarray],
    measure: Callable[[np.ndarray, bool], tuple[Mapping[str, float], int]],
    limits: MetricLimits,
    task: Task,
) -> dict[ScoredPart, Scores]:
    """Return what an evaluation releases of each part that is large enough.

    Args:
        parts: Indices of the examples of each part.
        measure: Measures the model, of indices of examples and of whether the loss is bounded (``Engine.evaluate``);
            with the number of examples that it measured.
    """
    scores, bounded = dict[ScoredPart, Scores](), limits.epsilon is not None
    for name, indices in parts.items():
        size = limits.sizes.get(name, len(indices))
        if size < max(1, limits.examples) or (bounded and not list_released_metrics(task)):
            continue  # nor is the model evaluated, which may fail on an example
        metrics, measured = measure(indices, bounded) if len(indices) else ({}, 0)
        if limits.epsilon is not None:
            # Whether a metric is sent must not depend on it: one example can make a perplexity infinite.
            metrics = {**dict.fromkeys(limits.metrics, math.inf), **metrics}
            scores[name] = add_noise(metrics, measured, size, limits.epsilon, task)
        elif len(indices):
            finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
            scores[name] = {**finite, "examples": float(len(indices))}
    return scores


def add_noise(
    metrics: Mapping[str, float], measured: int, examples: int, epsilon: float, task: Task
) -> dict[str, float]:
    """Return what an evaluation releases of the metrics of a part, with its rounded number of ``examples``.

    Examples that were not measured count with the worst value, so that nothing depends on how many there are.

    Args:
        metrics: Means over the measured examples; no example contributes more than the task's bound to the loss. Others
            are not released but for perplexities, which follow from the noisy loss; so they may be infinite.
        epsilon: Epsilon of the release: that of all metrics together, where one example is replaced by another.
    """
    names, released = list_released_metrics(task), {"examples": float(round_count(examples))}
    for name in names:
        metric = METRICS[name]
        low, high = (0.0, get_loss_bound(task)) if name == "loss" else (metric.minimum, metric.maximum)
        worst = low if metric.greater_is_better else high
        value = metrics.get(name, worst)
        mean = ((value if math.isfinite(value) else worst) * measured + worst * (examples - measured)) / examples
        total = round((mean - low) / (high - low) * examples * _STEPS)
        noisy = total + draw_noise((_STEPS + 1) * len(names) / epsilon)  # 1: the sum is rounded to a step
        share = min(max(noisy, 0), examples * _STEPS) / (examples * _STEPS)
        released[name] = low + (high - low) * share
    if "loss" in released:
        for name in metrics:
            if name in METRICS and METRICS[name].is_exponential_of_loss:
                released[name] = math.exp(released["loss"])
    return released
