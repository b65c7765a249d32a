"""What the door and the supervision of a SuperLink need of it."""

from __future__ import annotations

import logging
import math
import socket
import sqlite3
import sys
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from functools import lru_cache
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.common.constant import (
    SUPERLINK_NODE_ID,
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
)
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    TASK_TOKEN_HEADER,
    NodeStatus,
)
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, public_key_to_bytes, verify_signature
from flwr.supercore.utils import uint64_to_int64

if TYPE_CHECKING:
    import asyncio

    from starlette.middleware import Middleware

from fedspan.transports.flower.wire import INLINE_BYTES, NODE_PATH, RUN_PATH, parse_reply_limit

__all__ = [
    "FLEET_HTTP_PUBLIC_KEY_HEADER",
    "FLEET_HTTP_SIGNATURE_HEADER",
    "TASK_TOKEN_HEADER",
    "TIMESTAMP_HEADER",
    "PushedReply",
    "build_flwr_command",
    "find_node_id",
    "find_reply_limit",
    "is_node_key_required",
    "read_node_id",
    "read_pushed_reply",
    "run_superlink",
    "verify_node_headers",
]

_SHUTDOWN = 3
"""Seconds that a SuperLink that ends leaves its requests; those that wait for orders would take longer."""
_PUSH_SECONDS = 900
"""Seconds after its last object for which a message waits for further ones, as long as the door keeps a part of one
(``DoorLimits.partial_seconds``); three minutes in Flower, which a slow or broken link may take."""
_IDLE = 75
"""Seconds after which an idle connection is closed, longer than a node's; a new one costs a TLS handshake."""

_LOGGED = 128
"""Maximum number of characters of a method or a path in the access log; both may have the size of a request's head."""


def _shorten_remarkable(record: logging.LogRecord) -> bool:
    """Shorten an entry of the access log, and return whether it is none of the door's own requests that succeeded."""
    match record.args:
        case (client, str(method), str(path), version, int(status)):
            record.args = (client, method[:_LOGGED], path[:_LOGGED], version, status)
            return status >= 400 or not path.startswith((NODE_PATH, RUN_PATH))
        case _:
            return True


def run_superlink(
    middleware: Sequence[Middleware],
    protocol: type[asyncio.Protocol],
    listen: Callable[[socket.socket], socket.socket],
) -> None:
    """Run ``flower-superlink`` with this process's arguments.

    Args:
        middleware: Middleware that comes before Flower's own extensions.
        protocol: uvicorn's protocol class for connections.
        listen: Makes the socket that accepts connections of the bound one.
    """
    import uvicorn
    from flwr.supercore.corestate import sql_corestate
    from flwr.superlink import extensions  # the whole SuperLink, which only its own process needs

    sql_corestate.__dict__["OBJECT_PUSH_SESSION_TTL_SECONDS"] = _PUSH_SECONDS
    command = import_module("flwr.superlink.cli.flower_superlink")  # its package has a function of the same name
    original = extensions.get_middleware
    extensions.get_middleware = lambda: (*middleware, *original())

    def run(**options: Any) -> None:
        # By default, uvicorn lets a client of this machine name its own address and port in a header, by which the door
        # recognizes the operator. An upgrade would leave the protocol, and its bounds; another loop than asyncio's
        # would not call `accept`.
        config = uvicorn.Config(
            **options,
            proxy_headers=False,
            http=protocol,
            ws="none",
            loop="asyncio",
            timeout_keep_alive=_IDLE,
            timeout_graceful_shutdown=_SHUTDOWN,
        )
        logging.getLogger("uvicorn.access").addFilter(_shorten_remarkable)
        uvicorn.Server(config).run([listen(config.bind_socket())])

    command.__dict__["uvicorn"] = SimpleNamespace(run=run)
    command.flower_superlink()


def is_node_key_required(app: Any) -> bool:
    """Return whether a SuperLink's app serves admitted nodes only."""
    return bool(app.state.enable_supernode_auth)


def find_node_id(app: Any, public_key: bytes) -> int | None:
    """Return Flower's id of the admitted node with a public key; None: there is none.

    Args:
        app: The SuperLink's app.
        public_key: The key as PEM.
    """
    return app.state.linkstate_factory.state().get_node_id_by_public_key(public_key)


_GROUP = "SELECT group_id FROM message_ins WHERE message_id = ? AND dst_node_id = ?"


