"""The only module that uses names of Flower that are not its public interface, and what it relies on.

Range: Flower 1.41.0 only (``flwr==1.41.0`` in ``pyproject.toml``). ``tests/transports/flower/test_flower_adapter.py``
checks each item against the installed Flower; run it first after an upgrade. Public are ``flwr.app``,
``flwr.clientapp``, ``flwr.serverapp`` and ``flwr.simulation``, which any module of this package may import.

Identity:

- ``flwr.supercore.task_identity.TaskIdentity``: ``task_id``, ``run_id`` and ``node_id`` can be set; ``Message`` needs
  them.

Messages and their objects:

- ``Message.metadata.__dict__["_message_id"]`` is the message's id; ``Message.object_id`` is the hash of its content.
- ``flwr.app.message.make_message`` takes metadata and an error.
- ``flwr.common.constant.ErrorCode.MESSAGE_UNAVAILABLE``, ``flwr.supercore.constant.SYSTEM_MESSAGE_TYPE`` and
  ``flwr.supercore.date.now`` fill the error reply that ``HttpGrid`` makes itself for a missing reply.
- ``flwr.supercore.inflatable.inflatable_object``: ``get_all_nested_objects``, ``get_object_tree``,
  ``iterate_object_tree``, ``no_object_id_recompute``, ``get_object_type_from_object_content``,
  ``get_object_children_ids_from_object_content``, ``get_object_body``. The body of an ``Array`` is JSON, in which
  ``arraychunk_ids`` lists positions in the list of its children.
- ``flwr.supercore.inflatable.inflatable_utils``: ``inflate_object_from_contents`` removes the objects that it used;
  ``pull_objects`` stops at the first error and raises it; ``push_object_contents_from_iterable``;
  ``ObjectPullError(id, reason)``, whose text ends with ``': `` and the reason; ``ObjectPushError``.
- ``flwr.supercore.inflatable.inflatable_protobuf_utils.make_pull_object_fn_protobuf``.

The node's connection:

- ``flwr.supernode.fleet_http_connection``: ``http_request_response`` yields eight values (``NodeConnection``). If it
  cannot connect, it calls the module's ``flwr_exit`` while it handles the error; it logs later errors and continues.
- ``flwr.supercore.run.RunNotRunningException``: raised by a request for a run that has ended.

The server of a run:

- ``flwr.superlink.grid.HttpGrid``: ``_runtime_client``, ``_retry_invoker.max_tries``, ``node``, ``set_run``,
  ``get_node_ids``, ``push_messages``, ``close``.
- ``flwr.supercore.runtime.RuntimeHttpClient``: ``from_server_address``, ``AcquireTask``, ``PullTaskInput``,
  ``PushTaskOutput``, ``PullMessages``, ``PullObject``, ``ConfirmMessageReceived``, ``close``. Errors are ``httpx``'s.
- The messages ``AcquireTaskRequest``, ``PullTaskInputRequest``, ``PushTaskOutputRequest`` and
  ``PullAppMessagesRequest`` of ``flwr.proto.runtime_pb2``, and ``ConfirmMessageReceivedRequest`` of
  ``flwr.proto.message_pb2``; ``flwr.common.serde.run_from_proto``.
- ``flwr.supercore.heartbeat``: ``HeartbeatSender``, ``make_task_heartbeat_fn_http``.
- ``flwr.supercore.interceptors``: ``RuntimeVersionHttpInterceptor``, ``SuperExecAuthHttpInterceptor``, with the method
  name ``/flwr.proto.Runtime/AcquireTask`` and the task type ``flwr-serverapp``.
- ``flwr.supercore.retry.make_simple_http_retry_invoker``.

The SuperLink and Flower's commands:

- ``flwr.superlink.extensions.get_middleware``, called through its module when ``flower_superlink`` of
  ``flwr.superlink.cli.flower_superlink`` makes the app, and that module's ``uvicorn.run``. The paths of the node API,
  and no others, begin with ``/v1/fleet/``.
- The app's ``state.enable_supernode_auth`` and ``state.linkstate_factory.state().get_node_id_by_public_key``.
- The headers with which a node signs a request: ``flwr.supercore.constant.FLEET_HTTP_PUBLIC_KEY_HEADER`` and
  ``FLEET_HTTP_SIGNATURE_HEADER``, ``flwr.common.constant.TIMESTAMP_HEADER``, ``TIMESTAMP_TOLERANCE`` and
  ``SYSTEM_TIME_TOLERANCE``, and
  ``flwr.supercore.primitives.asymmetric.bytes_to_public_key`` and ``verify_signature``.
- ``flwr.proto.fleet_pb2.PushMessagesRequest``; ``flwr.common.constant.SUPERLINK_NODE_ID``;
  ``flwr.common.constant.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE``, the maximum size of a piece of an array.
- ``flwr.supercore.inflatable.inflatable_utils.ObjectUnavailableError``, raised for an object that was announced and has
  not arrived.
- ``flwr.cli.app.app``: the command ``flwr``.
- The table ``node`` of the SuperLink's SQLite database has ``node_id`` (as a signed number), ``public_key`` (PEM) and
  ``status``, which is ``NodeStatus.UNREGISTERED`` of ``flwr.supercore.constant`` for a removed node; PEM as
  ``public_key_to_bytes`` of ``flwr.supercore.primitives.asymmetric`` writes it.
"""

