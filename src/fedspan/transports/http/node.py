"""A node of a deployment: a persistent process that takes orders from a server and sends replies.

The model stays loaded, and no code ever comes from the server. A node's only connections are the requests that it
sends, so it listens nowhere.
"""

from __future__ import annotations

import logging
import random
import secrets
import ssl
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Event, Thread

import httpx

from fedspan.errors import FedspanError, escape_controls
from fedspan.federation.protocol import Envelope
from fedspan.transports.http.client import Link, NodeConnection, RefusedError, open_client, read_short
from fedspan.transports.http.signing import NodeSigner, UnsignedSigner
from fedspan.transports.http.wire import NodeWork, SharedClient

_STOP = 0.5
"""Interval in which a node that waits for an order checks whether to stop, in seconds."""
_FAREWELL = 1.0
"""Seconds for which a node that is stopped takes an order that is on its way to it."""
_HEARTBEAT = 15.0
"""Seconds between two reports of what a node does while it carries out an order."""
_RECONNECT = 1.0, 30.0
"""Seconds before joining again after a lost connection: initial and maximum."""
_LEAVING = 50.0
"""Seconds for which a node that is stopped tries to send its finished reply."""
_REFUSED = 150.0
"""Seconds after which a refusal by the server is final."""
_UNKNOWN_PAUSE = 60.0
"""Maximum number of seconds between two connections of a node whose key the server does not accept."""
_CHECK_SECONDS = 10.0
_FOREIGN = 18, 19, 20, 21
"""OpenSSL's codes of a certificate whose authority is another one."""
_UNKNOWN = (
    "the server's operator has not admitted this node's key (fedspan admit KEY.pub), or has revoked it, and this node "
    "needs a new one (fedspan join --new-key)"
)

log = logging.getLogger("fedspan.node")

Answer = Callable[[Envelope], Envelope]
BeforeOrder = Callable[[Callable[[str, str, int], bytes]], None]
Signer = NodeSigner | UnsignedSigner


@dataclass
class _Reply:
    """A reply that the server has not taken completely.

    Args:
        message: The reply; None: there is none, for a reason.
        upload: Name of the reply at the server, under which another connection continues it.
    """

    order: str
    message: bytes | None
    reason: str = ""
    upload: str = field(default_factory=lambda: secrets.token_hex(16))
    is_sent: bool = False


def serve(
    link: Link,
    answer: Answer,
    stop: Event,
    on_idle: Callable[[], None] = lambda: None,
    before_order: BeforeOrder | None = None,
    get_work: Callable[[], NodeWork | None] = lambda: None,
) -> None:
    """Reply to orders until ``stop`` is set; join again after a lost connection.

    Args:
        answer: Computes the reply to an envelope; the type of an exception that it raises is reported to the server.
        on_idle: Called again and again while the node waits for an order or for the server, or transmits a message.
        before_order: Called before each request for an order with the function that fetches bytes of a base model's
            file, ``NodeConnection.fetch_base``; it returns at once.
        get_work: Returns what the node does, for the server's web page; None: it waits for orders.

    Raises:
        FedspanError: If the server refuses this node, or a file of certificates is not valid.
    """
    signer, pause = link.create_signer(), _RECONNECT[0]
    give_up_at, leave_at = time.monotonic() + _REFUSED, float("inf")
    node: _Node | None = None
    while not stop.is_set() or (node is not None and node.reply is not None and time.monotonic() < leave_at):
        on_idle()
        if stop.is_set():
            leave_at = min(leave_at, time.monotonic() + _LEAVING)
        try:
            with open_client(link) as client:
                connection = NodeConnection(link, signer, client, on_idle)
                connection.join()
                log.info("connected to %s as node %d", link.address, connection.node)
                pause = _RECONNECT[0]
                if node is None or node.connection.node != connection.node:  # without keys, each session is a new node
                    node = _Node(connection, signer, answer, get_work)
                connection.incoming = node.connection.incoming
                node.connection = connection
                try:
                    node.serve(stop, on_idle, before_order)
                finally:
                    give_up_at = time.monotonic() + _REFUSED
        except RefusedError as error:
            if error.status == httpx.codes.UNAUTHORIZED:  # the server restarted, or another process has the key
                log.warning("the session at %s has ended; next attempt in %g s", link.address, pause)
            else:
                reason = _UNKNOWN if error.status == httpx.codes.FORBIDDEN else escape_controls(str(error))
                if time.monotonic() > give_up_at:
                    raise FedspanError("server", link.address, problem=reason) from error
                log.warning("%s refused the connection: %s; next attempt in %g s", link.address, reason, pause)
            _wait(stop, pause)
            pause = min(2 * pause, _UNKNOWN_PAUSE)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            reason = explain_certificate(error, link) or _describe_error(error)
            log.warning("no connection to %s (%s); next attempt in %g s", link.address, reason, pause)
            _wait(stop, pause)
            pause = min(2 * pause, _RECONNECT[1])


def _wait(stop: Event, seconds: float) -> None:
    """Wait before joining again: for a random time, so that the nodes of a restarted server do not all join at once.

    A node that is stopped while its reply waits tries again soon.
    """
    if stop.is_set():
        time.sleep(min(seconds, _RECONNECT[0]))
    else:
        stop.wait(seconds * random.uniform(0.5, 1.5))


def _describe_error(error: Exception) -> str:
    return escape_controls(" ".join(f"{type(error).__name__}: {error}".split())[:200])


