"""Ports for the servers of tests."""

import secrets
import socket
from contextlib import suppress


def free_port() -> int:
    """Return an unused port below those that the system assigns, so that no other process receives it meanwhile."""
    while True:
        port = 10_000 + secrets.randbelow(22_000)
        with suppress(OSError), socket.socket() as bound:
            bound.bind(("127.0.0.1", port))
            return port
