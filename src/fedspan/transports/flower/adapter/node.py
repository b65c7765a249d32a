"""A node's connection to a SuperLink."""

from __future__ import annotations

import ssl
import time
from base64 import b64encode
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_CALL_TIMEOUT, HEARTBEAT_DEFAULT_INTERVAL, TIMESTAMP_HEADER
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    DeactivateNodeRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectResponse, PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import push_object_contents_from_iterable
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message

from fedspan.transports.flower.adapter.objects import (
    OBJECT_BYTES,
    RunNotRunningException,
    compute_object_id,
    deflate_message,
)
from fedspan.transports.flower.adapter.superlink import NODE_API
from fedspan.transports.flower.wire import INLINE_BYTES, NODE_PATH, SEND_REPLY, TAKE_ORDER, pack, select_fitting, unpack

__all__ = ["Keys", "NodeConnection", "ReceivedOrder", "connect_node"]

Keys = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]

_SECONDS, _CONNECT = 180.0, 30.0
"""Time limits of a request and of a connection, in seconds. A server of a thousand nodes that all reply at once takes a
while; a request that was given up would be processed all the same, and sent again on top of it."""
_IDLE = 60.0
"""Seconds after which an idle connection is closed; a new one costs a TLS handshake."""
_SMALL = 2**20
"""Maximum size of an answer without objects, in bytes."""
_PAUSE = 1.0
"""Seconds before a request that a broken connection lost is sent again; twice as long each time."""
_PARTS = 64
"""Maximum number of parts of an answer."""


class ReceivedOrder(NamedTuple):
    """An order as received.

    Args:
        message: The message without its content.
        tree: The tree of its objects.
        contents: The objects that came with the message, by id.
    """

    message: Message
    tree: ObjectTree
    contents: dict[str, bytes]


