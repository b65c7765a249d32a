"""What all sections of a configuration have in common."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from fedspan.config.section import Section


class Named(Section):
    """A section whose field begins with a name that Pydantic reserves."""

    model_name: str = "bert"


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Named.model_validate({"model_nam": "gpt2"})


def test_sections_are_immutable() -> None:
    section = Named()
    with pytest.raises(ValidationError, match="Instance is frozen"):
        section.model_name = "gpt2"
    assert section.model_name == "bert"
