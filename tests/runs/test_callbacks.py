"""The choice of the best round: by the metric, then by the loss, then the later one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import fedspan
from fedspan.runs.callbacks import rate_round
from fedspan.tasks.metrics import METRICS_OF
from helpers import tiny


def best_of(metric: str, *scores: dict[str, float] | None) -> int:
    """The best of rounds with these validation scores."""
    return max(rate_round(metric, number, one) for number, one in enumerate(scores, 1)).round


def test_the_metric_decides() -> None:
    assert best_of("accuracy", {"accuracy": 0.6, "loss": 9.0}, {"accuracy": 0.5, "loss": 0.1}) == 1
    assert best_of("perplexity", {"perplexity": 3.0, "loss": 1.1}, {"perplexity": 2.0, "loss": 0.7}) == 2


def test_the_loss_decides_between_equal_scores_and_then_the_later_round() -> None:
    tied = [{"accuracy": 0.6, "loss": loss} for loss in (0.9, 0.3, 0.5)]
    assert best_of("accuracy", *tied) == 2
    assert best_of("accuracy", *tied, tied[1]) == 4
    assert best_of("accuracy", *tied, {"accuracy": 0.6}) == 2  # without a loss


def test_without_validation_parts_the_last_round_is_the_best() -> None:
    assert best_of("accuracy", None, None, None) == 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308])
def test_values_that_are_not_finite_can_be_stored_and_are_not_the_best(value: float) -> None:
    rated = rate_round("loss", 1, {"loss": value})
    assert all(math.isfinite(number) for number in rated)
    assert rate_round("loss", 2, {"loss": 5.0}) > rated or value == -math.inf


def test_a_round_must_be_better_than_the_start_by_more_than_noise() -> None:
    def best(*losses: float) -> int:
        return max(rate_round("loss", number, {"loss": loss}) for number, loss in enumerate(losses)).round

    assert best(0.500, 0.497, 0.496) == 0
    assert best(0.500, 0.497, 0.494, 0.493) == 3  # later rounds are compared as they are
    scores = [rate_round("accuracy", number, {"accuracy": 0.5, "loss": 0.5 - 0.001 * number}) for number in (0, 1)]
    assert max(scores).round == 1  # the metric decides, and equal scores go to the lower loss


def test_every_task_measures_the_loss() -> None:
    assert all("loss" in metrics for metrics in METRICS_OF.values())


def test_a_run_and_its_baselines_choose_by_these_rules(tiny_folder: Path, tmp_path: Path) -> None:
    """Few examples give many ties; the first of tied rounds was exported once."""
    values = tiny.settings(tiny_folder, federation={"rounds": 5}, training={"lr": 2e-3})
    report = fedspan.run({**values, "baselines": ["local", "centralized"]}, tmp_path / "run")
    rows = [json.loads(line)["validation"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = [(row["accuracy"], -row["loss"]) for row in rows]
    assert scores[report.best_round - 1] == max(scores)
    assert report.scores["validation"] == pytest.approx(rows[report.best_round - 1])
    first = next(at for at, score in enumerate(scores, 1) if score[0] == max(scores)[0])
    assert report.best_round >= first
