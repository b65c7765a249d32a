"""The estimate of the time that is left of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedspan.runs.remaining_time import Effort, describe_stage, get_unrepeated_name
from fedspan.runs.setup import Prepared
from fedspan.training.stages import Stage
from helpers.clock import Clock


@pytest.fixture
def compared(prepared: Prepared) -> Prepared:
    """The run of three rounds, and its two baselines."""
    return replace(prepared, config=prepared.config.model_copy(update={"baselines": ["local", "centralized"]}))


def keys() -> list[str]:
    baselines = [key for name in ("local", "centralized") for key in (*(f"{name} {n}" for n in (1, 2, 3)), name)]
    return ["round 1", "round 2", "round 3", "closing", *baselines]


def test_it_reaches_nothing_at_the_end(compared: Prepared) -> None:
    """With speeds as assumed, the run ends when the first estimate said."""
    clock = Clock()
    effort = Effort(compared, 0, clock)
    completed: list[float] = []
    for key in keys():
        effort.finish(key)
        completed.append(effort.completed)
    assert completed[-1] == pytest.approx(effort.total)
    assert effort.estimate_left() is None

    clock, total = Clock(), effort.total
    effort = Effort(compared, 0, clock)
    assert effort.estimate_left() is None, "no speed yet"
    for key, passes in zip(keys()[:-1], completed, strict=False):
        clock.now = passes  # a pass takes a second
        effort.finish(key)
        left = effort.estimate_left()
        assert left == pytest.approx(total - passes)
        clock.now += 0.5
        assert effort.estimate_left() == pytest.approx(total - passes - 0.5), "it counts down between two counts"


def test_batches_count_within_a_round(prepared: Prepared) -> None:
    clock = Clock()
    effort = Effort(prepared, 0, clock)
    work = 2 * 4 * 3  # examples of a round: steps, batch size, clients
    for done in (0, 6, 12, 24, 1000):  # more than announced, as in a method that trains twice
        clock.now = 3.0 * min(done, work)
        effort.stage(Stage("training", done, work))
        assert effort.completed == 3.0 * min(done, work)
        assert done == 0 or effort.estimate_left() == pytest.approx(effort.total - effort.completed)
    for clients, test in ((0, 0), (5, 0), (10, 0), (10, 3)):
        stage = Stage("evaluation", test or clients, 10)
        effort.stage(stage)
        assert effort.completed == 3.0 * work + clients + test
    effort.finish("round 1")
    effort.stage(Stage("evaluation", 4, 10))
    before = effort.completed
    assert before < 2 * 3.0 * work, "what is measured before training belongs to no round"


def test_what_only_the_first_round_waits_for_stops_the_clock(prepared: Prepared) -> None:
    clock = Clock()
    effort, training = Effort(prepared, 0, clock), Stage("training", 0, 24)
    effort.stage(training)
    clock.now = 10.0
    effort.stage(Stage("training", 12, 24))
    expected = effort.estimate_left()
    assert expected is not None
    effort.stage(Stage("hidden states", 0, 100, outer=training))
    clock.now = 20.0
    effort.stage(Stage("hidden states", 25, 100, outer=training))
    assert effort.estimate_left() == pytest.approx(expected + 30.0)
    clock.now = 50.0
    effort.stage(Stage("training", 12, 24))
    assert effort.estimate_left() == pytest.approx(expected)
    effort.stage(Stage("stacking", outer=training))
    assert effort.estimate_left() is None, "nobody knows how long that takes"


def test_rounds_and_epochs_that_are_not_run_are_no_work(compared: Prepared) -> None:
    effort = Effort(compared, 0, Clock())
    for key in ("round 1", "closing", "local 1", "local", "centralized 1", "centralized"):
        effort.finish(key)
    assert effort.completed == pytest.approx(effort.total)
    resumed = Effort(compared, 2, Clock())
    resumed.finish("round 3")
    assert resumed.completed < effort.completed


def test_stages_in_words() -> None:
    test = Stage("learning rate", 1, 5, "rates")
    inside = Stage("hidden states", 3, 9, outer=Stage("training", 0, 9, outer=test))
    assert describe_stage(inside) == "range test of the learning rate, 2 of 5"
    assert get_unrepeated_name(inside) == "learning rate"
    assert get_unrepeated_name(Stage("training", 3, 9)) is None
    assert describe_stage(Stage("training", 9, 9)) == "finishing the round"
