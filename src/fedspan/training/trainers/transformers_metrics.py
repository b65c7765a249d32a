"""Metrics of a Transformers ``Trainer``, under the names that fedspan's tasks have for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

BOOKKEEPING = (
    *("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "jit_compilation_time"),
    *("epoch", "num_tokens", "num_input_tokens_seen"),
)
"""What an evaluation returns beside metrics."""
_TRL_METRICS = {
    "token_accuracy": "mean_token_accuracy",
    "reward_accuracy": "rewards/accuracies",
    "reward_margin": "rewards/margins",
}
"""What TRL's trainers call the metrics of fedspan's tasks."""
_EVALUATOR_METRICS = {
    "spearman": "spearman_cosine",
    "recall_at_10": "cosine_recall@10",
    "ndcg_at_10": "cosine_ndcg@10",
}
"""What sentence-transformers' evaluators call them, after the evaluator's own name if it has one."""


def split_by_set(measured: Mapping[str, Any], prefixes: Iterable[str]) -> tuple[dict[str, dict[str, float]], set[str]]:
    """Split the measured numbers by evaluation set.

    Args:
        measured: What the trainer returned.
        prefixes: What the names of each set's metrics begin with.

    Returns:
        Numbers by name without prefix, by prefix, and names of the numbers that have none of the prefixes.
    """
    longest_first = sorted(prefixes, key=len, reverse=True)
    by_set: dict[str, dict[str, float]] = {prefix: {} for prefix in longest_first}
    unnamed: set[str] = set()
    for name, value in measured.items():
        if not isinstance(value, int | float):
            continue
        prefix = next((prefix for prefix in longest_first if name.startswith(prefix)), None)
        if prefix is None:
            unnamed.add(name)
        else:
            by_set[prefix][name.removeprefix(prefix)] = value
    return by_set, unnamed


def translate_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Give metrics of TRL and of sentence-transformers' evaluators the names that fedspan's tasks have for them.

    A metric that has fedspan's own name already, or that several evaluators measure, keeps its name.

    Args:
        values: Metrics of one evaluation set by name.
    """
    translated = dict(values)
    for name, other in _TRL_METRICS.items():
        if other in values and name not in values:
            translated[name] = translated.pop(other)
    for name, other in _EVALUATOR_METRICS.items():
        names = [key for key in values if key == other or key.endswith(f"_{other}")]
        if len(names) == 1 and name not in values:
            translated[name] = translated.pop(names[0])
    return translated
