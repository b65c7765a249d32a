"""Metrics: the names that reports use, the direction that is better, and the format of displayed values."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from fedspan.errors import FedspanError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Metric:
    """One metric.

    Args:
        title: Name in tables.
        greater_is_better: Whether a greater value is better.
        is_percentage: Whether the metric is a share, shown in percent.
        minimum: Smallest possible value.
        maximum: Largest possible value; for metrics without an upper bound, far above any value of a trained model.
        is_exponential_of_loss: Whether the metric is the exponential of the loss.
        is_mean: Whether the metric is a mean over examples, each of which contributes a number within the bounds.

    Examples:
        >>> fedspan.Metric("absolute error", greater_is_better=False, maximum=1e15)
    """

    title: str
    greater_is_better: bool
    is_percentage: bool = False
    minimum: float = 0.0
    maximum: float = 1.0
    is_exponential_of_loss: bool = False
    is_mean: bool = False

    @property
    def is_bounded(self) -> bool:
        """Whether the metric itself has an upper bound."""
        return self.maximum < _UNBOUNDED

    def is_possible(self, value: float) -> bool:
        """Check whether a value is within the bounds, up to rounding; NaN is not."""
        return self.minimum - _ROUNDING <= value <= self.maximum + _ROUNDING


_UNBOUNDED = 1e15
_ROUNDING = 1e-6


_metrics: dict[str, Metric] = {
    "accuracy": Metric("accuracy", True, is_percentage=True, is_mean=True),
    "macro_f1": Metric("macro-F1", True, is_percentage=True),
    "f1": Metric("F1", True, is_percentage=True),
    "matthews": Metric("Matthews", True, minimum=-1.0),
    "pearson": Metric("Pearson", True, minimum=-1.0),
    "spearman": Metric("Spearman", True, minimum=-1.0),
    "exact_match": Metric("exact match", True, is_percentage=True, is_mean=True),
    "token_accuracy": Metric("token accuracy", True, is_percentage=True),
    "perplexity": Metric("perplexity", False, minimum=1.0, maximum=_UNBOUNDED, is_exponential_of_loss=True),
    "loss": Metric("loss", False, maximum=_UNBOUNDED),
}
METRICS: Mapping[str, Metric] = MappingProxyType(_metrics)
"""Metrics by name, in the order of tables."""


def is_metric_name(name: str) -> bool:
    """Check whether a metric can have a name: a Python identifier in lower case."""
    return name.isidentifier() and name == name.lower()


def register_metrics(metrics: Mapping[str, Metric]) -> None:
    """Add metrics, for the tasks and the trainers that compute them: all, or none if one is refused.

    Register them in every process that reads reports with them; a task's ``custom_metrics`` are registered with it.

    Args:
        metrics: Title, direction and bounds by the name in reports, a Python identifier in lower case.

    Examples:
        >>> fedspan.register_metrics({"bleu": fedspan.Metric("BLEU", greater_is_better=True, maximum=100.0)})

    Raises:
        FedspanError: If a name is no identifier, or belongs to another metric.
    """
    replace_metrics(metrics, frozenset())


def replace_metrics(metrics: Mapping[str, Metric], own: Set[str]) -> None:
    """Add metrics, or change those of a task that is registered again (``register_metrics``).

    Args:
        metrics: Title, direction and bounds by the name in reports.
        own: Names of the metrics that may change.

    Raises:
        FedspanError: If a name is no identifier, or belongs to another metric.
    """
    for name, metric in metrics.items():
        if not is_metric_name(name):
            raise FedspanError("metric", name, "a Python identifier in lower case")
        if name not in own and _metrics.get(name, metric) != metric:
            raise FedspanError("metric", name, problem=f"{name!r} is already the name of another metric")
    _metrics.update(metrics)


def drop_undefined(values: Mapping[str, float]) -> dict[str, float]:
    """Remove undefined values: a correlation of one example, or of equal values."""
    return {name: value for name, value in values.items() if not math.isnan(value)}


def correlate(kind: Literal["pearson", "spearman"], values: np.ndarray, targets: np.ndarray) -> float:
    """Compute a correlation; NaN where it is undefined."""
    from scipy import stats  # slow to import, and few tasks need it

    if len(values) < 2:
        return math.nan
    with warnings.catch_warnings():  # about constant input, which gives NaN
        warnings.simplefilter("ignore")
        return float((stats.pearsonr if kind == "pearson" else stats.spearmanr)(values, targets)[0])  # pyright: ignore


def compute_score(metric: str, values: Mapping[str, float]) -> float:
    """Compute a score, which is greater if the metric is better, and minus infinity if the metric has no value."""
    if metric not in values:
        return -math.inf
    return values[metric] if METRICS[metric].greater_is_better else -values[metric]


def order_metrics(names: Iterable[str]) -> list[str]:
    """Return the names that are metrics, in the order of tables."""
    selected = set(names)
    return [name for name in METRICS if name in selected]
