"""A node's connection to a SuperLink."""

from __future__ import annotations

import ssl
import time
from base64 import b64encode
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
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
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse, PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message

from fedspan.transports.flower.adapter.objects import (
    OBJECT_BYTES,
    ObjectPullError,
    ObjectPushError,
    RunNotRunningException,
    compute_object_id,
    deflate_message,
)
from fedspan.transports.flower.adapter.paths import (
    ACTIVATE_NODE,
    DEACTIVATE_NODE,
    NODE_API,
    PULL_OBJECT,
    PUSH_OBJECT,
    REGISTER_NODE,
    SEND_HEARTBEAT,
    UNREGISTER_NODE,
)
from fedspan.transports.flower.resumable import PAUSE, REQUEST_SECONDS, ResumableClient
from fedspan.transports.flower.transfers import Transfers
from fedspan.transports.flower.wire import (
    BASE_BYTES,
    FETCH_BASE,
    INLINE_BYTES,
    NODE_PATH,
    PROGRESS_HEADER,
    SEND_REPLY,
    STOPPED_HEADER,
    TAKE_ORDER,
    WORK_HEADER,
    NodeWork,
    format_progress,
    pack,
    select_fitting,
    unpack,
)

__all__ = ["Keys", "NodeConnection", "OutgoingReply", "ReceivedOrder", "connect_node"]

Keys = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]

_IDLE = 60.0
"""Seconds after which an idle connection is closed; a new one costs a TLS handshake."""
_SMALL = 2**20
"""Maximum size of an answer without objects, in bytes."""
_TOO_LARGE = httpx.codes.REQUEST_ENTITY_TOO_LARGE
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


@dataclass
class OutgoingReply:
    """A reply that is sent, and what of it the SuperLink has taken.

    Args:
        run: Flower's id of the run.
        reply: The reply.
        seconds: Duration of its computation.
        node: Flower's id of the node that replies.
        order: The message that it answers.
    """

    run: int
    reply: Message
    seconds: float
    node: int
    order: Message
    head: bytes = b""
    """Flower's request with the reply without its content; empty: it was not made yet."""
    contents: dict[str, bytes] = field(default_factory=dict)
    """The contents of its objects by id."""
    session: str = ""
    """The session in which the SuperLink takes objects; empty: it has not taken the head yet."""
    missing: set[str] = field(default_factory=set)
    """Ids of the objects that the SuperLink has not taken."""

    def prepare(self) -> None:
        """Make the head and the contents, once."""
        if self.head:
            return
        tree, self.contents = deflate_message(self.reply)
        self.head = PushMessagesRequest(
            node=Node(node_id=self.node),
            messages_list=[message_to_proto(remove_content_from_message(self.reply))],
            message_object_trees=[tree],
            clientapp_runtime_list=[self.seconds],
        ).SerializeToString()

    def count_taken_bytes(self) -> int:
        """Return the size of the objects that the SuperLink has taken, in bytes."""
        if not self.session:
            return 0
        return sum(len(content) for id, content in self.contents.items() if id not in self.missing)


