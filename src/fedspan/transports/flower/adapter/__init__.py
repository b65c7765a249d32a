"""The only package that uses names of Flower that are not its public interface, and what it relies on.

Range: Flower 1.41.0 only (``flwr==1.41.0`` in ``pyproject.toml``). The tests in ``tests/transports/flower/adapter``
check each item against the installed Flower; run them first after an upgrade. Public are ``flwr.app``,
``flwr.clientapp``, ``flwr.serverapp`` and ``flwr.simulation``, which any module of this package may import.

Messages and their objects (``objects``):

- ``flwr.supercore.task_identity.TaskIdentity``: ``task_id``, ``run_id`` and ``node_id`` can be set; ``Message`` needs
  them.
- ``Message.metadata.__dict__["_message_id"]`` is the message's id; ``Message.object_id`` is the hash of its content.
- ``flwr.supercore.inflatable.inflatable_object``: ``get_all_nested_objects``, ``get_object_tree``, ``get_object_id``,
  ``iterate_object_tree``, ``no_object_id_recompute``, ``get_object_type_from_object_content``,
  ``get_object_children_ids_from_object_content``, ``get_object_body``. The body of an ``Array`` is JSON, in which
  ``arraychunk_ids`` lists positions in the list of its children.
- ``flwr.supercore.inflatable.inflatable_utils``: ``inflate_object_from_contents`` removes the objects that it used;
  ``pull_objects`` stops at the first error and raises it; ``push_objects``;
  ``ObjectPullError(id, reason)``, whose text ends with ``': `` and the reason; ``ObjectPushError``;
  ``ObjectUnavailableError``, raised for an object that was announced and has not arrived.
- ``flwr.supercore.inflatable.inflatable_protobuf_utils``: ``make_pull_object_fn_protobuf``,
  ``make_push_object_fn_protobuf``.
- ``flwr.common.serde``: ``message_from_proto``, ``message_to_proto``; ``flwr.app.message.remove_content_from_message``.
- ``flwr.common.constant.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE``, the maximum size of a piece of an array.
- ``flwr.supercore.run.RunNotRunningException``: what Flower raises for a request for a run that has ended.

The SuperLink's paths (``paths``):

- Each takes POST requests. Those of the node API, and no others, begin with ``/v1/fleet/``.

The node's connection (``node``):

- The paths of the node API take and return the messages ``ActivateNodeRequest``, ``ActivateNodeResponse``,
  ``DeactivateNodeRequest``, ``RegisterNodeFleetRequest``, ``UnregisterNodeFleetRequest``, ``PullMessagesResponse``,
  ``PushMessagesRequest`` and ``PushMessagesResponse`` of ``flwr.proto.fleet_pb2``;
  ``SendNodeHeartbeatRequest`` and ``SendNodeHeartbeatResponse`` of ``flwr.proto.heartbeat_pb2``; ``PullObjectResponse``
  and ``PushObjectResponse`` of ``flwr.proto.message_pb2``; ``Node`` of ``flwr.proto.node_pb2``.
- ``flwr.common.constant``: ``HEARTBEAT_DEFAULT_INTERVAL``, ``HEARTBEAT_CALL_TIMEOUT``.
- The headers with which a node signs a request: ``flwr.supercore.constant.FLEET_HTTP_PUBLIC_KEY_HEADER`` and
  ``FLEET_HTTP_SIGNATURE_HEADER``, ``flwr.common.constant.TIMESTAMP_HEADER``, ``TIMESTAMP_TOLERANCE`` and
  ``SYSTEM_TIME_TOLERANCE``, and ``flwr.supercore.primitives.asymmetric``: ``generate_key_pairs``, ``sign_message``,
  ``public_key_to_bytes``, ``bytes_to_public_key`` and ``verify_signature``.

The server of a run (``run``):

- ``flwr.superlink.grid.HttpGrid``: ``_runtime_client``, ``_retry_invoker`` with ``max_tries``, ``should_giveup`` and
  ``invoke``, ``node``, ``set_run``, ``get_node_ids``, ``close``. The task's token is in the header
  ``flwr.supercore.constant.TASK_TOKEN_HEADER``.
- ``flwr.supercore.runtime.RuntimeHttpClient``: ``from_server_address``, ``AcquireTask``, ``PullTaskInput``,
  ``PushTaskOutput``, ``SendTaskHeartbeat``, ``PullObject``, ``PushObject``, ``ConfirmMessageReceived``, ``close``.
  Errors are ``httpx``'s.
- The messages ``AcquireTaskRequest``, ``PullTaskInputRequest``, ``PushTaskOutputRequest``, ``PullAppMessagesRequest``,
  ``PullAppMessagesResponse``, ``PushAppMessagesRequest``, ``PushAppMessagesResponse`` and
  ``SendTaskHeartbeatRequest`` of ``flwr.proto.runtime_pb2``, and ``ConfirmMessageReceivedRequest`` of
  ``flwr.proto.message_pb2``; ``flwr.common.serde.run_from_proto``.
- ``flwr.supercore.heartbeat``: ``HeartbeatSender``.
- ``flwr.supercore.interceptors``: ``RuntimeVersionHttpInterceptor``, ``SuperExecAuthHttpInterceptor``, with the method
  name ``/flwr.proto.Runtime/AcquireTask`` and the task type ``flwr-serverapp``.
- ``flwr.supercore.retry``: ``RetryInvoker``, ``make_simple_http_retry_invoker``.
- ``flwr.app.message.make_message`` takes metadata and an error. ``flwr.common.constant.ErrorCode.MESSAGE_UNAVAILABLE``,
  ``flwr.supercore.constant.SYSTEM_MESSAGE_TYPE`` and ``flwr.supercore.date.now`` fill the error reply that ``HttpGrid``
  makes itself for a missing reply.

The SuperLink's database (``store``), through the app's ``state.linkstate_factory.state()``:

- The link state: ``session``, within which all of its methods and those of its ``object_store`` are one transaction;
  ``get_message_ins``, ``delete_messages``, ``start_session``, ``store_message_and_object_tree``,
  ``get_task_by_token``, ``acknowledge_node_heartbeat``; and its ``_object_store``, which is replaced.
- Its SQLite tables ``message_ins`` of orders, with ``message_id``, ``dst_node_id`` (as a signed number, from
  ``flwr.supercore.utils.uint64_to_int64``; ``int64_to_uint64`` reverses it) and ``delivered_at``, which is empty until
  a node takes the order, ``message_res`` of replies, with ``message_id`` and ``reply_to_message_id``, and of messages
  whose objects have not all arrived, ``object_push_sessions`` (``session_id``, ``pending_count``),
  ``object_push_session_roots`` (``session_id``, ``root_object_id``) and ``object_push_session_pending``
  (``session_id``, ``object_id``); its ``_cleanup_push_session`` deletes such a
  message. ``flwr.proto.message_pb2.PushObjectRequest`` names the session.
- Its ``object_store``: ``get_object_tree``, which raises ``flwr.supercore.object_store.NoObjectInStoreError``, ``get``,
  ``delete`` and ``in``.
- ``flwr.server.superlink.utils.check_abort`` with ``flwr.common.constant.Status``: the reason why a run takes no reply.
- ``flwr.supercore.corestate.sql_corestate.OBJECT_PUSH_SESSION_TTL_SECONDS``: seconds after the last object of a message
  until the SuperLink deletes a message whose objects have not all arrived; a global variable that its functions read.
- ``flwr.superlink.servicer.fleet.fleet_handlers.send_node_heartbeat``; ``push_messages`` and ``pull_messages`` of
  ``flwr.superlink.servicer.runtime.runtime_handlers``, which need no more of a ``Task`` than its ``run_id``.
- ``flwr.supercore.inflatable.inflatable_utils.validate_object_content``, which raises
  ``flwr.supercore.inflatable.inflatable_object.UnexpectedObjectContentError``.

The store of objects (``object_store``), with the same rows and errors as Flower's:

- ``flwr.supercore.object_store.sql_object_store.SqlObjectStore``: ``preregister``, ``get_object_tree``, ``put``,
  ``get``, ``delete`` and ``in``, which are replaced; ``database_url``, ``verify``, ``session``, ``_mutation_session``,
  ``_lock_objectstore_mutation``, ``_MUTATION_LOCK_ID``, ``_engine``, ``_session_factory`` and ``_session_scope``.
- Its SQLite tables ``objects`` (``object_id``, ``content``, ``is_available``, ``ref_count``), ``object_children``
  (``parent_id``, ``child_id``; both refer to ``objects`` and are deleted with them), ``run_objects`` (``run_id``, as a
  signed number, ``object_id``) and ``objectstore_locks`` (``lock_id``, ``lock_value``).
- ``is_valid_sha256_hash`` of ``flwr.supercore.inflatable.inflatable_object``.

The SuperLink and Flower's commands (``superlink``):

- ``flwr.superlink.extensions.get_middleware``, called through its module when ``flower_superlink`` of
  ``flwr.superlink.cli.flower_superlink`` makes the app, and that module's ``uvicorn.run``.
- The app's ``state.enable_supernode_auth`` and ``state.linkstate_factory.state().get_node_id_by_public_key``.
- ``flwr.proto.fleet_pb2.PushMessagesRequest``; ``flwr.common.constant.SUPERLINK_NODE_ID``.
- ``flwr.cli.app.app``: the command ``flwr``.
- The table ``node`` of the SuperLink's SQLite database has ``node_id`` (as a signed number), ``public_key`` (PEM) and
  ``status``, which is ``NodeStatus.UNREGISTERED`` of ``flwr.supercore.constant`` for a removed node; PEM as
  ``public_key_to_bytes`` of ``flwr.supercore.primitives.asymmetric`` writes it.
"""