from __future__ import annotations

import binascii
import json
import socket
import sqlite3
import sys
import time
from base64 import b64decode
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.app import Array, Error, Message, Metadata
from flwr.app.message import make_message
from flwr.common.constant import (
    FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE,
    SUPERLINK_NODE_ID,
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
    ErrorCode,
)
from flwr.common.serde import run_from_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
)
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    SYSTEM_MESSAGE_TYPE,
    NodeStatus,
)
from flwr.supercore.date import now
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_body,
    get_object_children_ids_from_object_content,
    get_object_tree,
    get_object_type_from_object_content,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    ObjectUnavailableError,
    inflate_object_from_contents,
    pull_objects,
    push_object_contents_from_iterable,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, public_key_to_bytes, verify_signature
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import fleet_http_connection

if TYPE_CHECKING:
    import asyncio

    from starlette.middleware import Middleware

__all__ = [
    "NODE_API",
    "OBJECT_BYTES",
    "PIECE_BYTES",
    "Keys",
    "NodeConnection",
    "ObjectPullError",
    "ObjectPushError",
    "ObjectTree",
    "ObjectUnavailableError",
    "PushedReply",
    "ReplyHead",
    "RunNotRunningException",
    "TaskGrid",
    "acquire_task",
    "array_layout",
    "connect_node",
    "deflate_message",
    "find_node_id",
    "flwr_command",
    "inflate_message",
    "pull_failure",
    "pull_tree",
    "read_node_id",
    "read_pushed_reply",
    "requires_node_keys",
    "run_superlink",
    "set_identity",
    "tree_ids",
    "verify_node_headers",
]

NODE_API = "/v1/fleet/"
"""Beginning of the paths of the SuperLink's node API."""

PIECE_BYTES = FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
"""Maximum size of a piece of an array, in bytes."""
OBJECT_BYTES = PIECE_BYTES + 2**16
"""Maximum size of an object in bytes: a piece with what is around it."""

Keys = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]


def set_identity(task: int, run: int, node: int) -> None:
    """Set the task, run and node of the messages that this process makes from now on."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task, run, node


# --- messages and their objects


def deflate_message(message: Message) -> tuple[ObjectTree, dict[str, bytes]]:
    """Set a message's id, and return the tree of its objects and their contents by id."""
    with no_object_id_recompute():
        message.metadata.__dict__["_message_id"] = message.object_id
        contents = {id: object.deflate() for id, object in get_all_nested_objects(message).items()}
        return get_object_tree(message), contents


def inflate_message(id: str, contents: dict[str, bytes]) -> Message | None:
    """Make a message of its objects, which are removed from ``contents``; None: the object is no message.

    Raises:
        Exception: Of any type, if the objects are not Flower's.
    """
    message = inflate_object_from_contents(id, contents)
    if not isinstance(message, Message):
        return None
    message.metadata.__dict__["_message_id"] = id
    return message


