"""The settings of evaluation: the metric that compares rounds, and patterns for what counts of an answer."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from fedspan.config.evaluation import EvaluationConfig


def test_rounds_are_compared_by_the_metric_or_the_loss() -> None:
    assert EvaluationConfig().get_selection_metric("accuracy") == "accuracy"
    assert EvaluationConfig(best_by="loss").get_selection_metric("accuracy") == "loss"


@pytest.mark.parametrize("pattern", [None, r"####\s*(\S+)", "a{3}"])
def test_a_regular_expression_is_kept(pattern: str | None) -> None:
    assert EvaluationConfig(answer_pattern=pattern).answer_pattern == pattern


@pytest.mark.parametrize("pattern", ["(", "[", "a{9999999999}", "(" * 9999])
def test_a_broken_one_is_refused_with_the_reason(pattern: str) -> None:
    with pytest.raises(ValidationError, match=r"a valid regular expression \(.+\)"):
        EvaluationConfig(answer_pattern=pattern)


@pytest.mark.parametrize(
    "values",
    [
        {"every": 0},
        {"clients": 0},
        {"by": ""},
        {"diagnostics": 0},
        {"max_new_tokens": 2**17 + 1},
        {"answer_pattern": ""},
        {"best_by": "accuracy"},
    ],
)
def test_what_no_evaluation_has_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(values))):
        EvaluationConfig.model_validate(values)