class NodeConnection:
    """A node's connection to a SuperLink behind the door.

    Args:
        address: Address as ``host:port``.
        authority: Certificate of the authority that signed the SuperLink's; None: an insecure connection.
        keys: Key pair of the node; None: an unauthenticated node.
        retries: Retries of a request that a broken connection lost. Those that transmit a part of it do not count.
        transfers: What outlives the connection; None: nothing does.
    """

    def __init__(
        self,
        address: str,
        authority: bytes | None,
        keys: Keys | None,
        retries: int,
        transfers: Transfers | None = None,
    ) -> None:
        self.node_id = 0
        self.is_stopped = False
        """Whether the node is stopped; a node that only connects again goes offline without this notice."""
        self.get_work: Callable[[], NodeWork | None] = lambda: None
        """Returns what the node does, which its heartbeats tell the SuperLink; None: it waits for orders."""
        self.transfers = transfers or Transfers()
        self._registers = keys is None
        self._key, public = keys or generate_key_pairs()
        self._public = public_key_to_bytes(public)
        verify: ssl.SSLContext | bool = False
        if authority is not None:
            verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            verify.load_verify_locations(cadata=authority.decode("ascii"))
        client = httpx.Client(
            base_url=f"{'http' if authority is None else 'https'}://{address}",
            verify=verify,
            limits=httpx.Limits(keepalive_expiry=_IDLE),
        )
        self._requests = ResumableClient(client, self._make_headers, retries, self.transfers)
        self._heartbeat = HeartbeatSender(self._send_heartbeat)

    def open(self) -> None:
        """Go online.

        Raises:
            httpx.HTTPStatusError: If the SuperLink refuses this node.
            httpx.HTTPError: If the SuperLink is unreachable.
        """
        if self._registers:
            self._call(REGISTER_NODE, RegisterNodeFleetRequest(public_key=self._public))
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        self.node_id = ActivateNodeResponse.FromString(self._call(ACTIVATE_NODE, request)).node_id
        self._heartbeat.start()

    def close(self) -> None:
        """Go offline, and close the connections."""
        if self.node_id:
            if self._heartbeat.is_running:
                self._heartbeat.stop()
            with suppress(httpx.HTTPError):
                self._call(DEACTIVATE_NODE, DeactivateNodeRequest(node_id=self.node_id), retries=0)
                if self._registers:
                    self._call(UNREGISTER_NODE, UnregisterNodeFleetRequest(node_id=self.node_id), retries=0)
        self._requests.client.close()

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
        answer = self._requests.post(f"{NODE_PATH}{TAKE_ORDER}", body, INLINE_BYTES + _SMALL)
        try:
            parts = unpack(answer, _PARTS)
            if not parts:
                return None
            pulled = PullMessagesResponse.FromString(parts[0])
            head, tree = pulled.messages_list[0], pulled.message_object_trees[0]
            return ReceivedOrder(message_from_proto(head), tree, {compute_object_id(part): part for part in parts[1:]})
        except Exception as error:  # protobuf's own error class depends on its implementation
            raise httpx.RemoteProtocolError(f"an answer that is not an order ({type(error).__name__})") from error

    def send_reply(self, reply: OutgoingReply) -> None:
        """Send a reply with its content; one that a broken connection lost in part is continued.

        Args:
            reply: The reply. After an ``httpx.TransportError`` it can be sent again, over another connection.

        Raises:
            RunNotRunningException: If the run has ended.
            httpx.HTTPError: If the SuperLink does not take the reply, cannot store an object, or is unreachable.
        """
        reply.prepare()
        self.transfers.sent.begin(sum(map(len, reply.contents.values())), reply.count_taken_bytes())
        if not reply.session:
            self._announce(reply, select_fitting(reply.contents.values(), INLINE_BYTES))
        try:
            self._push_objects(reply)
        except (ObjectPushError, httpx.HTTPStatusError) as error:
            # taken before, or announced to a door that was restarted since; any other status is final
            if isinstance(error, httpx.HTTPStatusError) and error.response.status_code != _TOO_LARGE:
                raise
            self._announce(reply, [])
            try:
                self._push_objects(reply)
            except ObjectPushError as again:  # its disk is full, or another process writes to its database
                reply.session = ""  # so that the SuperLink says again what is missing
                time.sleep(PAUSE)
                raise httpx.ReadError("the SuperLink did not store an object") from again

    def _announce(self, reply: OutgoingReply, contents: list[bytes]) -> None:
        """Send the head of a reply and contents of its objects, and note what is missing then."""
        body = pack([reply.head, *contents])
        with _translate_errors():
            answer = PushMessagesResponse.FromString(self._requests.post(f"{NODE_PATH}{SEND_REPLY}", body, _SMALL))
        reply.session, reply.missing = answer.session_id, set(answer.objects_to_push) & reply.contents.keys()
        self.transfers.sent.done = sum(
            len(content) for id, content in reply.contents.items() if id not in reply.missing
        )

    def _push_objects(self, reply: OutgoingReply) -> None:
        """Send the missing objects of a reply, one after the other: several would share a slow link."""
        push = make_push_object_fn_protobuf(
            self._bind_call(PUSH_OBJECT, PushObjectResponse), Node(node_id=self.node_id), reply.run, reply.session
        )
        for id, content in reply.contents.items():
            if id in reply.missing:
                push(id, content)
                reply.missing.discard(id)
                self.transfers.sent.done += len(content)

    def pull_object(self, run: int, id: str) -> bytes:
        """Pull one object of a run.

        Raises:
            ObjectPullError: If the SuperLink does not know it.
            ObjectUnavailableError: If it was announced and has not arrived.
            RunNotRunningException: If the run has ended.
        """
        pull = self._bind_call(PULL_OBJECT, PullObjectResponse)
        content = make_pull_object_fn_protobuf(pull, Node(node_id=self.node_id), run)(id)
        if compute_object_id(content) != id:
            raise ObjectPullError(id, "its content has another hash")
        self.transfers.received.done += len(content)
        return content

    def fetch_base(self, offer: str, file: str, offset: int) -> bytes:
        """Fetch bytes of a file of a base model that the server offers.

        Args:
            offer: The offer's digest.
            file: SHA-256 of the file.
            offset: Offset of the first byte.

        Raises:
            httpx.HTTPError: If the server does not offer it, or is unreachable.
        """
        request = pack([offer.encode(), file.encode(), b"%d" % offset])
        return self._requests.post(f"{NODE_PATH}{FETCH_BASE}", request, BASE_BYTES)

    def renew(self) -> bool:
        """Send a heartbeat, and return whether the SuperLink took it: then the connection may go on."""
        return self._send_heartbeat()

    def _send_heartbeat(self) -> bool:
        request = SendNodeHeartbeatRequest(
            node=Node(node_id=self.node_id), heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
        )
        try:
            answer = self._call(SEND_HEARTBEAT, request, seconds=HEARTBEAT_CALL_TIMEOUT, retries=0)
            return SendNodeHeartbeatResponse.FromString(answer).success
        except Exception:  # sent again soon; a node that is no longer accepted learns it from its next request
            return False

    def _bind_call(self, path: str, response: Any) -> Callable[[Any], Any]:
        def call(request: Any) -> Any:
            with _translate_errors():
                return response.FromString(self._call(path, request))

        return call

    def _call(self, path: str, request: Any, *, seconds: float = REQUEST_SECONDS, retries: int | None = None) -> bytes:
        body = request.SerializeToString()
        return self._requests.post(f"{NODE_API}{path}", body, OBJECT_BYTES + _SMALL, seconds, retries)

    def _make_headers(self, path: str) -> dict[str, str]:
        """Make the headers of a request to a path: a signed time, and what the door learns from certain requests."""
        stamp = now().isoformat()
        headers = {
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(self._public).decode("ascii"),
            FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(self._key, stamp.encode("ascii"))).decode("ascii"),
            TIMESTAMP_HEADER: stamp,
            "content-type": "application/protobuf",
            "accept-encoding": "identity",
        }
        if path.endswith(PULL_OBJECT):
            headers[PROGRESS_HEADER] = format_progress(self.transfers.received.done, self.transfers.received.total)
        elif path.endswith(DEACTIVATE_NODE) and self.is_stopped:
            headers[STOPPED_HEADER] = "1"
        elif path.endswith(SEND_HEARTBEAT) and (work := self.get_work()) is not None:
            headers[WORK_HEADER] = work.to_header()
        return headers


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
def connect_node(
    address: str, authority: bytes | None, keys: Keys | None, retries: int, transfers: Transfers | None = None
) -> Generator[NodeConnection]:
    """Connect a node to a SuperLink for the duration of the context.

    Args:
        address: Address as ``host:port``.
        authority: Certificate of the authority that signed the SuperLink's; None: an insecure connection.
        keys: Key pair of the node; None: an unauthenticated node.
        retries: Retries of a request that a broken connection lost.
        transfers: What outlives the connection; None: nothing does.

    Raises:
        httpx.HTTPStatusError: If the SuperLink refuses this node.
        httpx.HTTPError: If the SuperLink is unreachable.
    """
    connection = NodeConnection(address, authority, keys, retries, transfers)
    try:
        connection.open()
        yield connection
    finally:
        connection.close()
