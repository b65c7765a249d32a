"""A node's requests to its server: they survive broken connections, and pass proxies."""

from __future__ import annotations

import base64
import json
import logging
import ssl
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedspan.errors import FedspanError
from fedspan.transports.http.keys import sign_join
from fedspan.transports.http.signing import NodeSigner, UnsignedSigner
from fedspan.transports.http.wire import CHUNK, KEPT_ALIVE, POLL_SECONDS, PROTOCOLS, NodeWork, SharedClient

T = TypeVar("T")

_CONNECT, _READ = 30.0, 180.0
"""Time limits of a connection and of an answer, in seconds: a server of a thousand nodes that all reply at once takes
a while, and a request that was given up would be sent again on top of it."""
_BLOCK = 2**14
"""Bytes that are sent or read at once: a pause follows each, and a TLS record has as many."""
_SHORT = 2**16
"""Maximum size of an answer that is no part of a message, in bytes."""
_RETRIES, _PAUSE = 2, 1.0
"""Times that a part of a message is sent or fetched again if nothing of it was transmitted, and the first pause."""
_AGAIN = httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_MANY_REQUESTS
_FIRST_SHOWN, _SHOWN_EVERY = 3.0, 5.0
"""Seconds after which a transfer's progress is logged: for the first time, and then again."""

log = logging.getLogger("fedspan.node")


