"""Names of what trainers measure."""

from __future__ import annotations

from fedspan.training.trainers.transformers_metrics import translate_metrics


def test_a_metric_of_several_evaluators_is_none_of_fedspan_s() -> None:
    several = {"dev_spearman_cosine": 0.2, "test_spearman_cosine": 0.4}
    values = {**several, "cosine_ndcg@10": 0.5, "search_cosine_recall@10": 0.6, "rewards/accuracies": 0.7}
    expected = {**several, "ndcg_at_10": 0.5, "recall_at_10": 0.6, "reward_accuracy": 0.7}
    assert translate_metrics(values) == expected
    own = {"spearman": 0.1, "dev_spearman_cosine": 0.2, "rewards/margins": 1.0, "reward_margin": 2.0}
    assert translate_metrics(own) == own