from __future__ import annotations

from fedspan.transports.flower.adapter.node import Keys, NodeConnection, OutgoingReply, ReceivedOrder, connect_node
from fedspan.transports.flower.adapter.objects import (
    OBJECT_BYTES,
    PIECE_BYTES,
    ObjectPullError,
    ObjectPushError,
    ObjectTree,
    ObjectUnavailableError,
    RunNotRunningException,
    compute_object_id,
    deflate_message,
    inflate_message,
    list_parent_ids,
    list_tree_ids,
    pull_all,
    pull_failure,
    read_array_bytes,
    read_array_layout,
    set_identity,
)
from fedspan.transports.flower.adapter.paths import (
    ACTIVATE_NODE,
    CONFIRM_RECEIVED,
    DEACTIVATE_NODE,
    GET_RUN,
    NODE_API,
    PULL_MESSAGES,
    PULL_OBJECT,
    PUSH_MESSAGES,
    PUSH_OBJECT,
    PUSH_ORDERS,
    REGISTER_NODE,
    SEND_HEARTBEAT,
    UNREGISTER_NODE,
)
from fedspan.transports.flower.adapter.run import ReplyHead, TaskGrid, acquire_task
from fedspan.transports.flower.adapter.store import MessageStore, SentOrder, SentReplies, StoredReply
from fedspan.transports.flower.adapter.superlink import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    TASK_TOKEN_HEADER,
    TIMESTAMP_HEADER,
    PushedReply,
    build_flwr_command,
    find_node_id,
    find_reply_limit,
    is_node_key_required,
    read_node_id,
    read_pushed_reply,
    run_superlink,
    verify_node_headers,
)

