"""Errors that a user can correct, expected by the field that they name."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from fedspan.errors import FedspanError

Refused = Callable[..., FedspanError]


@contextmanager
def refused(field: str, match: str | None = None) -> Iterator[pytest.ExceptionInfo[FedspanError]]:
    """Expect a ``FedspanError`` of a field, and a pattern in its message where the field alone says too little."""
    with pytest.raises(FedspanError, match=match) as caught:
        yield caught
    assert caught.value.field == field