def array_layout(content: bytes) -> tuple[list[str], list[int]] | None:
    """Return the ids of an array's pieces, and the array as positions among them; None: the object is no array.

    Raises:
        Exception: Of any type, if the object is not Flower's.
    """
    if get_object_type_from_object_content(content) != "Array":
        return None
    return (
        get_object_children_ids_from_object_content(content),
        json.loads(get_object_body(content, Array))["arraychunk_ids"],
    )


def pull_tree(tree: ObjectTree, pull: Callable[[str], bytes]) -> dict[str, bytes]:
    """Pull all objects of a tree, several at a time.

    Args:
        tree: The objects' ids.
        pull: Pulls one object. Its first error ends the function.

    Returns:
        The objects' contents by id.

    Raises:
        ObjectPullError: If an object is missing.
    """
    return pull_objects([node.object_id for node in iterate_object_tree(tree)], pull_object_fn=pull)


def tree_ids(tree: ObjectTree) -> list[str]:
    """Return the ids of the objects of a tree, each once."""
    return list(dict.fromkeys(node.object_id for node in iterate_object_tree(tree)))


def pull_failure(error: ObjectPullError) -> str:
    """Return the reason of a failure without the object's id."""
    return str(error).partition("': ")[2]


# --- the node's connection


class NodeConnection(NamedTuple):
    """A node's connection to a SuperLink: what ``http_request_response`` yields, in its order.

    Args:
        node_id: Flower's id of the node.
        receive: Returns the next message, without content, and the tree of its objects; None: there is none.
        send: Sends a message without content, its tree and the seconds of its computation. Returns the ids of the
            objects that the SuperLink lacks, and the session to push them in.
        get_run: Not used.
        get_fab: Not used.
        pull_object: Pulls one object of a run.
        push_object: Pushes one object of a run, in a session.
        confirm: Confirms a run's message by id. The SuperLink deletes it.
    """

    node_id: int
    receive: Callable[[], tuple[Message, ObjectTree] | None]
    send: Callable[[Message, ObjectTree, float], tuple[set[str], str]]
    get_run: object
    get_fab: object
    pull_object: Callable[[int, str], bytes]
    push_object: Callable[[int, str, str, bytes], None]
    confirm: Callable[[int, str], None]

    def send_reply(self, run: int, reply: Message, seconds: float) -> None:
        """Send a reply with its content.

        Args:
            run: Flower's id of the run.
            reply: The reply.
            seconds: Duration of its computation.

        Raises:
            ObjectPushError: If the SuperLink does not take an object.
        """
        tree, contents = deflate_message(reply)
        missing, session = self.send(reply, tree, seconds)
        push_object_contents_from_iterable(
            ((id, contents[id]) for id in contents if id in missing),
            push_object_fn=partial(self.push_object, run, session),
        )


class _ProcessExit(Exception):
    """Raised in place of Flower's process exit."""


def _raise_exit(*_: object, **__: object) -> NoReturn:
    raise _ProcessExit


@contextmanager
def connect_node(address: str, authority: bytes | None, keys: Keys | None, retries: int) -> Generator[NodeConnection]:
    """Connect a node to a SuperLink for the duration of the context, whose errors are raised unchanged.

    Args:
        address: Address as ``host:port``.
        authority: Certificate of the authority that signed the SuperLink's; None: an insecure connection.
        keys: Key pair of the node; None: an unauthenticated node.
        retries: Retries of a request that a broken connection lost.

    Raises:
        httpx.HTTPStatusError: If the SuperLink refuses this node.
        httpx.HTTPError: If the SuperLink is unreachable.
    """
    # Flower's own function ends the process some seconds later in any case; a persistent node reconnects instead.
    fleet_http_connection.flwr_exit = _raise_exit  # pyright: ignore[reportPrivateImportUsage]
    errors: list[Exception] = []
    try:
        with fleet_http_connection.http_request_response(
            address, authority is None, authority, keys, retries, None
        ) as fields:
            try:
                yield NodeConnection(*fields)
            except Exception as error:  # Flower's context would log it and continue
                errors.append(error)
    except _ProcessExit as error:
        cause = error.__context__
        if isinstance(cause, httpx.HTTPError):
            raise cause from error
        raise httpx.ConnectError(f"no connection to {address} ({type(cause).__name__})") from error
    if errors:
        raise errors[0]


