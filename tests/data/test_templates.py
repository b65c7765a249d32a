"""Prompts that nobody meant: rendered, or refused in one line."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from fedspan.data.templates import parse_template
from helpers.fuzzing import answered, fuzz


@fuzz(50)
@given(st.text(st.sampled_from("{}[]ab.!:0 \n"), max_size=12) | st.text(max_size=9))
@example("{a[0].b}")
@example("{a!r:{b}}")
def test_prompts(prompt: str) -> None:
    def render() -> str:
        return parse_template(prompt, "data.prompt").render({"a": "x{", "b": None})

    answered(render)
