"""The log of a node on its terminal, in which texts of other machines are shown and not obeyed."""

from __future__ import annotations

import logging
from types import TracebackType

from fedspan.errors import escape_controls


class ConsoleFormatter(logging.Formatter):
    """One line a message, with the time; the lines of a traceback are indented, so that none looks like a message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escape_controls(super().formatMessage(record))

    def formatException(
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        return "\n".join(f"  {escape_controls(line)}" for line in super().formatException(ei).split("\n"))


def log_to_console(name: str | None = None) -> None:
    """Send this process's log, or that of one package, to its terminal, unless it has a destination already."""
    logger = logging.getLogger(name)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(ConsoleFormatter())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
