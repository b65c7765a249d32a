"""The server of a run on a SuperLink."""

from __future__ import annotations

import ssl
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import httpx
from flwr.app import Error, Message, Metadata
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.constant import (
    ErrorCode,
)
from flwr.common.serde import message_to_proto, run_from_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesResponse,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushAppMessagesResponse,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import (
    SYSTEM_MESSAGE_TYPE,
    TASK_TOKEN_HEADER,
)
from flwr.supercore.date import now
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    push_objects,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.retry import RetryInvoker, make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient

from fedspan.transports.flower.adapter.objects import (
    RunNotRunningException,
    compute_object_id,
    list_tree_ids,
    set_identity,
)
from fedspan.transports.flower.wire import (
    BATCH_BYTES,
    CANCEL_ORDERS,
    RUN_PATH,
    SEND_ORDERS,
    TAKE_REPLIES,
    pack,
    select_fitting,
    unpack,
)

__all__ = ["ReplyHead", "TaskGrid", "acquire_task"]

_SECONDS = 600.0
"""Time limit of a request, in seconds: a busy server takes a while, and would process a repeated request again."""
_PARTS = 1 << 20
"""Maximum number of parts of an answer."""


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
        retry_invoker=_raise_when_unauthorized(make_simple_http_retry_invoker()),
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
    """A reply that is ready on the SuperLink.

    Args:
        id: Id of the reply.
        reply_to: Id of the message that it replies to.
        tree: The ids of its objects.
        contents: The contents of its objects by id, if all of them came along; the SuperLink has deleted it then.
    """

    id: str
    reply_to: str
    tree: ObjectTree
    contents: dict[str, bytes]


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
        _raise_when_unauthorized(self._grid._retry_invoker)  # pyright: ignore[reportPrivateUsage]
        self._client = self._grid._runtime_client  # pyright: ignore[reportPrivateUsage]
        self._run = 0
        verify: ssl.SSLContext | bool = False
        if authority is not None:
            verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            verify.load_verify_locations(cadata=authority.decode("ascii"))
        self._door = httpx.Client(
            base_url=f"{'http' if authority is None else 'https'}://{address}{RUN_PATH}",
            verify=verify,
            headers={TASK_TOKEN_HEADER: token, "accept-encoding": "identity"},
            timeout=_SECONDS,
        )

    @contextmanager
    def serve_task(self) -> Generator[None]:
        """Be the run's server for the duration of the context; its end ends the run and closes the grid.

        Raises:
            RunNotRunningException: If the run has ended on the SuperLink.
            httpx.HTTPError: If the SuperLink is unreachable, or no longer knows this process.
        """
        heartbeat = HeartbeatSender(self._send_heartbeat)
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
            self._door.close()
            self._grid.close()

    def _send_heartbeat(self) -> bool:
        """Send a heartbeat, and return whether it arrived.

        Flower's own function sends SIGINT to this process if the run has ended. Here the next message fails instead.
        """
        try:
            self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except httpx.HTTPStatusError as error:
            return error.response.status_code < 500
        except RunNotRunningException:
            return True
        except httpx.HTTPError:
            return False
        return True

    def get_node_ids(self) -> Iterable[int]:
        """Return Flower's ids of the nodes that are online."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages in one request, if their objects fit into it.

        Returns:
            Their ids; an empty one: Flower did not take the message.

        Raises:
            ObjectPushError: If a message was deleted while its objects were sent.
            httpx.HTTPStatusError: If the SuperLink knows an object of the same name with other children.
        """
        heads, trees, objects = list[Any](), list[ObjectTree](), dict[str, Any]()
        with no_object_id_recompute():
            for message in messages:
                message.metadata.__dict__["_message_id"] = message.object_id
                heads.append(message_to_proto(remove_content_from_message(message)))
                trees.append(get_object_tree(message))
                objects |= get_all_nested_objects(message)
            request = PushAppMessagesRequest(messages_list=heads, message_object_trees=trees)
            inline = select_fitting((stored_object.deflate() for stored_object in objects.values()), BATCH_BYTES)
            answer = PushAppMessagesResponse.FromString(
                self._post(SEND_ORDERS, pack([request.SerializeToString(), *inline]))
            )
            if answer.objects_to_push:
                push_objects(
                    objects,
                    make_push_object_fn_protobuf(
                        self._client.PushObject, self._grid.node, self._run, answer.session_id
                    ),
                    object_ids_to_push=set(answer.objects_to_push),
                )
        return list(answer.message_ids)

    def take_replies(self, message_ids: Iterable[str], seconds: float) -> list[ReplyHead]:
        """Wait for replies to messages, and return those that are ready; the SuperLink does not list them again.

        Args:
            message_ids: Ids of the messages.
            seconds: Seconds to wait for the first one.
        """
        body = pack([b"%g" % seconds, *(id.encode() for id in message_ids)])
        parts = unpack(self._post(TAKE_REPLIES, body), _PARTS)
        if not parts:
            return []
        response = PullAppMessagesResponse.FromString(parts[0])
        contents = {compute_object_id(part): part for part in parts[1:]}
        heads = list[ReplyHead]()
        for message, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            ids, head = list_tree_ids(tree), message.metadata
            inline_contents = {id: contents[id] for id in ids} if all(id in contents for id in ids) else {}
            heads.append(ReplyHead(head.message_id, head.reply_to_message_id, tree, inline_contents))
        return heads

    def cancel_orders(self, message_ids: Iterable[str]) -> None:
        """Delete messages and their replies; a reply that arrives later is not stored."""
        self._post(CANCEL_ORDERS, pack(id.encode() for id in message_ids))

    def _post(self, path: str, body: bytes) -> bytes:
        """Send a request to the door; repeat it while the SuperLink is unreachable."""

        def send() -> bytes:
            response = self._door.post(path, content=body)
            response.raise_for_status()
            return response.content

        return self._grid._retry_invoker.invoke(send)  # pyright: ignore[reportPrivateUsage]

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
        node_id = self._grid.node.node_id
        metadata = Metadata(
            run_id=self._run,
            message_id="",
            src_node_id=node_id,
            dst_node_id=node_id,
            message_type=SYSTEM_MESSAGE_TYPE,
            group_id="",
            ttl=0,
            reply_to_message_id=reply_to,
            created_at=now().timestamp(),
        )
        return make_message(metadata=metadata, error=Error(ErrorCode.MESSAGE_UNAVAILABLE, reason))


def _raise_when_unauthorized(invoker: RetryInvoker) -> RetryInvoker:
    """Let Flower's retries raise the error of a request that the SuperLink does not accept (401).

    Flower sends SIGINT to this process instead, and its caller would not learn why it stopped.
    """
    is_final = invoker.should_giveup

    def is_final_or_unauthorized(error: Exception) -> bool:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == httpx.codes.UNAUTHORIZED:
            return True
        return is_final is not None and is_final(error)

    invoker.should_giveup = is_final_or_unauthorized
    return invoker
