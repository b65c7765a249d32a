"""Flower's SuperLink with an access filter: nodes may connect from anywhere, operators only from this machine.

Flower serves nodes, commands and running servers on one port, and accepts commands (registering a node's key,
submitting an app) from any machine that can reach it. Run as a module, this is ``flower-superlink`` with the same
arguments, but requests outside the node API are refused unless they come from this machine, and few requests are
processed at once: each writes to SQLite, which allows one writer, and the forty threads that FastAPI allows would
mostly wait for each other.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from anyio.to_thread import current_default_thread_limiter
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse

from fedspan.transports.flower.adapter import NODE_API, run_superlink

__all__ = ["Door", "main"]

_THREADS = 3
"""Number of requests processed at once; more than one, because Flower's log streams occupy their threads."""

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


class Door:
    """Refuses requests outside the node API unless they come from this machine.

    Args:
        app: The app that receives the accepted requests.
    """

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Forward a request, or refuse it with status 403."""
        if scope["type"] == "lifespan":
            current_default_thread_limiter().total_tokens = _THREADS
        if scope["type"] == "lifespan" or scope["path"].startswith(NODE_API) or _local(scope.get("client")):
            await self.app(scope, receive, send)
        else:
            await PlainTextResponse("only from the server's own machine", 403)(scope, receive, send)


def _local(client: tuple[str, int] | None) -> bool:
    try:
        return client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


def main() -> None:
    """Run ``flower-superlink`` with the access filter."""
    run_superlink([Middleware(Door)])  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    sys.exit(main())
