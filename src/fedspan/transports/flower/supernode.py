"""A node of a deployment: a persistent process that fetches messages from a SuperLink and sends replies.

Flower's own ``flower-supernode`` starts a process for every message, which imports everything, reloads the model and
runs whatever app the server names. This loop speaks the same protocol through Flower's own client and passes every
message to locally installed code: the model stays loaded, and no code ever comes from the server.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread

import httpx
from flwr.app import Error, Message

from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from fedspan.transports.flower.adapter import (
    Keys,
    NodeConnection,
    ObjectPullError,
    ObjectPushError,
    OutgoingReply,
    ReceivedOrder,
    RunNotRunningException,
    connect_node,
    set_identity,
)
from fedspan.transports.flower.messages import (
    TooLarge,
    assemble_message,
    draw_salt,
    fetch_objects,
    from_records,
    to_records,
)
from fedspan.transports.flower.signing import NodeSigner, Signer, UnsignedSigner
from fedspan.transports.flower.transfers import Bandwidth, Transfers
from fedspan.transports.flower.wire import NodeWork

__all__ = ["Link", "explain_clock", "serve"]

_STOP = 0.5
"""Interval in which a node that waits for an order checks whether to stop, in seconds."""
_FAREWELL = 1.0
"""Seconds for which a node that is stopped takes an order that is on its way to it."""
_PROMPT = 1.0
"""An empty answer within this number of seconds means that the server does not wait for orders, because another process
requests them with the same key; then the node itself waits."""
_RECONNECT = 2.0, 30.0
"""Seconds before reconnecting after a lost connection: initial and maximum."""
_OFFLINE = 50.0
"""Seconds for which a node whose connection is lost counts as online: a minute after its last heartbeat."""
_RETRIES = 2
"""Retries of a request that a broken connection lost, some seconds apart: a server closes idle connections, and a
reply may take an hour to compute. After these retries the connection counts as lost."""
_REFUSED = 150.0
"""Seconds after which a refusal by the SuperLink is final: it detects a lost node connection within 60 s."""
_UNKNOWN_PAUSE = 60.0
"""Maximum number of seconds between two connections of a node whose key the server does not accept."""
_UNKNOWN = (
    "the server's operator has not admitted this node's key (fedspan admit KEY.pub), or has revoked it, and this node "
    "needs a new one (fedspan join --new-key)"
)
_CONNECTED = "the previous connection of this node's key has not timed out yet"
_FAILED = 1000
"""Code of an error reply whose reason fedspan provides."""

_OVER = RunNotRunningException, ObjectPullError, ObjectPushError
"""Errors that Flower raises for a message of a run that has ended (the first is not an ``Exception``), for example
because the submitting process was killed."""

log = logging.getLogger("fedspan.node")

Answer = Callable[[Envelope], Envelope]
BeforeOrder = Callable[[Callable[[str, str, int], bytes]], None]


class Link:
    """The connection data of a SuperLink for a node.

    Args:
        address: Address as ``host:port``.
        authority: File with the certificate of the authority that signed the SuperLink's; None: an insecure connection.
        keys: Key pair of the node; None: an unauthenticated node.
        limit: Maximum size of a message, in bytes.
        bandwidth: Limits on the bandwidth of messages; None: no limits.
    """

    def __init__(
        self,
        address: str,
        authority: Path | None,
        keys: Keys | None,
        limit: int,
        bandwidth: Bandwidth | None = None,
    ) -> None:
        self.address, self.authority, self.keys, self.limit = address, authority, keys, limit
        self.bandwidth = bandwidth

    def create_signer(self) -> Signer:
        """Return the signer of this node: with keys, only orders that the server signed are carried out.

        Raises:
            FedspanError: If the authority's file has no valid certificate of an order key.
        """
        if self.keys is None or self.authority is None:
            return UnsignedSigner()
        return NodeSigner(self.keys[0], self.authority)


def serve(
    link: Link,
    answer: Answer,
    stop: Event,
    on_idle: Callable[[], None] = lambda: None,
    before_order: BeforeOrder | None = None,
    get_work: Callable[[], NodeWork | None] = lambda: None,
) -> None:
    """Reply to messages until ``stop`` is set; reconnect after a lost connection.

    Args:
        link: Connection data of the SuperLink.
        answer: Computes the reply to an envelope; the type of an exception that it raises is reported to the server.
        stop: Event that ends the function when set.
        on_idle: Called again and again while the node waits for an order or for the SuperLink, or transmits a message.
        before_order: Called before each request for an order with the function that fetches bytes of a base model's
            file, ``NodeConnection.fetch_base``; it returns at once.
        get_work: Returns what the node does, for the server's web page; None: it waits for orders.

    Raises:
        FedspanError: If the SuperLink refuses this node, or the authority's file has no certificate of an order key.
    """
    signer, received, transfers = link.create_signer(), _Received(), Transfers(link.bandwidth, on_idle)
    pause, give_up_at, leave_at = _RECONNECT[0], time.monotonic() + _REFUSED, float("inf")
    while not stop.is_set():
        on_idle()
        try:
            authority = None if link.authority is None else link.authority.read_bytes()
            with connect_node(link.address, authority, link.keys, _RETRIES, transfers) as connection:
                connection.get_work = get_work
                log.info("connected to %s as node %d", link.address, connection.node_id)
                pause = _RECONNECT[0]
                try:
                    while not stop.is_set() or received.reply is not None:
                        try:
                            _serve_connection(connection, link, signer, answer, stop, received, on_idle, before_order)
                        except httpx.TransportError as error:
                            if stop.is_set():
                                leave_at = min(leave_at, time.monotonic() + _OFFLINE)
                            is_late = time.monotonic() >= leave_at
                            if is_late or not _wait_for_link(
                                connection, link, stop, error, received, on_idle, leave_at
                            ):
                                raise
                finally:
                    connection.is_stopped = stop.is_set() and received.reply is None
                    give_up_at = time.monotonic() + _REFUSED
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            is_unknown = status == httpx.codes.UNAUTHORIZED
            reason = (explain_clock(error.response) or _UNKNOWN) if is_unknown else _CONNECTED
            if time.monotonic() > give_up_at and (is_unknown or status == httpx.codes.FORBIDDEN):
                raise FedspanError("server", link.address, problem=reason) from error
            log.warning("%s refused the connection: %s; next attempt in %g s", link.address, reason, pause)
            stop.wait(_vary_pause(pause))
            pause = min(2 * pause, _UNKNOWN_PAUSE) if is_unknown else _RECONNECT[0]
        except (httpx.HTTPError, OSError) as error:
            log.warning("no connection to %s (%s); next attempt in %g s", link.address, _describe_error(error), pause)
            stop.wait(_vary_pause(pause))
            pause = min(2 * pause, _RECONNECT[1])


def explain_clock(response: httpx.Response) -> str | None:
    """Explain a refusal by this machine's clock; None: it is near the server's.

    The SuperLink refuses requests that were signed more than 5 seconds ahead of its time, or 305 seconds before it.
    """
    try:
        ahead = time.time() - parsedate_to_datetime(response.headers["date"]).timestamp()
    except (KeyError, ValueError, TypeError, OverflowError):
        return None
    if -300 < ahead < 4:  # the header has whole seconds
        return None
    return f"the clock of this machine is {abs(ahead):.0f} seconds {'ahead of' if ahead > 0 else 'behind'} the server's"


def _wait_for_link(
    connection: NodeConnection,
    link: Link,
    stop: Event,
    error: httpx.TransportError,
    received: _Received,
    on_idle: Callable[[], None] = lambda: None,
    leave_at: float = float("inf"),
) -> bool:
    """Wait until the SuperLink takes a heartbeat again; return whether it does so before it takes the node for offline.

    A new connection would have to wait until then: the SuperLink refuses it as long as it takes the node for online. A
    node that is stopped waits only if it has a reply to send.
    """
    log.warning("no connection to %s (%s)", link.address, _describe_error(error))
    give_up_at = min(time.monotonic() + _OFFLINE, leave_at)
    while time.monotonic() < give_up_at:
        if stop.is_set() and received.reply is None:
            return True
        on_idle()
        if connection.renew():
            return True
        time.sleep(_vary_pause(_RECONNECT[0]) / 4)
    return False


def _vary_pause(seconds: float) -> float:
    """Vary a pause at random, so that the nodes of a restarted server do not all reconnect at once."""
    return seconds * random.uniform(0.5, 1.5)


def _describe_error(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


@dataclass
class _Received:
    """State that outlives a connection.

    Args:
        id: Id of the last order that the node received completely.
        partial_id: Id of the order that it received in part.
        contents: The objects of that order, by id.
        reply: The reply that the SuperLink has not taken completely; None: there is none.
    """

    id: str = ""
    partial_id: str = ""
    contents: dict[str, bytes] = field(default_factory=dict)
    reply: OutgoingReply | None = None


def _serve_connection(
    connection: NodeConnection,
    link: Link,
    signer: Signer,
    answer: Answer,
    stop: Event,
    received: _Received,
    on_idle: Callable[[], None] = lambda: None,
    before_order: BeforeOrder | None = None,
) -> None:
    while not stop.is_set() or received.reply is not None:
        started = time.monotonic()
        try:
            if received.reply is not None:
                _send_reply(connection, received)
                continue
            if before_order is not None:
                before_order(connection.fetch_base)
            order = _next_order(connection, received.id, stop, on_idle)
            if order is not None:
                _process_order(connection, order, link.limit, signer, answer, received)
            elif time.monotonic() - started < _PROMPT:
                stop.wait(_PROMPT)
        except _OVER as error:
            log.warning(
                "a message can no longer be fetched or answered; its run has probably ended (%s)",
                type(error).__name__,
            )


def _next_order(
    connection: NodeConnection, received: str, stop: Event, on_idle: Callable[[], None] = lambda: None
) -> ReceivedOrder | None:
    """Wait for the next order; None: there is none yet, or ``stop`` is set.

    An order that arrives while the node is stopped is carried out, because the server waits for its reply.
    """
    results = SimpleQueue[ReceivedOrder | BaseException | None]()

    def take() -> None:
        try:
            results.put(connection.take_order(received))
        except BaseException as error:  # raised in the thread that waits
            results.put(error)

    Thread(target=take, daemon=True).start()
    while not stop.is_set():
        on_idle()
        with suppress(Empty):
            result = results.get(timeout=_STOP)
            if isinstance(result, BaseException):
                raise result
            return result
    with suppress(Empty):
        result = results.get(timeout=_FAREWELL)
        return None if isinstance(result, BaseException) else result
    return None


def _process_order(
    connection: NodeConnection,
    order: ReceivedOrder,
    limit: int,
    signer: Signer,
    answer: Answer,
    received: _Received,
) -> None:
    message, run, id = order.message, order.message.metadata.run_id, order.message.metadata.message_id
    set_identity(1, run, connection.node_id)
    started = time.monotonic()
    if received.partial_id != id:
        received.partial_id, received.contents = id, {}
    received.contents |= order.contents
    progress = connection.transfers.received
    progress.begin(0, sum(map(len, received.contents.values())))
    try:
        contents = fetch_objects(
            order.tree,
            partial(connection.pull_object, run),
            limit,
            received.contents,
            lambda size: progress.begin(size, progress.done),
        )
    except TooLarge:
        contents = None
    except ObjectPullError:  # it was deleted; it is not sent again
        received.id, received.contents = id, {}
        raise
    received.id, received.contents = id, {}
    reply = _make_reply(message, contents, limit, connection.node_id, signer, answer)
    received.reply = OutgoingReply(run, reply, time.monotonic() - started, connection.node_id, message)
    _send_reply(connection, received)


def _send_reply(connection: NodeConnection, received: _Received) -> None:
    """Send the reply that waits; it waits on if the connection is lost, so that the next one transmits the rest."""
    reply, received.reply = received.reply, None
    if reply is None or reply.node != connection.node_id:  # without a key, every connection is another node
        return
    try:
        connection.send_reply(reply)
    except httpx.TransportError:
        received.reply = reply
        raise
    except httpx.HTTPStatusError as error:  # `take_order` fails next if this node is no longer accepted
        log.warning("the SuperLink does not take the reply (%d)", error.response.status_code)
        if error.response.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE and reply.reply.has_content():
            # otherwise the server would wait for a reply until its deadline
            refusal = Message(Error(_FAILED, "the reply is larger than its order allows"), reply_to=reply.order)
            received.reply = OutgoingReply(reply.run, refusal, reply.seconds, reply.node, reply.order)
            _send_reply(connection, received)


def _make_reply(
    message: Message, contents: dict[str, bytes] | None, limit: int, node: int, signer: Signer, answer: Answer
) -> Message:
    if contents is None:
        return Message(Error(_FAILED, "the message exceeds the size limit of this node"), reply_to=message)
    try:
        complete = assemble_message(message.metadata.message_id, contents, limit)
        sealed = from_records(complete.content)
        reply = signer.seal(answer(signer.open(sealed, node)), node, sealed.nonce)
        return Message(to_records(reply, draw_salt()), reply_to=complete)
    except Exception as error:  # on any error the node continues, and the server learns that there is no reply
        log.exception("a message could not be answered")
        return Message(Error(_FAILED, f"{type(error).__name__}; see the node's log"), reply_to=message)