def find_reply_limit(app: Any, node: int, order: str) -> int | None:
    """Return the maximum size of the reply to an order in bytes; None: the order names none.

    A node that replies to an order that it was not sent, or that was deleted, may send what fits into one request.

    Args:
        app: The SuperLink's app.
        node: Flower's id of the node that replies.
        order: Id of the order.
    """
    with app.state.linkstate_factory.state().session() as session:
        rows = session.connection().exec_driver_sql(_GROUP, (order, uint64_to_int64(node)))
        group = rows.scalars().first()
    return INLINE_BYTES if group is None else parse_reply_limit(group)


_HEADER = 1024
"""Maximum size of a key, a signature or a time in a header, in bytes; a key of the largest curve has 360."""

_public_key = lru_cache(4096)(bytes_to_public_key)


def verify_node_headers(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Verify the signed time in a request's headers.

    Args:
        headers: The headers by name in lower case.

    Returns:
        The public key as PEM that signed it; None: the headers are not valid now.
    """
    names = FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TIMESTAMP_HEADER
    key, signature, stamp = (headers.get(name.encode(), b"") for name in names)
    if max(len(key), len(signature), len(stamp)) > _HEADER:
        return None
    try:
        key, signature = b64decode(key, validate=True), b64decode(signature, validate=True)
        age = (now() - datetime.fromisoformat(stamp.decode("ascii"))).total_seconds()
        if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
            return None
        return key if verify_signature(_public_key(key), stamp, signature) else None
    except Exception:  # strangers choose the kind of the key, and with it what goes wrong
        return None


class PushedReply(NamedTuple):
    """What a node announces when it sends a message.

    Args:
        node: Flower's id of the node that claims to send the request.
        sender: Flower's id of the message's sender.
        is_to_server: Whether the message is addressed to the server.
        reply_to: Id of the message that it replies to; empty: it is no reply.
        objects: Number of its objects, counted up to one above the limit.
        depth: Depth of the tree of its objects, counted as far as its objects are.
        request: Flower's request, parsed.
    """

    node: int
    sender: int
    is_to_server: bool
    reply_to: str
    objects: int
    depth: int
    request: PushMessagesRequest


def read_pushed_reply(body: bytes, limit: int) -> PushedReply | None:
    """Read what a node announces; None: it is not exactly one message with the tree of its objects.

    Args:
        body: The body of a request to ``push-messages``.
        limit: Number of objects above which no further ones are counted.
    """
    request = PushMessagesRequest()
    try:
        request.ParseFromString(body)
    except Exception:  # protobuf's own error class depends on its implementation
        return None
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        return None
    head, tree = request.messages_list[0].metadata, request.message_object_trees[0]
    if head.message_id != tree.object_id:
        return None
    if not (math.isfinite(head.created_at) and math.isfinite(head.ttl)):
        return None  # Flower's checks pass numbers that are none, which its database then returns as nothing
    objects, depth, level = 1, 1, [tree]
    while objects <= limit:
        below = chain.from_iterable(parent.children for parent in level)
        level = list(islice(below, limit + 1 - objects))
        if not level:
            break
        objects, depth = objects + len(level), depth + 1
    return PushedReply(
        request.node.node_id,
        head.src_node_id,
        head.dst_node_id == SUPERLINK_NODE_ID,
        head.reply_to_message_id,
        objects,
        depth,
        request,
    )


def read_node_id(database: Path, key: bytes) -> tuple[int | None, bool]:
    """Return Flower's id of the node that was registered with a key, from a SuperLink's database.

    Args:
        database: The SuperLink's database; nothing is written.
        key: The public key in OpenSSH's format.

    Returns:
        The id (None: no node was), and whether the node is still registered.
    """
    try:
        pem = public_key_to_bytes(load_ssh_public_key(key))  # pyright: ignore[reportArgumentType]
        with closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            row = connection.execute("SELECT node_id, status FROM node WHERE public_key = ?", (pem,)).fetchone()
    except (sqlite3.Error, ValueError, UnsupportedAlgorithm, AttributeError):
        return None, False
    return (None, False) if row is None else (row[0] % 2**64, row[1] != NodeStatus.UNREGISTERED)


def build_flwr_command(*arguments: str) -> list[str]:
    """Return the command line of ``flwr`` in this Python environment."""
    return [sys.executable, "-c", "from flwr.cli.app import app; app()", *arguments]
