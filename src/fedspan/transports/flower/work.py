"""What the nodes of a server do, as their heartbeats say: a file that the server's web page reads."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from anyio.to_thread import run_sync

from fedspan.files import from_json, write_atomic
from fedspan.transports.flower.wire import NodeWork

__all__ = ["FRESH_SECONDS", "WorkBook", "read_works"]

FRESH_SECONDS = 75.0
"""Age in seconds above which a node's word is forgotten; it has a heartbeat every 30 seconds."""
_DELAY = 5.0
"""Seconds for which changes are gathered before they are written, however many nodes there are."""
_MAX_BYTES = 1 << 22
"""Largest file that is read, in bytes."""

log = logging.getLogger("fedspan.server")


class WorkBook:
    """Writes down what nodes do.

    Args:
        path: The file; None: nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._works: dict[int, tuple[float, NodeWork]] = {}
        self._is_stale = False
        self._writing: asyncio.Task[None] | None = None

    def note(self, node: int, work: NodeWork | None) -> None:
        """Write down soon what a node does; None: it waits for orders."""
        before = self._works.pop(node, None)
        if work is not None:
            self._works[node] = time.time(), work
        self._is_stale |= before is not None or work is not None
        if self._path is not None and self._is_stale and (self._writing is None or self._writing.done()):
            self._writing = asyncio.create_task(self._write(self._path))

    async def _write(self, path: Path) -> None:
        while self._is_stale:  # what is noted while the file is written follows
            await asyncio.sleep(_DELAY)
            self._is_stale, oldest = False, time.time() - FRESH_SECONDS
            self._works = {node: entry for node, entry in self._works.items() if entry[0] >= oldest}
            content = {str(node): [stamp, *work] for node, (stamp, work) in self._works.items()}
            try:
                await run_sync(write_atomic, path, json.dumps(content).encode(), 0o600)
            except OSError as error:  # only the page misses it
                log.warning("what the nodes do cannot be written (%s)", error)


def read_works(path: Path) -> Mapping[str, NodeWork]:
    """Return what each node of a server does, by Flower's id; nodes without a recent heartbeat are left out.

    Args:
        path: The file of a ``WorkBook``, which may not exist.
    """
    try:
        with path.open("rb") as file:
            content = from_json(file.read(_MAX_BYTES))
    except (OSError, ValueError):
        return {}
    oldest, works = time.time() - FRESH_SECONDS, dict[str, NodeWork]()
    for node, entry in content.items() if isinstance(content, Mapping) else ():
        match entry:
            case [float() as stamp, str() as doing, int() | None as percent] if stamp >= oldest:
                works[str(node)] = NodeWork(doing, percent)
            case _:
                continue
    return works
