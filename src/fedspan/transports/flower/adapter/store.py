"""Orders and replies in a SuperLink's database, with all of their objects in one transaction."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, Status
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest, PushMessagesResponse
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PushAppMessagesRequest
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import UnexpectedObjectContentError
from flwr.supercore.inflatable.inflatable_utils import validate_object_content
from flwr.supercore.utils import int64_to_uint64, uint64_to_int64

from fedspan.transports.flower.adapter.objects import (
    ObjectTree,
    RunNotRunningException,
    compute_object_id,
    list_tree_ids,
)
from fedspan.transports.flower.wire import BATCH_BYTES, INLINE_BYTES, pack

if TYPE_CHECKING:
    from flwr.proto.task_pb2 import Task

__all__ = ["MessageStore", "SentOrder", "SentReplies", "StoredReply"]


_SENT = """
SELECT message_id FROM message_ins WHERE dst_node_id = ? AND delivered_at <> ''
AND NOT EXISTS (SELECT 1 FROM message_res WHERE reply_to_message_id = message_ins.message_id)
"""
"""The orders that a node was sent and has not replied to."""

_CLAIM = "DELETE FROM object_push_session_pending WHERE session_id = ? AND object_id = ?"
_COUNT = """
UPDATE object_push_sessions SET pending_count = pending_count - ? WHERE session_id = ? RETURNING pending_count
"""
_PUSH = "SELECT 1 FROM object_push_sessions WHERE session_id = ?"
_UNFINISHED = """
SELECT message_ins.message_id, root.session_id, node.online_until, node.node_id
FROM object_push_sessions AS session
JOIN object_push_session_roots AS root ON root.session_id = session.session_id
JOIN message_res ON message_res.message_id = root.root_object_id
JOIN message_ins ON message_ins.message_id = message_res.reply_to_message_id
JOIN node ON node.node_id = message_ins.dst_node_id
WHERE session.pending_count > 0
"""
"""The orders with a reply of which only a part has arrived, and the sessions in which nodes send the rest."""


class SentOrder(NamedTuple):
    """An order that a node was sent.

    Args:
        id: Id of the order.
        head: Flower's answer to a request for orders: the message without its content, and the tree of its objects.
        tree: The tree of its objects.
        expires_at: Time at which it ends, in seconds since 1970.
        run: Flower's id of its run.
    """

    id: str
    head: bytes
    tree: ObjectTree
    expires_at: float
    run: int


class StoredReply(NamedTuple):
    """The result of storing a reply.

    Args:
        run: Flower's id of the run.
        reply_to: Id of the order that it replies to; empty: the reply was not stored.
        is_complete: Whether all of its objects are stored.
        answer: Flower's answer, with the objects that are still missing.
    """

    run: int
    reply_to: str
    is_complete: bool
    answer: bytes


class SentReplies(NamedTuple):
    """Replies that a run's server was sent.

    Args:
        orders: Ids of the orders that they reply to.
        head: Flower's answer: the replies without their content, and the trees of their objects.
        trees: The trees of those replies whose objects came along.
    """

    orders: frozenset[str]
    head: bytes
    trees: list[ObjectTree]


class MessageStore:
    """The orders and replies of a SuperLink. Every method is a transaction, and none is called in an event loop.

    Args:
        app: The SuperLink's app.
    """

    def __init__(self, app: Any) -> None:
        from flwr.server.superlink.utils import check_abort  # the whole SuperLink, which only its own process needs
        from flwr.supercore.object_store import NoObjectInStoreError
        from flwr.superlink.servicer.fleet import fleet_handlers
        from flwr.superlink.servicer.runtime import runtime_handlers

        from fedspan.transports.flower.adapter.object_store import PlainObjectStore

        self._state = app.state.linkstate_factory.state()
        self._objects = self._state._object_store = PlainObjectStore(self._state.object_store)
        self._check_abort: Callable[..., str | None] = check_abort
        self._fleet, self._runtime, self._missing = fleet_handlers, runtime_handlers, NoObjectInStoreError

    def acknowledge_heartbeat(self, body: bytes, node: int | None) -> bytes:
        """Process a heartbeat.

        Args:
            body: Flower's request.
            node: Flower's id of the node that sent it; None: any.

        Raises:
            ValueError: If it is no heartbeat, or one in the name of another node.
        """
        request = _parse(SendNodeHeartbeatRequest, body)
        if node is not None and request.node.node_id != node:
            raise ValueError("a heartbeat in the name of another node")
        try:
            return self._fleet.send_node_heartbeat(request, self._state).SerializeToString()
        except Exception as error:
            raise ValueError(f"no heartbeat ({type(error).__name__})") from error

    def take_order(self, node: int) -> tuple[SentOrder, bytes] | None:
        """Take the next order for a node; those of runs that have ended are deleted.

        Returns:
            The order, and the answer with those of its objects that fit; None: there is no order.
        """
        with self._begin():
            while messages := self._state.get_message_ins(node_id=node, limit=1):
                id, run = messages[0].metadata.message_id, messages[0].metadata.run_id
                if self._has_ended(run):
                    continue
                try:
                    tree = self._objects.get_object_tree(id)
                except self._missing:
                    self._state.delete_messages(message_ins_ids={id})
                    continue
                head = PullMessagesResponse(
                    messages_list=[message_to_proto(messages[0])], message_object_trees=[tree]
                ).SerializeToString()
                expires_at = messages[0].metadata.created_at + messages[0].metadata.ttl
                return SentOrder(id, head, tree, expires_at, run), pack(
                    [head, *self._read_contents(tree, INLINE_BYTES)]
                )
        return None

    def return_orders(self, node: int, received: str) -> None:
        """Let a node take again the orders that it was sent and has neither received nor replied to.

        A reply of which only a part has arrived is deleted, unless it answers the last order that the node received: a
        node that does not know that order was restarted, and has the reply as a whole.

        Args:
            node: Flower's id of the node.
            received: Id of the last order that the node received as a whole, whose objects are deleted if it was sent
                to this node; empty: none.
        """
        with self._begin() as session:
            connection = session.connection()
            of_node = "AND node.node_id = ?"
            for id, push, *_ in connection.exec_driver_sql(_UNFINISHED + of_node, (uint64_to_int64(node),)).all():
                if id != received:
                    self._delete_unfinished(push)
            for id in connection.exec_driver_sql(_SENT, (uint64_to_int64(node),)).scalars().all():
                if id == received:
                    self._objects.delete(id)
                elif id in self._objects:  # otherwise it was confirmed
                    connection.exec_driver_sql("UPDATE message_ins SET delivered_at = '' WHERE message_id = ?", (id,))

    def repeat_order(self, order: SentOrder) -> bytes | None:
        """Return the answer with an order that was sent before; None: it or its run has ended, or it was confirmed."""
        with self._begin():
            if now().timestamp() > order.expires_at or self._has_ended(order.run) or order.id not in self._objects:
                return None
            return pack([order.head, *self._read_contents(order.tree, INLINE_BYTES)])

    def delete(self, id: str) -> None:
        """Delete a message's objects."""
        self._objects.delete(id)

    def store_reply(self, request: PushMessagesRequest, contents: Sequence[bytes]) -> StoredReply:
        """Store a node's reply with its objects, and delete the order that it replies to when the reply is complete.

        The node counts as online from then on: after a broken connection, its reply may arrive before its heartbeat.

        Args:
            request: Flower's request with the reply without its content; the door has checked that it is the node's.
            contents: The contents of those of its objects that came along.

        Raises:
            RunNotRunningException: If the run has ended.
            ValueError: If the reply or an object is not valid, or the run is unknown.
        """
        try:
            message = message_from_proto(request.messages_list[0])
        except Exception as error:  # Flower's code assumes that Flower wrote the message
            raise ValueError(f"not a message of Flower ({type(error).__name__})") from error
        run, reply_to = message.metadata.run_id, message.metadata.reply_to_message_id
        self._require_running(run)
        with self._begin():
            session = self._state.start_session(run)
            tree = request.message_object_trees[0]
            stored, missing = self._state.store_message_and_object_tree(message, tree, session)
            answer = PushMessagesResponse(results={message.metadata.message_id: 0}, session_id=session)
            answer.objects_to_push.extend(self._store_objects(session, missing, contents))
            if not stored or not missing:  # nothing follows, and every session has a row
                self._state._cleanup_push_session(session, cleanup_messages=False)
            is_complete = stored and not answer.objects_to_push
            if stored:
                self._state.acknowledge_node_heartbeat(request.node.node_id, HEARTBEAT_DEFAULT_INTERVAL)
            if is_complete:
                self._objects.delete(reply_to)
        return StoredReply(run, reply_to if stored else "", is_complete, answer.SerializeToString())

    def is_push_finished(self, body: bytes) -> bool:
        """Return whether a message is complete with an object that a node has pushed.

        Args:
            body: Flower's request with the object.
        """
        try:
            push = _parse(PushObjectRequest, body).session_id
        except ValueError:
            return False
        with self._state.session() as session:
            rows = session.connection().exec_driver_sql(_PUSH, (push,))
            return rows.first() is None

    def find_task(self, token: str) -> Task | None:
        """Return the task of a run's server by its token; None: the token is not valid."""
        return self._state.get_task_by_token(token)

    def store_orders(self, task: Task, head: bytes, contents: Sequence[bytes]) -> tuple[set[int], bytes]:
        """Store a run's orders with their objects.

        Args:
            task: The task of the run's server.
            head: Flower's request with the orders without their content.
            contents: The contents of those of their objects that came along.

        Returns:
            The nodes that they are for, and Flower's answer, with the objects that are still missing.

        Raises:
            ValueError: If an order or an object is not valid.
        """
        request = _parse(PushAppMessagesRequest, head)
        with self._begin():
            answer = self._runtime.push_messages(request, self._state, task)
            missing = self._store_objects(answer.session_id, answer.objects_to_push, contents)
            del answer.objects_to_push[:]
            answer.objects_to_push.extend(missing)
        return {message.metadata.dst_node_id for message in request.messages_list}, answer.SerializeToString()

    def take_replies(
        self, task: Task, ids: Iterable[str], grace: float = 0.0, stopped: Iterable[int] = ()
    ) -> tuple[SentReplies, bytes]:
        """Take the complete replies to a run's orders. Flower does not list them again; their objects remain.

        Flower's reply for a node that is offline is an error; the objects of that order are deleted, so that a node
        that comes back later does not carry it out.

        Args:
            task: The task of the run's server.
            ids: Ids of the orders.
            grace: Seconds for which an order waits for a node that is offline.
            stopped: Flower's ids of the nodes whose orders do not wait, because they went offline themselves.

        Returns:
            The replies, and the answer with the objects of those that are complete and fit.
        """
        with self._begin() as session:
            connection, left = session.connection(), frozenset(stopped)
            requested = self._select_complete(connection, list(ids), grace, left)
            with _count_as_online(connection, requested, grace, left):
                request = PullAppMessagesRequest(message_ids=requested)
                answer = self._runtime.pull_messages(request, self._state, task)
            for message in answer.messages_list:
                self._objects.delete(message.metadata.reply_to_message_id)
            parts, trees, room = [answer.SerializeToString()], list[ObjectTree](), BATCH_BYTES
            for tree in answer.message_object_trees:
                contents = self._read_contents(tree, min(room, INLINE_BYTES))
                if len(contents) == len(list_tree_ids(tree)):
                    parts += contents
                    room -= sum(map(len, contents))
                    trees.append(tree)
        orders = frozenset(message.metadata.reply_to_message_id for message in answer.messages_list)
        return SentReplies(orders, parts[0], trees), pack(parts)

    def _select_complete(
        self, connection: Any, orders: Sequence[str], grace: float, stopped: frozenset[int]
    ) -> list[str]:
        """Return the orders of which no reply is unfinished; that of a node that is gone is deleted."""
        rows = connection.exec_driver_sql(
            _UNFINISHED + "AND message_ins.message_id IN (SELECT value FROM json_each(?))", (json.dumps(orders),)
        ).all()
        current, waiting = now().timestamp(), set[str]()
        for id, push, online_until, node in rows:
            since = current if int64_to_uint64(node) in stopped else current - grace
            if online_until >= since:
                waiting.add(id)
            else:
                self._delete_unfinished(push)
        return [id for id in orders if id not in waiting]

    def _delete_unfinished(self, push: str) -> None:
        """Delete a reply, with the objects of it that have arrived, and the session in which they were sent."""
        self._state._cleanup_push_session(push, cleanup_messages=True)

    def repeat_replies(self, sent: SentReplies) -> bytes:
        """Return the answer with replies that were sent before."""
        with self._begin():
            return pack(
                [sent.head, *(content for tree in sent.trees for content in self._read_contents(tree, INLINE_BYTES))]
            )

    def delete_replies(self, sent: SentReplies) -> None:
        """Delete the objects that came along with replies."""
        with self._begin():
            for tree in sent.trees:
                self._objects.delete(tree.object_id)

    def cancel_orders(self, task: Task, ids: Sequence[str]) -> None:
        """Delete a run's orders and the replies to them; a reply that arrives later is not stored.

        Args:
            task: The task of the run's server.
            ids: Ids of the orders.

        Raises:
            ValueError: If an order is another run's.
        """
        with self._begin():
            answer = self._runtime.pull_messages(PullAppMessagesRequest(message_ids=ids), self._state, task)
            self._state.delete_messages(message_ins_ids=set(ids))
            for id in (*ids, *(tree.object_id for tree in answer.message_object_trees)):
                self._objects.delete(id)

    @contextmanager
    def _begin(self) -> Generator[Any]:
        """Begin a transaction for writing, and yield SQLAlchemy's session.

        Python's driver for SQLite begins none by itself before a statement that starts with WITH, with which Flower
        claims orders: each would be committed at once, and be lost with a later error.
        """
        with self._state.session() as session:
            session.connection().exec_driver_sql("BEGIN IMMEDIATE")
            yield session

    def _has_ended(self, run: int) -> bool:
        """Return whether a run has ended; Flower then deletes what it has left."""
        try:
            return self._check_abort(run, [Status.FINISHED], self._state) is not None
        except KeyError:
            return True

    def _require_running(self, run: int) -> None:
        """Require that a run is running.

        Flower deletes what a finished run has left. An error in the same transaction would undo that, so it is one
        of its own.

        Raises:
            RunNotRunningException: If it has not started, or has ended.
            ValueError: If it is unknown.
        """
        try:
            reason = self._check_abort(run, [Status.PENDING, Status.STARTING, Status.FINISHED], self._state)
        except KeyError as error:
            raise ValueError("an unknown run") from error
        if reason is not None:
            raise RunNotRunningException

    def _read_contents(self, tree: ObjectTree, most: int) -> list[bytes]:
        """Return the contents of a tree's objects that have arrived, up to a size."""
        contents = list[bytes]()
        for id in list_tree_ids(tree):
            content = self._objects.get(id)
            if content:
                most -= len(content)
                if most < 0:
                    break
                contents.append(content)
        return contents

    def _store_objects(self, push: str, missing: Iterable[str], contents: Sequence[bytes]) -> list[str]:
        """Store the contents of missing objects, and return the ids of those that are still missing.

        Args:
            push: Id of the session in which the objects are sent, which this transaction has started.
            missing: Ids of the missing objects.
            contents: Contents of objects.

        Raises:
            ValueError: If an object is not valid.
        """
        lacking, arrived = dict.fromkeys(missing), dict[str, bytes]()
        for content in contents:
            id = compute_object_id(content)
            if id not in lacking:
                continue
            try:
                validate_object_content(content)
            except UnexpectedObjectContentError as error:
                raise ValueError("an object that is not Flower's") from error
            arrived[id] = content
            del lacking[id]
        if not arrived:
            return list(lacking)
        with self._state.session() as session:
            session.flush()  # the number of missing objects, which Flower has set
            connection = session.connection()
            for id, content in arrived.items():
                if not connection.exec_driver_sql(_CLAIM, (push, id)).rowcount:
                    raise ValueError("an object was not stored")
                self._objects.put(id, content)
            if not connection.exec_driver_sql(_COUNT, (len(arrived), push)).scalar():
                self._state._cleanup_push_session(push, cleanup_messages=False)
        return list(lacking)


