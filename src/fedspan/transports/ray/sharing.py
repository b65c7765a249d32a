"""Workers that stay from run to run, as in a series. It imports nothing of Ray, which only runs on a cluster need."""

from __future__ import annotations

from collections.abc import Generator, Hashable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

_shared: tuple[ExitStack, dict[Hashable, Any]] | None = None


@contextmanager
def share_teams() -> Generator[None]:
    """Keep workers until this context ends: their processes start once for all of its runs."""
    global _shared
    if _shared is not None:
        yield
        return
    with ExitStack() as stack:
        _shared = stack, {}
        try:
            yield
        finally:
            _shared = None


@contextmanager
def enter_shared_or_new(key: Hashable, new: AbstractContextManager[Any]) -> Generator[Any]:
    """Enter a context for the time of a run; within ``share_teams``, until that ends or another key follows.

    Args:
        key: What two runs need to have in common to share the context.
    """
    if _shared is None:
        with new as value:
            yield value
        return
    stack, entered = _shared
    if key not in entered:
        entered.clear()
        stack.close()  # before others need the processors of these workers
        entered[key] = stack.enter_context(new)
    yield entered[key]
