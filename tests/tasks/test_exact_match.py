"""What counts as the same answer."""

from __future__ import annotations

import pytest

from fedspan.tasks.exact_match import is_exact_match


@pytest.mark.parametrize(
    ("made_text", "wanted", "pattern", "same"),
    [
        ("four", "four", None, True),
        (" four\n", "four", None, True),
        ("four five", "four  five", None, True),
        ("four", "five", None, False),
        ("1,000", "1000.0", None, True),
        ("so it is\n#### 1,250", "first 3\n#### 1250", r"####\s*(\S+)", True),
        ("1250", "#### 1250", r"####\s*(\S+)", False),
        ("#### 1250", "1250", r"####\s*(\S+)", False),
        ("the correct answer is answer2", "answer2", r"answer\d", True),
        ("answer1 or answer2", "answer2", r"answer\d", False),
    ],
)
def test_what_counts_as_the_same_answer(made_text: str, wanted: str, pattern: str | None, same: bool) -> None:
    assert is_exact_match(made_text, wanted, pattern) == same
