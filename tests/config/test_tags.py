"""Tags of nodes: what a file may say, and which ones a run misses."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from fedspan.config.tags import MOST_TAGS, Tags, explain_missing_tags


def test_plain_values_are_the_text_that_was_written() -> None:
    assert TypeAdapter(Tags).validate_python({"gpu": True, "beds": 12, "share": 0.5, "site": "eu"}) == {
        "gpu": "true",
        "beds": "12",
        "share": "0.5",
        "site": "eu",
    }


@pytest.mark.parametrize(
    "tags",
    [
        {"": "a"},
        {"a": ""},
        {"a": "b" * 65},
        {"a" * 65: "b"},
        {"a": None},
        {"a": ["b"]},
        {"a": "\x1b[2J"},
        {"a\x00": "b"},
        {f"tag {number}": "a" for number in range(MOST_TAGS + 1)},
    ],
)
def test_what_is_no_tag_is_refused(tags: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Tags).validate_python(tags)


def test_as_many_and_as_long_as_allowed() -> None:
    tags = {f"{number:064}": "b" * 64 for number in range(MOST_TAGS)}
    assert TypeAdapter(Tags).validate_python(tags) == tags


def test_missing_tags_are_named_with_their_values() -> None:
    """One of another value is as good as none; further tags of the node do not matter."""
    tags = {"site": "eu", "gpu": "true", "ward": "3"}
    assert explain_missing_tags(tags, {}) is None
    assert explain_missing_tags(tags, {"site": "eu", "gpu": "true"}) is None
    required = {"site": "us", "gpu": "true", "beds": "12"}
    assert explain_missing_tags(tags, required) == "this run requires the tags site: us, beds: 12"
