"""Which finished rounds owe something to the number of rounds that were planned."""

from __future__ import annotations

from typing import Any

import pytest

from fedspan.config import parse_config
from fedspan.config.run import RunConfig
from fedspan.errors import FedspanError
from fedspan.runs.learning_rate import ROUNDS
from fedspan.runs.planned_rounds import ROUNDS_FIELD, require_independent_rounds


def config(rounds: int, **changes: Any) -> RunConfig:
    federation = {"rounds": rounds, **changes.pop("federation", {})}
    return parse_config({"data": {"train": "train.csv"}, "federation": federation, **changes})


@pytest.mark.parametrize(
    ("changes", "done", "before", "after"),
    [
        ({"training": {"schedule": "constant"}}, 4, 5, 9),
        ({"training": {"schedule": "linear"}}, 0, 5, 9),
        ({"training": {"schedule": "linear", "warmup_rounds": 2}}, 2, 5, 9),
        ({"training": {"schedule": "cosine", "cycle_rounds": 2}}, 4, 5, 9),
        ({"training": {"lr": "auto"}}, 4, ROUNDS, ROUNDS + 5),
        ({"privacy": {"mechanism": "dp-sgd", "noise": 1.0}}, 4, 5, 9),
    ],
)
def test_rounds_that_owe_it_nothing_are_continued(changes: dict[str, Any], done: int, before: int, after: int) -> None:
    require_independent_rounds(done, config(before, **changes), config(after, **changes))


@pytest.mark.parametrize(
    ("changes", "done", "before", "after", "why"),
    [
        (
            {"training": {"schedule": "linear"}},
            2,
            5,
            9,
            "training.schedule linear spreads over all rounds, and the 2 finished rounds had the learning rates of a "
            "run of 5 rounds. Start a new run with federation.rounds=9",
        ),
        ({"training": {"schedule": "cosine", "warmup_rounds": 1}}, 3, 5, 4, "training.schedule cosine spreads"),
        (
            {"privacy": {"mechanism": "dp-sgd", "epsilon": 3.0}},
            0,
            5,
            9,
            "privacy.epsilon is the budget of the 5 rounds that were planned. Start a new run",
        ),
        ({"training": {"lr": "auto"}}, 1, 1, 9, f"the range test of training.lr ran 1 of {ROUNDS} rounds"),
    ],
)
def test_others_are_refused_with_the_reason(
    changes: dict[str, Any], done: int, before: int, after: int, why: str
) -> None:
    with pytest.raises(FedspanError) as caught:
        require_independent_rounds(done, config(before, **changes), config(after, **changes))
    assert why in str(caught.value)
    assert (caught.value.field, caught.value.value) == (ROUNDS_FIELD, after)
