"""Tasks and metrics are those of fedspan again after every test."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Undo what a test registers."""
    from fedspan.tasks import metrics, registry

    contents: list[dict[str, Any]] = [registry._tasks, registry._installed, registry._metric_owners, metrics._metrics]
    copies = [dict(content) for content in contents]
    yield
    for content, before in zip(contents, copies, strict=True):
        content.clear()
        content.update(before)
