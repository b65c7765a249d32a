"""A run's process at its server: the orders that it sends, and the replies that it takes."""

from __future__ import annotations

import base64
import secrets
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import httpx

from fedspan.errors import FedspanError
from fedspan.files import convert_disk_errors, write_file
from fedspan.transports.http.server import Operator, ServerLink
from fedspan.transports.http.store import MESSAGES, RANDOM

_WAIT = 1.0
"""Seconds for which the server's answer waits for replies."""
_PATIENCE = 60.0
"""Seconds for which a server that is unreachable, as while it restarts, is asked again."""
_RENEWED = 20.0
"""Seconds between two requests that say that this process is there, while it sends no others."""


class OutgoingOrder(NamedTuple):
    """An order to be sent.

    Args:
        head: What stands before the body in the message.
        body: Name of the stored body.
        reply_bytes: Maximum size of the reply, in bytes.
    """

    node: int
    head: bytes
    body: str
    reply_bytes: int


@dataclass(frozen=True)
class Taken:
    """The answer to an order.

    Args:
        read: Reads the reply as it was sent, once: until then, memory holds nothing of it.
        failure: Why there is none, in anybody's words.
    """

    order: str
    read: Callable[[], bytes] = bytes
    failure: str = ""


class RunLink:
    """A run on a server on this machine.

    Args:
        link: Connection data of the server.
        limit: Maximum size of a reply's body, in bytes.

    Raises:
        httpx.HTTPError: If the server is unreachable, or refuses the secret.
    """

    def __init__(self, link: ServerLink, limit: int) -> None:
        self.limit = limit
        self._messages, self._folder = link.folder / MESSAGES, link.folder
        self._operator = Operator(link)
        self._run = self._operator.post("runs")
        self._done, self._stop = set[str](), threading.Event()
        self._renewal = threading.Thread(target=self._renew, daemon=True)
        self._renewal.start()

    def list_online(self) -> Mapping[int, bytes]:
        """Return the nodes that are online, with their signed sealing keys."""
        rows = self._post("nodes")
        return {row["node"]: base64.b64decode(row["sealing"]) for row in rows if row["online"]}

    def store_body(self, data: bytes) -> str:
        """Store the body of one or more orders, and return its name."""
        if not data:
            return ""
        name = self._run + secrets.token_hex(RANDOM // 2)
        with convert_disk_errors(self._folder, "free some space", field="server"):
            write_file(self._messages / name, data, 0o600)
        return name

    def send_orders(self, orders: Sequence[OutgoingOrder]) -> list[str]:
        """Send orders, and return their ids."""
        rows = [
            {"node": one.node, "head": base64.b64encode(one.head).decode(), "body": one.body, "reply": one.reply_bytes}
            for one in orders
        ]
        return self._post(f"runs/{self._run}/orders", rows)

    def take_replies(self, ids: Collection[str], seconds: float = _WAIT) -> list[Taken]:
        """Return the replies to orders that have arrived, or wait some seconds for the first."""
        asked = {"awaited": list(ids), "done": sorted(self._done), "seconds": seconds}
        answer = self._post(f"runs/{self._run}/replies", asked)
        self._done.clear()
        taken = list[Taken]()
        for order, failure in (*answer["replies"], *answer["lost"]):
            if failure:
                self._done.add(order)
                taken.append(Taken(order, failure=failure))
            else:
                taken.append(Taken(order, partial(self._read, order)))
        return taken

    def cancel(self, ids: Collection[str]) -> None:
        """Give up orders whose replies are not awaited any more; replies that were taken are deleted, too."""
        self._done.update(ids)
        if self._done:
            asked = {"awaited": [], "done": sorted(self._done), "seconds": 0}
            self._post(f"runs/{self._run}/replies", asked)
            self._done.clear()

    def close(self) -> None:
        """End the run on the server."""
        self._stop.set()
        with suppress(httpx.HTTPError):
            self._operator.post(f"runs/{self._run}/end")
        self._operator.close()

    def _read(self, order: str) -> bytes:
        with convert_disk_errors(self._folder, field="server"):
            message = (self._messages / order).read_bytes()
        self._done.add(order)
        return message

    def _renew(self) -> None:
        while not self._stop.wait(_RENEWED):
            with suppress(httpx.HTTPError):
                self._operator.post(f"runs/{self._run}/replies", {"awaited": [], "done": [], "seconds": 0})

    def _post(self, path: str, content: Any = None) -> Any:
        """Send a request, again if the server restarts meanwhile."""
        give_up_at, pause = time.monotonic() + _PATIENCE, 0.2
        while True:
            try:
                return self._operator.post(path, content, _WAIT)
            except httpx.TransportError:
                if time.monotonic() > give_up_at:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 2.0)


@contextmanager
def attach(link: ServerLink, limit: int) -> Generator[RunLink]:
    """Make this process that of a new run on a server for the duration of the context.

    Args:
        link: Connection data of the server.
        limit: Maximum size of a reply's body, in bytes.

    Raises:
        FedspanError: If the server is unreachable, rejects the secret, or later no longer knows the run.
    """
    try:
        run = RunLink(link, limit)
    except httpx.HTTPStatusError as error:
        expected = f"the file that fedspan server wrote (the server answered {error.response.status_code})"
        raise FedspanError("secret", str(link.secret), expected) from error
    except (httpx.HTTPError, OSError) as error:
        problem = f"no answer from {link.address} ({type(error).__name__}). Is fedspan server running?"
        raise FedspanError("server", link.address, problem=problem) from error
    try:
        yield run
    except httpx.HTTPError as error:
        problem = f"{link.address} {_describe_failure(error)}. Continue with --resume"
        raise FedspanError("server", link.address, problem=problem) from error
    finally:
        run.close()


def _describe_failure(error: httpx.HTTPError) -> str:
    """Return what the server did, as the rest of a sentence."""
    if not isinstance(error, httpx.HTTPStatusError):
        return f"did not answer ({type(error).__name__}): fedspan server may have stopped"
    status = error.response.status_code
    if status == 404:
        return "does not know this run: it was down for too long, or ended the run"
    if status >= 500:
        return f"failed with status {status}, perhaps because its disk is full: see server.log in its folder"
    return f"refused a request of this run with status {status} ({error.response.text[:200]})"
