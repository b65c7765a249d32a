"""A server as its operator's processes use it: its folder, the known nodes, and the orders and replies of a run."""

from __future__ import annotations

import base64
import json
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from fedspan.errors import FedspanError
from fedspan.files import convert_disk_errors, make_private_folder, write_atomic, write_file
from fedspan.processes import hold_folder
from fedspan.transports.http.keys import AUTHORITY, ensure_authority
from fedspan.transports.http.store import MESSAGES, RANDOM
from fedspan.transports.http.wire import KEPT_ALIVE, NodeWork, SharedClient, parse_work

_DESCRIPTION, _SECRET = "server.json", "secret"
_SECRET_BYTES = 32
_SECONDS = 30.0
"""Time limit of a request of the operator's, beside what an answer waits."""
_WAIT = 1.0
"""Seconds for which the server's answer waits for replies."""
_PATIENCE = 60.0
"""Seconds for which a server that is unreachable, as while it restarts, is asked again."""
_RENEWED = 20.0
"""Seconds between two requests that say that this process is there, while it sends no others."""


@dataclass(frozen=True)
class ServerLink:
    """The connection data of a server for its operator.

    Args:
        address: Address as ``host:port``, on this machine.
        authority: File with the certificate of the authority that signed the server's; None: an insecure connection.
    """

    address: str
    authority: Path | None
    secret: Path

    @property
    def folder(self) -> Path:
        """The server's folder, which contains the secret."""
        return self.secret.parent


def format_address(host: str, port: int) -> str:
    """Return a host and a port as ``host:port``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def prepare_folder(folder: Path, port: int, hosts: Sequence[str], *, insecure: bool) -> ServerLink:
    """Create the missing files of a server's folder.

    Args:
        insecure: Whether to run without TLS and keys.

    Raises:
        FedspanError: If other users may enter the folder, a server works in it, its certificate is not valid for a
            host, or its secret is damaged.
    """
    make_private_folder(folder, "--folder")
    link = _build_link(folder, port, insecure)
    with hold_folder(folder, "server", "--folder"):
        if not insecure:
            ensure_authority(folder, hosts)
        if not link.secret.exists():
            write_atomic(link.secret, secrets.token_hex(_SECRET_BYTES).encode(), 0o600)
        read_secret(link)
        write_link(link)
    return link


def write_link(link: ServerLink) -> None:
    """Write what ``read_link`` reads. Call it only while holding the server's folder."""
    description = {"port": int(link.address.rpartition(":")[2]), "insecure": link.authority is None}
    write_atomic(link.folder / _DESCRIPTION, f"{json.dumps(description)}\n".encode())


def read_secret(link: ServerLink) -> str:
    """Return the secret that the operator's requests have.

    Raises:
        FedspanError: If it is shorter than ``prepare_folder`` writes it, which anyone might guess.
    """
    secret = link.secret.read_text(encoding="utf-8", errors="replace")
    if len(secret) < 2 * _SECRET_BYTES:
        problem = f"{link.secret} is empty or damaged. Remove it: fedspan server writes a new one when it starts"
        raise FedspanError("secret", str(link.secret), problem=problem)
    return secret


def is_prepared(folder: Path) -> bool:
    """Return whether a server was started with a folder before."""
    return (folder / _DESCRIPTION).is_file()


def read_link(folder: Path) -> ServerLink:
    """Return the connection data of a server for its own machine."""
    try:
        description = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
        port, insecure = int(description["port"]), bool(description["insecure"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedspanError("server", str(folder), "the folder of a server (fedspan server)") from error
    return _build_link(folder, port, insecure)


def _build_link(folder: Path, port: int, insecure: bool) -> ServerLink:
    return ServerLink(f"127.0.0.1:{port}", None if insecure else folder / AUTHORITY, folder / _SECRET)


class Operator:
    """Sends a server the requests of its operator, from its own machine."""

    def __init__(self, link: ServerLink) -> None:
        self.link = link
        scheme = "http" if link.authority is None else "https"
        verify: ssl.SSLContext | bool = False
        if link.authority is not None:
            verify = ssl.create_default_context(cafile=str(link.authority))
        self._client = SharedClient(
            base_url=f"{scheme}://{link.address}/v1/",
            verify=verify,
            headers={"authorization": f"Bearer {link.secret.read_text(encoding='utf-8')}"},
            limits=httpx.Limits(keepalive_expiry=KEPT_ALIVE),
            trust_env=False,  # the server is on this machine, whatever proxy leads elsewhere
        )

    def post(self, path: str, content: Any = None, wait: float = 0.0) -> Any:
        """Send a request, and return its answer.

        Raises:
            httpx.HTTPError: If the server is unreachable, or refuses.
        """
        with self._client.stream("POST", path, json=content, timeout=_SECONDS + wait) as answer:
            answer.read()
            return answer.raise_for_status().json()

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


@dataclass(frozen=True)
class Node:
    """A node as its server knows it.

    Args:
        name: The operator's name for the node; empty if it was never admitted by name.
        status: Status of the node: ``online``, ``offline``, ``registered`` if it did not connect since the server
            started, or ``revoked``.
        online_seconds: Seconds since the node connected; 0 if it is not online.
        offline_since: Time when the node went offline, in seconds since 1970; None: it did not go offline.
        work: What it does, as it says; None: it waits for orders, or is not online.
    """

    id: str
    name: str
    status: str
    online_seconds: float = 0.0
    offline_since: float | None = None
    work: NodeWork | None = None


def list_nodes(link: ServerLink, names: Mapping[int, str], revoked: Mapping[int, str]) -> list[Node]:
    """Return the nodes that a server knows, those that are connected first.

    Args:
        names: The names of the admitted nodes by id; empty in a trial without keys.
    """
    operator = Operator(link)
    try:
        rows = operator.post("nodes")
    except (httpx.HTTPError, OSError) as error:
        problem = f"no answer from {link.address} ({type(error).__name__}). Is fedspan server running?"
        raise FedspanError("server", link.address, problem=problem) from error
    finally:
        operator.close()
    nodes, seen = list[Node](), set[int]()
    for row in rows:
        id = int(row["node"])
        if id not in revoked:
            seen.add(id)
            status, work = ("online" if row["online"] else "offline"), parse_work(row["work"])
            times = row["online_seconds"], row["offline_since"]
            nodes.append(Node(str(id), names.get(id, ""), status, *times, work if row["online"] else None))
    nodes += [Node(str(id), name, "registered") for id, name in names.items() if id not in seen]
    return nodes + [Node(str(id), name, "revoked") for id, name in revoked.items()]


class OutgoingOrder(NamedTuple):
    """An order to be sent.

    Args:
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