class _Node:
    """What outlives a connection: the reply that the server has not taken."""

    def __init__(
        self, connection: NodeConnection, signer: Signer, answer: Answer, get_work: Callable[[], NodeWork | None]
    ) -> None:
        self.connection = connection
        self._signer, self._answer, self._get_work = signer, answer, get_work
        self.reply: _Reply | None = None

    def serve(self, stop: Event, on_idle: Callable[[], None], before_order: BeforeOrder | None) -> None:
        """Carry out orders over a connection until it is lost or ``stop`` is set."""
        while not stop.is_set() or self.reply is not None:
            if self.reply is not None:
                self._send()
                continue
            if before_order is not None:
                before_order(self.connection.fetch_base)
            order = self._take(stop, on_idle)
            if order is not None:
                with self._reporting():
                    self.reply = self._carry_out(*order)
        self.connection.leave()

    def _take(self, stop: Event, on_idle: Callable[[], None]) -> tuple[str, int, bytes | None] | None:
        """Wait for the next order; None: there is none yet, or ``stop`` is set.

        An order that arrives while the node is stopped is carried out, because the server waits for its reply.
        """
        results = SimpleQueue[tuple[str, int, bytes | None] | BaseException | None]()

        def take() -> None:
            try:
                results.put(self.connection.take_order())
            except BaseException as error:  # raised in the thread that waits
                results.put(error)

        Thread(target=take, daemon=True).start()
        while not stop.is_set():
            on_idle()
            with suppress(Empty):
                result = results.get(timeout=_STOP)
                if isinstance(result, RefusedError) and result.status == httpx.codes.NOT_FOUND:
                    log.warning("an order can no longer be fetched; its run has probably ended")
                    return None
                if isinstance(result, BaseException):
                    raise result
                return result
        with suppress(Empty):
            result = results.get(timeout=_FAREWELL)
            return None if isinstance(result, BaseException) else result
        return None

    def _carry_out(self, id: str, reply_bytes: int, message: bytes | None) -> _Reply:
        if message is None:
            return _Reply(id, None, "the message exceeds the size limit of this node")
        node = self.connection.node
        try:
            order = self._signer.open_order(message, node)
            reply = self._signer.seal_reply(self._answer(order.envelope), node, order)
        except Exception as error:  # on any error the node continues, and the server learns that there is no reply
            log.exception("an order could not be answered")
            return _Reply(id, None, f"{type(error).__name__}; see the node's log")
        if len(reply) > reply_bytes:
            log.warning("the reply has %d bytes, and its order allows %d", len(reply), reply_bytes)
            return _Reply(id, None, "the reply is larger than its order allows")
        return _Reply(id, reply)

    def _send(self) -> None:
        """Send the reply that waits; it waits on if the connection is lost, so that the next one sends it."""
        reply = self.reply
        assert reply is not None
        try:
            if reply.message is None:
                self.connection.send_failure(reply.order, reply.reason)
            else:
                is_continued, reply.is_sent = reply.is_sent, True
                self.connection.send_reply(reply.order, reply.message, reply.upload, is_continued=is_continued)
        except RefusedError as error:
            if error.status == httpx.codes.UNAUTHORIZED:
                raise
            log.warning("the server does not take the reply; its run has probably ended (%s)", _describe_error(error))
        self.reply = None

    @contextmanager
    def _reporting(self) -> Generator[None]:
        """Report what the node does again and again within this context, so that it counts as online."""
        stop = Event()

        def report() -> None:
            while not stop.wait(_HEARTBEAT):
                connection = self.connection
                with suppress(httpx.HTTPError, RefusedError, ValueError):
                    try:
                        connection.note_work(self._get_work())
                    except RefusedError as error:
                        if error.status == httpx.codes.UNAUTHORIZED and not stop.is_set():  # the server was restarted
                            connection.join()

        Thread(target=report, daemon=True).start()
        try:
            yield
        finally:
            stop.set()


def check_server(link: Link) -> str:
    """Request a server's health, as the node will send its requests, through the same proxy, and offer it the key.

    Returns:
        A line about the connection and the key's admission.

    Raises:
        FedspanError: If the server is not reached, its certificate is not one of the authority for this address, or it
            is another version.
    """
    host, _, port = link.address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise FedspanError("server", link.address, "the address of a server as host:port")
    try:
        with open_client(link) as client:
            with client.stream("GET", "health", timeout=_CHECK_SECONDS) as response:
                answer = read_short(response)
            if answer != b"ok":
                raise FedspanError("server", link.address, problem=f"no fedspan server answers at {link.address}")
            admission = _check_admission(link, client)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        problem = explain_certificate(error, link) or f"no connection to {link.address} ({error})"
        raise FedspanError("server", link.address, problem=problem) from error
    how = (
        "without encryption"
        if link.authority is None
        else f"with a certificate of {link.tls_authority or link.authority}"
    )
    return f"{link.address} is reached, {how}{admission}"


def _check_admission(link: Link, client: SharedClient) -> str:
    if link.key is None or link.authority is None:
        return ""
    try:
        NodeConnection(link, link.create_signer(), client).answer_challenge()
    except RefusedError as error:
        if error.status == httpx.codes.FORBIDDEN:
            return "; its operator has not admitted this node's key (fedspan admit KEY.pub), or has revoked it"
        raise FedspanError("server", link.address, problem=escape_controls(str(error))) from error
    return "; its operator has admitted this node's key"


def explain_certificate(error: BaseException, link: Link) -> str | None:
    """Explain an error by the server's certificate; None: it is another one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    if cause.verify_code not in _FOREIGN:
        return f"the server's certificate is not valid for {link.address} ({cause.verify_message})"
    return (
        f"the certificate of {link.address} is not signed by the authority in {link.tls_authority or link.authority} "
        f"({cause.verify_message}). If a proxy of your network inspects TLS, ask for an exception for this address, or "
        "name its authority in tls_authority: messages stay sealed to the server and its nodes"
    )
