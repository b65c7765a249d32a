"""Errors that a user can correct, expected by the field that they name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fedspan.errors import FedspanError


@contextmanager
def refused(field: str) -> Iterator[pytest.ExceptionInfo[FedspanError]]:
    """Expect a ``FedspanError`` of a field."""
    with pytest.raises(FedspanError) as caught:
        yield caught
    assert caught.value.field == field