__all__ = [
    "ACTIVATE_NODE",
    "CONFIRM_RECEIVED",
    "DEACTIVATE_NODE",
    "FLEET_HTTP_PUBLIC_KEY_HEADER",
    "FLEET_HTTP_SIGNATURE_HEADER",
    "GET_RUN",
    "NODE_API",
    "OBJECT_BYTES",
    "PIECE_BYTES",
    "PULL_MESSAGES",
    "PULL_OBJECT",
    "PUSH_MESSAGES",
    "PUSH_OBJECT",
    "PUSH_ORDERS",
    "REGISTER_NODE",
    "SEND_HEARTBEAT",
    "TASK_TOKEN_HEADER",
    "TIMESTAMP_HEADER",
    "UNREGISTER_NODE",
    "Keys",
    "MessageStore",
    "NodeConnection",
    "ObjectPullError",
    "ObjectPushError",
    "ObjectTree",
    "ObjectUnavailableError",
    "OutgoingReply",
    "PushedReply",
    "ReceivedOrder",
    "ReplyHead",
    "RunNotRunningException",
    "SentOrder",
    "SentReplies",
    "StoredReply",
    "TaskGrid",
    "acquire_task",
    "build_flwr_command",
    "compute_object_id",
    "connect_node",
    "deflate_message",
    "find_node_id",
    "find_reply_limit",
    "inflate_message",
    "is_node_key_required",
    "list_parent_ids",
    "list_tree_ids",
    "pull_all",
    "pull_failure",
    "read_array_bytes",
    "read_array_layout",
    "read_node_id",
    "read_pushed_reply",
    "run_superlink",
    "set_identity",
    "verify_node_headers",
]
