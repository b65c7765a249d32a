"""Metrics of a data owner have noise as large as what an example contributes, and depend on nothing but their sums."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedspan.clients import metric_noise

BOUND = 2.0


def make_task(metric: str = "accuracy", *, has_losses: bool = True) -> Any:
    """A task with a bounded loss, as far as noise is concerned."""
    losses = {"compute_example_losses": lambda *_: None} if has_losses else {}
    return SimpleNamespace(metric=metric, loss_bound=BOUND, **losses)


def release(metrics: dict[str, float], measured: int, examples: int, task: Any = None) -> dict[str, float]:
    return metric_noise.add_noise(metrics, measured, examples, 1.0, task or make_task())


def test_noise_is_geometric_on_both_sides() -> None:
    scale, count = 20.0, 20_000
    draws = [metric_noise.draw_noise(scale) for _ in range(count)]
    assert abs(sum(draws)) / count < 5 * scale * math.sqrt(2 / count)
    assert sum(map(abs, draws)) / count == pytest.approx(scale, rel=0.05)
    ratio = math.exp(-1 / scale)
    assert sum(draw == 0 for draw in draws) / count == pytest.approx((1 - ratio) / (1 + ratio), rel=0.2)


def test_one_example_hardly_changes_what_an_evaluation_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether an example is a member shifts each sum by at most a multiple of the noise's scale: the epsilon."""
    scales, sums = list[float](), list[float]()
    monkeypatch.setattr(metric_noise, "draw_noise", lambda scale: scales.append(scale) or 0)
    for right, loss in ((50, 1.0), (49, 1.0 + BOUND / 100)):  # the neighbor: one example wrong, with the largest loss
        released = release({"accuracy": right / 100, "loss": loss}, 100, 100)
        sums += [released["accuracy"] * 100 * metric_noise._STEPS, released["loss"] / BOUND * 100 * metric_noise._STEPS]
    shifts = [abs(sums[index] - sums[index + 2]) / scales[index] for index in range(2)]
    assert 0.999 < sum(shifts) <= 1.0 + 1e-9


def test_noise_hides_one_example_of_many_and_not_the_mean() -> None:
    accuracies = [release({"accuracy": 0.5, "loss": 1.0}, 100, 100)["accuracy"] for _ in range(400)]
    assert len(set(accuracies)) > 200
    assert sum(accuracies) / 400 == pytest.approx(0.5, abs=0.01)
    spread = math.sqrt(sum((accuracy - 0.5) ** 2 for accuracy in accuracies) / 400)
    assert spread == pytest.approx(math.sqrt(2) * 2 / 100, rel=0.25)


def test_examples_that_were_not_measured_count_as_wrong_whatever_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_noise, "draw_noise", lambda scale: 0)
    assert release({"accuracy": 1.0, "loss": 0.0}, 25, 100) == {"examples": 100.0, "loss": 1.5, "accuracy": 0.25}
    assert release({}, 0, 100) == {"examples": 100.0, "loss": BOUND, "accuracy": 0.0}


def test_an_infinite_metric_is_as_present_as_any_other() -> None:
    """An example whose loss overflows makes the perplexity infinite: whether it is sent would tell of that example."""
    for perplexity in (9.0, math.inf):
        released = metric_noise.score_parts(
            {"test": np.arange(100)},
            lambda *_, value=perplexity: ({"loss": 1.0, "perplexity": value}, 100),
            metric_noise.MetricLimits(epsilon=1.0),
            make_task("perplexity"),
        )
        assert released["test"].keys() == {"examples", "loss", "perplexity"}


def test_only_means_over_examples_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_noise, "draw_noise", lambda scale: 0)
    assert metric_noise.list_released_metrics(make_task("macro_f1")) == ["loss"]
    assert metric_noise.list_released_metrics(make_task("macro_f1", has_losses=False)) == []
    assert metric_noise.list_released_metrics(make_task("loss")) == ["loss"]
    measured = {"loss": 0.5, "perplexity": 99.0, "macro_f1": 0.5, "matthews": 0.1}
    released = release(measured, 100, 100, make_task("macro_f1"))
    assert released == {"examples": 100.0, "loss": 0.5, "perplexity": math.exp(0.5)}


@pytest.mark.parametrize("count", [1, 10, 99])
def test_what_is_released_is_possible(count: int) -> None:
    for mean in (0.0, 1.0):
        for _ in range(50):
            released = release({"accuracy": mean, "loss": BOUND * mean}, count, count)
            assert 0 <= released["accuracy"] <= 1
            assert 0 <= released["loss"] <= BOUND


@pytest.mark.parametrize(("count", "declared"), [(0, 0), (7, 7), (99, 99), (101, 100), (199, 190), (12_345, 12_000)])
def test_counts_are_rounded_down(count: int, declared: int) -> None:
    assert metric_noise.round_count(count) == declared