class Pacer:
    """Delays transfers so that they stay below a rate; those of several threads share it.

    Args:
        rate: Bytes per second; None: no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._lock, self._free_at = Lock(), 0.0

    def wait(self, size: int) -> None:
        """Wait until a number of bytes may be transferred after those before them."""
        if self.rate is None:
            return
        with self._lock:
            begin = max(self._free_at, time.monotonic())
            self._free_at = begin + size / self.rate
            pause = self._free_at - time.monotonic()
        time.sleep(max(0.0, pause))


class TransferProgress:
    """Logs the progress of a message now and then."""

    def __init__(self, subject: str, on_progress: Callable[[], None] = lambda: None) -> None:
        self._subject, self._on_progress = subject, on_progress
        self._total, self._shown_at = 0, float("inf")

    def begin(self, total: int) -> None:
        """Begin with a message of some bytes."""
        self._total, self._shown_at = total, time.monotonic() + _FIRST_SHOWN - _SHOWN_EVERY

    def show(self, current: int) -> None:
        """Report how many bytes have been transferred, and log it if it is time."""
        self._on_progress()
        now = time.monotonic()
        if now - self._shown_at >= _SHOWN_EVERY:
            self._shown_at = now
            log.info("%s: %.1f of %.1f MB", self._subject, current / 1e6, self._total / 1e6)


class RefusedError(Exception):
    """Raised when the server refuses a request.

    Args:
        status: HTTP status; 401: the session has ended.
    """

    def __init__(self, status: int, reason: str, facts: dict[str, Any]) -> None:
        super().__init__(f"the server answered {status}: {reason}")
        self.status, self.facts = status, facts


class Link(NamedTuple):
    """The connection data of a server for a node.

    Args:
        authority: File with the certificates of the server's authority and order key; None: an insecure connection.
        key: The node's private key; None: a trial without keys.
        limit: Maximum size of a message, in bytes.
        up: Bytes per second that the node sends on average; None: no limit.
        down: Bytes per second that it receives; None: no limit.
        proxy: Address of the proxy to the server; None: that of the environment, if any.
        tls_authority: File with the authority of the connection's certificate, if a proxy in front of the server
            terminates TLS; None: ``authority``.
    """

    address: str
    authority: Path | None
    key: ec.EllipticCurvePrivateKey | None
    limit: int
    up: float | None = None
    down: float | None = None
    proxy: str | None = None
    tls_authority: Path | None = None

    def create_signer(self) -> NodeSigner | UnsignedSigner:
        """Return the signer of this node: with keys, only orders that the server signed are carried out."""
        if self.key is None or self.authority is None:
            return UnsignedSigner()
        return NodeSigner(self.key, self.authority)


def open_client(link: Link) -> SharedClient:
    """Open connections to a server, through a proxy if there is one."""
    verify: ssl.SSLContext | bool = False
    if link.authority is not None:
        path = link.tls_authority or link.authority
        try:
            verify = ssl.create_default_context(cafile=str(path))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise FedspanError(
                "authority", str(path), f"a file with certificates of an authority ({reason})"
            ) from error
    scheme = "http" if link.authority is None else "https"
    timeout = httpx.Timeout(_READ, connect=_CONNECT)
    limits = httpx.Limits(keepalive_expiry=KEPT_ALIVE)
    address = f"{scheme}://{link.address}/v1/"
    headers = {"accept-encoding": "identity"}
    return SharedClient(
        base_url=address, verify=verify, proxy=link.proxy, timeout=timeout, limits=limits, headers=headers
    )


class _Incoming(NamedTuple):
    """An order that arrives: its id, what has arrived of its message, its size, and that of its reply at most."""

    id: str
    data: bytearray
    total: int
    reply_bytes: int


class NodeConnection:
    """A session of a node with its server."""

    def __init__(
        self,
        link: Link,
        signer: NodeSigner | UnsignedSigner,
        client: SharedClient,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.link, self._signer, self._client = link, signer, client
        self._up, self._down = Pacer(link.up), Pacer(link.down)
        self.sent = TransferProgress("reply sent", on_progress)
        self.received = TransferProgress("order received", on_progress)
        self.node, self.session = 0, ""
        self.incoming: _Incoming | None = None
        """The order that has arrived in part, which another connection may continue."""

    def join(self) -> None:
        """Join the server, with a signature of its challenge.

        Raises:
            RefusedError: If the server does not know the key, or speaks no common version of the protocol.
            httpx.HTTPError: If the server is unreachable.
            ValueError: If the server is not the one of the authority's file.
        """
        answer = self._request("POST", "join", self.answer_challenge())
        self.session, self.node = _get_fact(answer, "session", str), _get_fact(answer, "node", int)

    def answer_challenge(self) -> dict[str, str]:
        """Return the headers with which this node joins: with keys, they have the signature of a new challenge.

        It raises the errors of ``join``; until the headers are sent, the server opens no session.
        """
        headers = {"fedspan-protocols": ",".join(map(str, PROTOCOLS))}
        signer = self._signer
        if isinstance(signer, NodeSigner):
            public = signer.key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
            headers["fedspan-key"] = " ".join(public.decode().split()[:2])
            offer = self._request("POST", "join", headers)
            challenge, sealing = _get_fact(offer, "challenge", str), signer.sign_sealing_key()
            server = bytes.fromhex(_get_fact(offer, "server", str))
            signature = sign_join(signer.key, signer.order_keys, challenge.encode(), server, sealing)
            headers["fedspan-challenge"] = challenge
            headers["fedspan-process"] = signer.process
            headers["fedspan-sealing"] = base64.b64encode(sealing).decode()
            headers["fedspan-signature"] = base64.b64encode(signature).decode()
        return headers

    def take_order(self) -> tuple[str, int, bytes | None] | None:
        """Wait for an order, and fetch its message; one that was fetched in part is continued.

        Returns:
            The order's id, the maximum size of its reply in bytes, and its message (None: it is larger than the limit);
            None: there was no order.
        """
        with self._stream("POST", "order", wait=POLL_SECONDS) as response:
            if response.status_code == httpx.codes.NO_CONTENT:
                return None
            headers = response.headers
            id, total = headers.get("fedspan-order", ""), int(headers.get("fedspan-bytes", ""))
            if self.incoming is None or self.incoming.id != id:
                self.incoming = _Incoming(id, bytearray(), total, int(headers.get("fedspan-reply", "")))
            incoming = self.incoming
            self.received.begin(total)
            if total <= self.link.limit and not incoming.data:
                with suppress(httpx.TransportError):  # the rest is fetched as further parts are
                    self._receive(response, incoming.data, min(total, CHUNK))
        if total > self.link.limit:
            return id, incoming.reply_bytes, None
        while len(incoming.data) < total:
            self._persist(partial(self._fetch_part, id, incoming.data), lambda: len(incoming.data))
        self.incoming = None
        return id, incoming.reply_bytes, bytes(incoming.data)

    def _fetch_part(self, id: str, data: bytearray) -> None:
        with self._stream("GET", f"order/{id}", {"range": f"bytes={len(data)}-"}) as response:
            self._receive(response, data, len(data) + CHUNK)

    def _receive(self, response: httpx.Response, data: bytearray, most: int) -> None:
        for block in response.iter_raw(_BLOCK):
            if len(data) + len(block) > most:
                raise ValueError("the server sent more than was requested")
            data += block
            self.received.show(len(data))
            self._down.wait(len(block))

    def send_reply(self, id: str, message: bytes, upload: str, *, is_continued: bool = False) -> None:
        """Send the reply to an order, in parts; a part that a broken connection has cut is continued.

        Args:
            upload: Name of the reply, of 32 hexadecimal digits.
            is_continued: Whether it was sent before, of which a part may have arrived.

        Raises:
            RefusedError: If the server does not take it, because the run has ended.
            httpx.HTTPError: If the connection is lost.
        """
        offset, is_lost = 0, is_continued
        self.sent.begin(len(message))

        def transmit() -> None:
            nonlocal offset, is_lost
            if is_lost:
                found = self._request("GET", f"order/{id}/reply", query={"upload": upload})
                arrived, is_lost = _get_fact(found, "bytes", int), False
                if arrived != offset:
                    offset = arrived
                    return
            part = memoryview(message)[offset : offset + CHUNK]
            headers = {"content-length": str(len(part))}
            query = {"upload": upload, "start": offset, "total": len(message)}
            is_lost = True
            answer = self._request("PUT", f"order/{id}/reply", headers, self._pace(part, offset), query)
            offset, is_lost = _get_fact(answer, "bytes", int), False

        while True:
            self._persist(transmit, lambda: offset)
            if offset >= len(message):
                return

    def _persist(self, transmit: Callable[[], None], count: Callable[[], int]) -> None:
        """Transmit a part of a message, again as long as each attempt transmits anything."""
        left, pause = _RETRIES, _PAUSE
        while True:
            before = count()
            try:
                transmit()
                return
            except (httpx.TransportError, RefusedError) as error:
                if isinstance(error, RefusedError) and error.status != httpx.codes.CONFLICT:  # another part follows
                    raise
                if count() > before:
                    return
                if not left:
                    raise
            left -= 1
            time.sleep(pause)
            pause *= 2

    def _pace(self, part: memoryview, start: int) -> Iterator[bytes]:
        for position in range(0, len(part), _BLOCK):
            block = bytes(part[position : position + _BLOCK])
            self.sent.show(start + position)
            self._up.wait(len(block))
            yield block

    def send_failure(self, id: str, reason: str) -> None:
        """Report why there is no reply to an order."""
        self._request("POST", f"order/{id}/failure", content=reason.encode()[:500])

    def fetch_base(self, offer: str, file: str, start: int) -> bytes:
        """Return bytes of a file of a base model that the server offers."""
        with self._stream("GET", f"base/{offer}/{file}", {"range": f"bytes={start}-"}) as response:
            data = bytearray()
            for block in response.iter_raw(_BLOCK):
                data += block
                if len(data) > CHUNK:
                    raise httpx.RemoteProtocolError("more than was requested")
                self._down.wait(len(block))
        return bytes(data)

    def note_work(self, work: NodeWork | None) -> None:
        """Report that the node is there, and what it does."""
        self._request("POST", "heartbeat", content=b"" if work is None else work.to_text().encode())

    def leave(self) -> None:
        """Report that the node was stopped."""
        self._request("POST", "leave")

    def _request(self, method: str, path: str, *args: Any, **options: Any) -> dict[str, Any]:
        with self._stream(method, path, *args, **options) as response:
            facts = _parse_facts(read_short(response))
        if facts is None:
            raise httpx.RemoteProtocolError("not an answer of a fedspan server")
        return facts

    @contextmanager
    def _stream(
        self,
        method: str,
        path: str,
        headers: dict[str, str] | None = None,
        content: Any = None,
        query: dict[str, Any] | None = None,
        wait: float = 0.0,
    ) -> Generator[httpx.Response]:
        """Send a request, and yield its answer, of which the body is not read, after its status was checked."""
        headers = {**(headers or {}), **({"authorization": f"Bearer {self.session}"} if self.session else {})}
        timeout = httpx.Timeout(_READ + wait, connect=_CONNECT)
        sent = self._client.stream(method, path, headers=headers, content=content, params=query, timeout=timeout)
        with sent as response:
            _require_success(response)
            yield response


def read_short(response: httpx.Response) -> bytes:
    """Return the body of an answer that is no part of a message, which may be anybody's.

    Raises:
        httpx.RemoteProtocolError: If it is too long, or compressed, which no request accepts.
    """
    if response.headers.get("content-encoding", "identity") != "identity":
        raise httpx.RemoteProtocolError("an answer that is compressed")
    content = bytearray()
    for block in response.iter_bytes(_BLOCK):
        content += block
        if len(content) > _SHORT:
            raise httpx.RemoteProtocolError("an answer that is too long")
    return bytes(content)


def _parse_facts(content: bytes) -> dict[str, Any] | None:
    try:
        facts = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) else None


def _get_fact(facts: dict[str, Any], name: str, kind: type[T]) -> T:
    value = facts.get(name)
    if type(value) is not kind:
        raise httpx.RemoteProtocolError(f"an answer without {name}")
    return value


def _require_success(response: httpx.Response) -> None:
    status = response.status_code
    if status in _AGAIN or response.is_server_error:  # 5xx: it ends, its disk is full, or a proxy does not reach it
        raise httpx.ReadError(f"the server answered {status}")
    if response.is_success:
        return
    facts = None
    with suppress(httpx.RemoteProtocolError):  # as a proxy's page, whose status says enough
        facts = _parse_facts(read_short(response))
    facts = facts or {}
    raise RefusedError(status, str(facts.get("reason", response.reason_phrase))[:200], facts)