_GONE = """
SELECT DISTINCT node.node_id, node.online_until FROM node
JOIN message_ins ON message_ins.dst_node_id = node.node_id
WHERE node.online_until < ? AND message_ins.message_id IN (SELECT value FROM json_each(?)) AND (
    node.online_until >= ? AND node.node_id NOT IN (SELECT value FROM json_each(?))
    OR EXISTS (SELECT 1 FROM message_res WHERE reply_to_message_id = message_ins.message_id)
)
"""
"""The nodes that are offline and have replied to some orders, or have been offline for a short time, and until when
they were online."""


@contextmanager
def _count_as_online(connection: Any, orders: Sequence[str], grace: float, stopped: Iterable[int]) -> Generator[None]:
    """Count nodes as online within a transaction that have replied to orders, or have been offline for a short time.

    Flower makes an error of an order whose node is offline, even if there is a reply: it would lose the last reply of a
    node that was stopped and went offline right after it. A node that was killed or lost its connection can connect
    again only when it is offline, and its order would be lost at that moment.

    Args:
        connection: The transaction's connection.
        orders: Ids of the orders.
        grace: The short time, in seconds.
        stopped: Flower's ids of the nodes that went offline themselves.
    """
    current = now().timestamp()
    left = json.dumps([uint64_to_int64(node) for node in stopped])
    gone = connection.exec_driver_sql(_GONE, (current, json.dumps(list(orders)), current - grace, left)).all()
    for node, _ in gone:
        connection.exec_driver_sql("UPDATE node SET online_until = ? WHERE node_id = ?", (current + 60, node))
    try:
        yield
    finally:
        for node, until in gone:
            connection.exec_driver_sql("UPDATE node SET online_until = ? WHERE node_id = ?", (until, node))


def _parse(kind: Any, body: bytes) -> Any:
    try:
        return kind.FromString(body)
    except Exception as error:  # protobuf's own error class depends on its implementation
        raise ValueError(f"no {kind.__name__}") from error
