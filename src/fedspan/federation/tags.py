"""Tags: facts about a data owner's node in its own words, such as ``site: eu`` or ``gpu: true``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from fedspan.errors import require_printable

MAX_TAGS = 32

Tag = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(require_printable)]


def _convert_scalar(value: object) -> object:
    """Convert the plain values that YAML reads without quotes to the text that was written."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


Tags = Annotated[dict[Tag, Annotated[Tag, BeforeValidator(_convert_scalar)]], Field(max_length=MAX_TAGS)]
"""Tags by name; numbers and truth values are taken as text."""


def explain_missing_tags(tags: Mapping[str, str], required: Mapping[str, str]) -> str | None:
    """Return which required tags a node does not have; None if it has all of them."""
    missing = [f"{name}: {value}" for name, value in required.items() if tags.get(name) != value]
    return f"this run requires the tags {', '.join(missing)}" if missing else None