class NodeConnection:
    """A node's connection to a SuperLink behind the door.

    Args:
        address: Address as ``host:port``.
        authority: Certificate of the authority that signed the SuperLink's; None: an insecure connection.
        keys: Key pair of the node; None: an unauthenticated node.
        retries: Retries of a request that a broken connection lost.
    """

    def __init__(self, address: str, authority: bytes | None, keys: Keys | None, retries: int) -> None:
        self.node_id = 0
        self._registers, self._retries = keys is None, retries
        self._key, public = keys or generate_key_pairs()
        self._public = public_key_to_bytes(public)
        verify: ssl.SSLContext | bool = False
        if authority is not None:
            verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            verify.load_verify_locations(cadata=authority.decode("ascii"))
        self._client = httpx.Client(
            base_url=f"{'http' if authority is None else 'https'}://{address}",
            verify=verify,
            limits=httpx.Limits(keepalive_expiry=_IDLE),
        )
        self._heartbeat = HeartbeatSender(self._send_heartbeat)

    def open(self) -> None:
        """Go online.

        Raises:
            httpx.HTTPStatusError: If the SuperLink refuses this node.
            httpx.HTTPError: If the SuperLink is unreachable.
        """
        if self._registers:
            self._call("register-node", RegisterNodeFleetRequest(public_key=self._public))
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        self.node_id = ActivateNodeResponse.FromString(self._call("activate-node", request)).node_id
        self._heartbeat.start()

    def close(self) -> None:
        """Go offline, and close the connections."""
        if self.node_id:
            if self._heartbeat.is_running:
                self._heartbeat.stop()
            with suppress(httpx.HTTPError):
                self._call("deactivate-node", DeactivateNodeRequest(node_id=self.node_id), retries=0)
                if self._registers:
                    self._call("unregister-node", UnregisterNodeFleetRequest(node_id=self.node_id), retries=0)
        self._client.close()

    def take_order(self, received: str) -> ReceivedOrder | None:
        """Wait for the next order; the SuperLink answers after some seconds in any case.

        Args:
            received: Id of the last order that this node received as a whole; empty: none. Another one that the
                SuperLink has sent is sent again.

        Returns:
            The order, or None if there is none yet.

        Raises:
            httpx.HTTPStatusError: If the SuperLink refuses this node.
            httpx.HTTPError: If the connection is lost, or the answer is not the SuperLink's.
        """
        body = pack([b"%d" % self.node_id, received.encode()])
        answer = self._post(f"{NODE_PATH}{TAKE_ORDER}", body, INLINE_BYTES + _SMALL)
        try:
            parts = unpack(answer, _PARTS)
            if not parts:
                return None
            pulled = PullMessagesResponse.FromString(parts[0])
            head, tree = pulled.messages_list[0], pulled.message_object_trees[0]
            return ReceivedOrder(message_from_proto(head), tree, {compute_object_id(part): part for part in parts[1:]})
        except Exception as error:  # protobuf's own error class depends on its implementation
            raise httpx.RemoteProtocolError(f"an answer that is not an order ({type(error).__name__})") from error

    def send_reply(self, run: int, reply: Message, seconds: float) -> None:
        """Send a reply with its content.

        Args:
            run: Flower's id of the run.
            reply: The reply.
            seconds: Duration of its computation.

        Raises:
            ObjectPushError: If the SuperLink does not take an object.
            RunNotRunningException: If the run has ended.
            httpx.HTTPError: If the SuperLink does not take the reply, or is unreachable.
        """
        tree, contents = deflate_message(reply)
        request = PushMessagesRequest(
            node=Node(node_id=self.node_id),
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[tree],
            clientapp_runtime_list=[seconds],
        )
        body = pack([request.SerializeToString(), *select_fitting(contents.values(), INLINE_BYTES)])
        with _translate_errors():
            answer = PushMessagesResponse.FromString(self._post(f"{NODE_PATH}{SEND_REPLY}", body, _SMALL))
        missing = set(answer.objects_to_push)
        if missing:
            push = make_push_object_fn_protobuf(
                self._bind_call("push-object", PushObjectResponse), Node(node_id=self.node_id), run, answer.session_id
            )
            push_object_contents_from_iterable(
                ((id, content) for id, content in contents.items() if id in missing), push_object_fn=push
            )

    def pull_object(self, run: int, id: str) -> bytes:
        """Pull one object of a run.

        Raises:
            ObjectPullError: If the SuperLink does not know it.
            ObjectUnavailableError: If it was announced and has not arrived.
            RunNotRunningException: If the run has ended.
        """
        pull = self._bind_call("pull-object", PullObjectResponse)
        return make_pull_object_fn_protobuf(pull, Node(node_id=self.node_id), run)(id)

    def confirm(self, run: int, id: str) -> None:
        """Confirm a run's message by id. The SuperLink deletes it."""
        request = ConfirmMessageReceivedRequest(node=Node(node_id=self.node_id), run_id=run, message_object_id=id)
        with _translate_errors():
            self._call("confirm-message-received", request)

    def _send_heartbeat(self) -> bool:
        request = SendNodeHeartbeatRequest(
            node=Node(node_id=self.node_id), heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
        )
        try:
            answer = self._call("send-node-heartbeat", request, seconds=HEARTBEAT_CALL_TIMEOUT, retries=0)
            return SendNodeHeartbeatResponse.FromString(answer).success
        except Exception:  # sent again soon; a node that is no longer accepted learns it from its next request
            return False

    def _bind_call(self, path: str, response: Any) -> Callable[[Any], Any]:
        def call(request: Any) -> Any:
            with _translate_errors():
                return response.FromString(self._call(path, request))

        return call

    def _call(self, path: str, request: Any, *, seconds: float = _SECONDS, retries: int | None = None) -> bytes:
        body = request.SerializeToString()
        return self._post(f"{NODE_API}{path}", body, OBJECT_BYTES + _SMALL, seconds, retries)

    def _post(
        self, path: str, body: bytes, max_bytes: int, seconds: float = _SECONDS, retries: int | None = None
    ) -> bytes:
        """Send a request, again if the connection breaks, and return the answer up to a maximum size."""
        left = self._retries if retries is None else retries
        pause = _PAUSE
        while True:
            try:
                return self._post_once(path, body, max_bytes, seconds)
            except httpx.TransportError:
                if not left:
                    raise
            left -= 1
            time.sleep(pause)
            pause *= 2

    def _post_once(self, path: str, body: bytes, max_bytes: int, seconds: float) -> bytes:
        stamp = now().isoformat()
        headers = {
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(self._public).decode("ascii"),
            FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(self._key, stamp.encode("ascii"))).decode("ascii"),
            TIMESTAMP_HEADER: stamp,
            "content-type": "application/protobuf",
            "accept-encoding": "identity",
        }
        timeout = httpx.Timeout(seconds, connect=min(seconds, _CONNECT))
        with self._client.stream("POST", path, content=body, headers=headers, timeout=timeout) as response:
            response.raise_for_status()
            parts, size = list[bytes](), 0
            for part in response.iter_raw():
                size += len(part)
                if size > max_bytes:
                    raise httpx.RemoteProtocolError(f"an answer of more than {max_bytes} bytes")
                parts.append(part)
            return b"".join(parts)


@contextmanager
def _translate_errors() -> Generator[None]:
    """Translate the status for a run that has ended into an error."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.FORBIDDEN:
            raise RunNotRunningException from error
        raise


@contextmanager
def connect_node(address: str, authority: bytes | None, keys: Keys | None, retries: int) -> Generator[NodeConnection]:
    """Connect a node to a SuperLink for the duration of the context.

    Args:
        address: Address as ``host:port``.
        authority: Certificate of the authority that signed the SuperLink's; None: an insecure connection.
        keys: Key pair of the node; None: an unauthenticated node.
        retries: Retries of a request that a broken connection lost.

    Raises:
        httpx.HTTPStatusError: If the SuperLink refuses this node.
        httpx.HTTPError: If the SuperLink is unreachable.
    """
    connection = NodeConnection(address, authority, keys, retries)
    try:
        connection.open()
        yield connection
    finally:
        connection.close()