# --- the server of a run


def acquire_task(address: str, authority: bytes | None, secret: bytes, run: int, seconds: float) -> str | None:
    """Take over the server part of a run, as a SuperExec does.

    Args:
        address: Address of the SuperLink as ``host:port``.
        authority: Certificate of the authority that signed the SuperLink's; None: an insecure connection.
        secret: The secret that the SuperLink was started with.
        run: Flower's id of the run.
        seconds: Time limit.

    Returns:
        The task's token, or None if the time is up.

    Raises:
        httpx.HTTPStatusError: If the SuperLink refuses the secret.
        httpx.HTTPError: If the SuperLink is unreachable.
    """
    client = RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=authority is None,
        root_certificates=authority,
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="SuperExec"),
            SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=("/flwr.proto.Runtime/AcquireTask",)),
        ],
        retry_invoker=make_simple_http_retry_invoker(),
    )
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            response = client.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
            if response.HasField("task") and response.token and response.task.run_id == run:
                return response.token
            time.sleep(0.2)
    finally:
        client.close()
    return None


class ReplyHead(NamedTuple):
    """A reply that is ready on the SuperLink, without its content.

    Args:
        id: Id of the reply.
        reply_to: Id of the message that it replies to.
        tree: The ids of its objects.
    """

    id: str
    reply_to: str
    tree: ObjectTree


class TaskGrid:
    """The messages of a run whose server this process is: Flower's ``HttpGrid``, with its steps as methods.

    Args:
        address: Address of the SuperLink as ``host:port``.
        authority: Certificate of the authority that signed the SuperLink's; None: an insecure connection.
        token: The task's token, from ``acquire_task``.
    """

    def __init__(self, address: str, authority: bytes | None, token: str) -> None:
        from flwr.superlink.grid import HttpGrid  # 30 MiB of imports that a node does without

        self._grid = HttpGrid(
            runtime_api_address=address, insecure=authority is None, root_certificates=authority, token=token
        )
        self._client = self._grid._runtime_client  # pyright: ignore[reportPrivateUsage]
        self._run = 0

    @contextmanager
    def serve_task(self) -> Generator[None]:
        """Be the run's server for the duration of the context; its end ends the run and closes the grid.

        Raises:
            RunNotRunningException: If the SuperLink does not know the run.
            httpx.HTTPError: If the SuperLink is unreachable.
        """
        heartbeat = HeartbeatSender(_lenient(make_task_heartbeat_fn_http(self._client)))
        heartbeat.start()
        status = "failed"
        try:
            task = self._client.PullTaskInput(PullTaskInputRequest())
            set_identity(task.task_id, task.run.run_id, task.context.node_id)
            self._grid.set_run(run_from_proto(task.run))
            self._run = task.run.run_id
            yield
            status = "completed"
        finally:
            self._grid._retry_invoker.max_tries = 1  # pyright: ignore[reportPrivateUsage]
            with suppress(httpx.HTTPError):
                self._client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=""))
            heartbeat.stop()
            self._grid.close()

    def get_node_ids(self) -> Iterable[int]:
        """Return Flower's ids of the nodes that are online."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, and return their ids; an empty or missing one: Flower did not take the message."""
        return self._grid.push_messages(messages)

    def list_replies(self, message_ids: Iterable[str]) -> list[ReplyHead]:
        """Return the replies to messages that are ready."""
        response = self._client.PullMessages(PullAppMessagesRequest(message_ids=list(message_ids)))
        heads = (message.metadata for message in response.messages_list)
        return [
            ReplyHead(head.message_id, head.reply_to_message_id, tree)
            for head, tree in zip(heads, response.message_object_trees, strict=True)
        ]

    def pull_object(self, id: str) -> bytes:
        """Pull one object of a reply.

        Raises:
            ObjectPullError: If the SuperLink does not know it.
            ObjectUnavailableError: If it was announced and has not arrived.
        """
        return make_pull_object_fn_protobuf(self._client.PullObject, self._grid.node, self._run)(id)

    def confirm(self, reply: ReplyHead) -> None:
        """Confirm a reply. The SuperLink deletes it."""
        self._client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=self._grid.node, run_id=self._run, message_object_id=reply.id)
        )

    def make_error(self, reply_to: str, reason: str) -> Message:
        """Make a message that stands for a missing reply."""
        own = self._grid.node.node_id
        metadata = Metadata(
            run_id=self._run,
            message_id="",
            src_node_id=own,
            dst_node_id=own,
            message_type=SYSTEM_MESSAGE_TYPE,
            group_id="",
            ttl=0,
            reply_to_message_id=reply_to,
            created_at=now().timestamp(),
        )
        return make_message(metadata=metadata, error=Error(ErrorCode.MESSAGE_UNAVAILABLE, reason))


