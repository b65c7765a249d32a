"""A node of a deployment: a persistent process that fetches messages from a SuperLink and sends replies.

Flower's own ``flower-supernode`` starts a process for every message, which imports everything, reloads the model and
runs whatever app the server names. This loop speaks the same protocol through Flower's own client and passes every
message to locally installed code: the model stays loaded, and no code ever comes from the server.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event

import httpx
from flwr.app import Error, Message

from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from fedspan.transports.flower.adapter import (
    Keys,
    NodeConnection,
    ObjectPullError,
    ObjectPushError,
    ObjectTree,
    RunNotRunningException,
    connect_node,
    set_identity,
)
from fedspan.transports.flower.messages import (
    TooLarge,
    assemble_message,
    fetch_objects,
    from_records,
    new_salt,
    to_records,
)
from fedspan.transports.flower.signing import NodeSigner, Signer, UnsignedSigner

__all__ = ["Link", "serve"]

_MIN_POLL = 0.1
"""Initial polling interval after a message, as a fraction of the link's; it grows to the full interval."""
_RECONNECT = 2.0, 30.0
"""Seconds before reconnecting after a lost connection: initial and maximum."""
_RETRIES = 2
"""Retries of a request that a broken connection lost, some seconds apart: a server closes idle connections, and a
reply may take an hour to compute. After these retries the connection counts as lost."""
_REFUSED = 150.0
"""Seconds after which a refusal by the SuperLink is final: it detects a lost node connection within 60 s."""
_FAILED = 1000
"""Code of an error reply whose reason fedspan provides."""

_OVER = RunNotRunningException, ObjectPullError, ObjectPushError
"""Errors that Flower raises for a message of a run that has ended (the first is not an ``Exception``), for example
because the submitting process was killed."""

log = logging.getLogger("fedspan.node")

Answering = Callable[[Envelope], Envelope]


class Link:
    """The connection data of a SuperLink for a node.

    Args:
        address: Address as ``host:port``.
        authority: File with the certificate of the authority that signed the SuperLink's; None: an insecure connection.
        keys: Key pair of the node; None: an unauthenticated node.
        limit: Maximum size of a message, in bytes.
        poll: Maximum polling interval for messages, in seconds.
    """

    def __init__(self, address: str, authority: Path | None, keys: Keys | None, limit: int, poll: float = 1.0) -> None:
        self.address, self.authority, self.keys, self.limit, self.poll = address, authority, keys, limit, poll

    def signer(self) -> Signer:
        """Return the signer of this node: with keys, only orders that the server signed are carried out.

        Raises:
            FedspanError: If the authority's file has no valid certificate of an order key.
        """
        if self.keys is None or self.authority is None:
            return UnsignedSigner()
        return NodeSigner(self.keys[0], self.authority)


def serve(link: Link, answering: Answering, stop: Event) -> None:
    """Reply to messages until ``stop`` is set; reconnect after a lost connection.

    Args:
        link: Connection data of the SuperLink.
        answering: Computes the reply to an envelope; the type of an exception that it raises is reported to the server.
        stop: Event that ends the function when set.

    Raises:
        FedspanError: If the SuperLink refuses this node, or the authority's file has no certificate of an order key.
    """
    signer = link.signer()
    pause, give_up_at = _RECONNECT[0], time.monotonic() + _REFUSED
    while not stop.is_set():
        try:
            authority = None if link.authority is None else link.authority.read_bytes()
            with connect_node(link.address, authority, link.keys, _RETRIES) as connection:
                log.info("connected to %s as node %d", link.address, connection.node_id)
                pause = _RECONNECT[0]
                try:
                    _answer(connection, link, signer, answering, stop)
                finally:
                    give_up_at = time.monotonic() + _REFUSED
        except httpx.HTTPStatusError as error:
            if time.monotonic() > give_up_at and error.response.status_code in (401, 403):
                expected = "a SuperLink that knows this node's key (fedspan admit KEY.pub, on the server)"
                raise FedspanError("server", link.address, expected) from error
            reason = "unknown node key, or the previous connection has not timed out yet"
            log.warning("%s refused the connection: %s; next attempt in %g s", link.address, reason, pause)
            stop.wait(pause)
        except (httpx.HTTPError, OSError) as error:
            log.warning("no connection to %s (%s); next attempt in %g s", link.address, _describe(error), pause)
            stop.wait(pause)
            pause = min(2 * pause, _RECONNECT[1])


def _describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _answer(connection: NodeConnection, link: Link, signer: Signer, answering: Answering, stop: Event) -> None:
    pause = _MIN_POLL * link.poll
    while not stop.is_set():
        try:
            received = connection.receive()
            if received is not None:
                message, tree = received
                _answer_one(connection, message, tree, link.limit, signer, answering)
        except _OVER as error:
            log.warning(
                "a message can no longer be fetched or answered; its run has probably ended (%s)",
                type(error).__name__,
            )
            received = None
        if received is not None:
            pause = _MIN_POLL * link.poll
            continue
        stop.wait(pause)
        pause = min(1.5 * pause, link.poll)


def _answer_one(
    connection: NodeConnection, message: Message, tree: ObjectTree, limit: int, signer: Signer, answering: Answering
) -> None:
    run = message.metadata.run_id
    set_identity(1, run, connection.node_id)
    started = time.monotonic()
    try:
        contents = fetch_objects(tree, partial(connection.pull_object, run), limit)
    except TooLarge:
        contents = None
    connection.confirm(run, message.metadata.message_id)
    reply = _reply(message, contents, limit, connection.node_id, signer, answering)
    try:
        connection.send_reply(run, reply, time.monotonic() - started)
    except httpx.HTTPStatusError as error:  # `receive` fails next if this node is no longer accepted
        log.warning("the SuperLink does not take the reply (%d)", error.response.status_code)


def _reply(
    message: Message, contents: dict[str, bytes] | None, limit: int, node: int, signer: Signer, answering: Answering
) -> Message:
    if contents is None:
        return Message(Error(_FAILED, "the message is larger than this node takes"), reply_to=message)
    try:
        complete = assemble_message(message.metadata.message_id, contents, limit)
        sealed = from_records(complete.content)
        reply = signer.seal(answering(signer.open(sealed, node)), node, sealed.nonce)
        return Message(to_records(reply, new_salt()), reply_to=complete)
    except Exception as error:  # on any error the node continues, and the server learns that there is no reply
        log.exception("a message could not be answered")
        return Message(Error(_FAILED, f"{type(error).__name__}; see the node's log"), reply_to=message)