def _lenient(heartbeat: Callable[[], bool]) -> Callable[[], bool]:
    """Make a heartbeat ignore that the SuperLink no longer knows the run: the next message fails."""

    def lenient() -> bool:
        try:
            return heartbeat()
        except httpx.HTTPStatusError:
            return True

    return lenient


# --- the SuperLink and Flower's commands


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
    from flwr.superlink import extensions  # the whole SuperLink, which only its own process needs

    command = import_module("flwr.superlink.cli.flower_superlink")  # its package has a function of the same name
    original = extensions.get_middleware
    extensions.get_middleware = lambda: (*middleware, *original())

    def run(**options: Any) -> None:
        # An upgrade would leave the protocol, and its bounds; another loop than asyncio's would not call `accept`.
        config = uvicorn.Config(**options, http=protocol, ws="none", loop="asyncio")
        uvicorn.Server(config).run([listen(config.bind_socket())])

    command.__dict__["uvicorn"] = SimpleNamespace(run=run)
    command.flower_superlink()


def requires_node_keys(app: Any) -> bool:
    """Return whether a SuperLink's app serves admitted nodes only."""
    return bool(app.state.enable_supernode_auth)


def find_node_id(app: Any, public_key: bytes) -> int | None:
    """Return Flower's id of the admitted node with a public key; None: there is none.

    Args:
        app: The SuperLink's app.
        public_key: The key as PEM.
    """
    return app.state.linkstate_factory.state().get_node_id_by_public_key(public_key)


def verify_node_headers(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Verify the signed time in a request's headers.

    Args:
        headers: The headers by name in lower case.

    Returns:
        The public key as PEM that signed it; None: the headers are not valid now.
    """
    try:
        key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER.encode()], validate=True)
        signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER.encode()], validate=True)
        stamp = headers[TIMESTAMP_HEADER.encode()]
        age = (now() - datetime.fromisoformat(stamp.decode("ascii"))).total_seconds()
        if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
            return None
        return key if verify_signature(bytes_to_public_key(key), stamp, signature) else None
    except (KeyError, ValueError, TypeError, AttributeError, binascii.Error):
        return None


class PushedReply(NamedTuple):
    """What a node announces when it sends a message.

    Args:
        node: Flower's id of the node that claims to send the request.
        sender: Flower's id of the message's sender.
        is_to_server: Whether the message is addressed to the server.
        reply_to: Id of the message that it replies to; empty: it is no reply.
        objects: Number of its objects.
        depth: Depth of the tree of its objects.
    """

    node: int
    sender: int
    is_to_server: bool
    reply_to: str
    objects: int
    depth: int


def read_pushed_reply(body: bytes) -> PushedReply | None:
    """Read what a node announces; None: it is not exactly one message with the tree of its objects.

    Args:
        body: The body of a request to ``push-messages``.
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
    objects, depth, level = 0, 0, [tree]
    while level:
        objects, depth = objects + len(level), depth + 1
        level = [child for parent in level for child in parent.children]
    return PushedReply(
        request.node.node_id,
        head.src_node_id,
        head.dst_node_id == SUPERLINK_NODE_ID,
        head.reply_to_message_id,
        objects,
        depth,
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


def flwr_command(*arguments: str) -> list[str]:
    """Return the command line of ``flwr`` in this Python environment."""
    return [sys.executable, "-c", "from flwr.cli.app import app; app()", *arguments]
