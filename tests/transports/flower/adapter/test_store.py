"""Objects, orders and replies in the database of Flower's own SuperLink, without a server."""

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

from flwr.app import ConfigRecord, Message, RecordDict

from fedspan.transports.flower.adapter import (
    MessageStore,
    RunNotRunningException,
    deflate_message,
    find_reply_limit,
    read_pushed_reply,
    set_identity,
)
from fedspan.transports.flower.adapter.object_store import PlainObjectStore
from fedspan.transports.flower.wire import INLINE_BYTES, format_reply_limit, unpack
from helpers.hostile_node import name_of

remove_content_from_message = name_of("flwr.app.message", "remove_content_from_message")
SUPERLINK_NODE_ID = name_of("flwr.common.constant", "SUPERLINK_NODE_ID")
message_from_proto = name_of("flwr.common.serde", "message_from_proto")
message_to_proto = name_of("flwr.common.serde", "message_to_proto")
PullMessagesResponse = name_of("flwr.proto.fleet_pb2", "PullMessagesResponse")
PushMessagesRequest = name_of("flwr.proto.fleet_pb2", "PushMessagesRequest")
PushMessagesResponse = name_of("flwr.proto.fleet_pb2", "PushMessagesResponse")
PushObjectRequest = name_of("flwr.proto.message_pb2", "PushObjectRequest")
compute_object_id = name_of("flwr.supercore.inflatable.inflatable_object", "get_object_id")
ObjectTree = name_of("flwr.proto.message_pb2", "ObjectTree")
Node = name_of("flwr.proto.node_pb2", "Node")
PullAppMessagesResponse = name_of("flwr.proto.runtime_pb2", "PullAppMessagesResponse")
PushAppMessagesRequest = name_of("flwr.proto.runtime_pb2", "PushAppMessagesRequest")
uint64_to_int64 = name_of("flwr.supercore.utils", "uint64_to_int64")
LinkStateFactory = name_of("flwr.server.superlink.linkstate", "LinkStateFactory")
ObjectStoreFactory = name_of("flwr.supercore.object_store", "ObjectStoreFactory")
NoOpFederationManager = name_of("flwr.superlink.federation", "NoOpFederationManager")


class Scene:
    """A node and a running run in a database."""

    def __init__(self, factory: Any) -> None:
        self.state = factory.state()
        self.app = SimpleNamespace(state=SimpleNamespace(linkstate_factory=factory))
        self.store = MessageStore(self.app)
        self.node = self.state.create_node("owner", "owner", os.urandom(8), 30.0)
        assert self.state.activate_node(self.node, 30.0)
        self.run = self.state.create_run(None, None, None, {}, "@none/default", None, "owner", "flwr-serverapp")
        (task,) = self.state.get_tasks(run_ids=[self.run])
        token = self.state.claim_task(task.task_id)
        assert token is not None
        assert self.state.activate_task(task.task_id)
        self.task = self.store.find_task(token)

    def send_order(self, group: str = "") -> str:
        """Store an order of a group for the node, and return its id."""
        set_identity(1, self.run, SUPERLINK_NODE_ID)
        content = RecordDict({"a": ConfigRecord({"a": time.time()})})
        message = Message(content, dst_node_id=self.node, message_type="train", ttl=600, group_id=group)
        tree, contents = deflate_message(message)
        head = PushAppMessagesRequest(
            messages_list=[message_to_proto(remove_content_from_message(message))], message_object_trees=[tree]
        )
        assert self.task is not None
        nodes, _ = self.store.store_orders(self.task, head.SerializeToString(), list(contents.values()))
        assert nodes == {self.node}
        return tree.object_id

    def take(self) -> Any:
        """Take the node's next order, with the answer that it is sent in."""
        taken = self.store.take_order(self.node)
        assert taken is not None
        return taken

    def lose_connection(self, seconds: float) -> None:
        """Let the node have been offline for so long without having been stopped."""
        with self.state.session() as session:
            until = time.time() - seconds
            session.connection().exec_driver_sql(
                "UPDATE node SET online_until = ? WHERE node_id = ?", (until, uint64_to_int64(self.node))
            )

    def reply(self, order: Any) -> tuple[Any, list[bytes]]:
        """A node's reply to an order, as the node sends it."""
        set_identity(1, self.run, self.node)
        received = message_from_proto(PullMessagesResponse.FromString(order.head).messages_list[0])
        content = RecordDict({"b": ConfigRecord({"b": str(self.run)})})
        tree, contents = deflate_message(reply := Message(content, reply_to=received))
        request = PushMessagesRequest(
            node=Node(node_id=self.node),
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[tree],
        )
        return request, list(contents.values())


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    database = str(tmp_path_factory.mktemp("database") / "flower.db")
    return LinkStateFactory(database, NoOpFederationManager(), ObjectStoreFactory(database))


@pytest.fixture
def scene(factory: Any) -> Scene:
    return Scene(factory)


def test_a_reply_is_stored_with_its_objects_and_its_order_deleted(scene: Scene) -> None:
    id = scene.send_order()
    taken = scene.take()
    assert taken[0].id == id
    stored = scene.store.store_reply(*scene.reply(taken[0]))
    assert (stored.run, stored.reply_to) == (scene.run, id)
    assert id not in scene.state.object_store


def test_a_reply_that_is_complete_or_was_stored_before_leaves_no_session(scene: Scene) -> None:
    scene.send_order()
    taken = scene.take()
    request, contents = scene.reply(taken[0])
    for _ in range(3):
        scene.store.store_reply(request, contents)
        with scene.state.session() as session:
            rows = session.connection().exec_driver_sql(
                "SELECT COUNT(*) FROM object_push_sessions WHERE run_id = ?", (uint64_to_int64(scene.run),)
            )
            assert rows.scalar() == 0


def test_a_node_whose_reply_arrives_is_online(scene: Scene) -> None:
    """The server took it for offline, and asks it to evaluate at once: its heartbeat may come later."""
    scene.send_order()
    taken = scene.take()
    scene.lose_connection(20)
    assert scene.node not in scene.state.get_nodes(scene.run)
    scene.store.store_reply(*scene.reply(taken[0]))
    assert scene.node in scene.state.get_nodes(scene.run)


def test_the_maximum_size_of_a_reply_is_stored_with_its_order(scene: Scene) -> None:
    limited, other = scene.send_order(format_reply_limit(1234)), scene.send_order()
    assert find_reply_limit(scene.app, scene.node, limited) == 1234
    assert find_reply_limit(scene.app, scene.node, other) is None
    for node, order in ((scene.node, "unknown"), (scene.node + 1, limited)):
        assert find_reply_limit(scene.app, node, order) == INLINE_BYTES


def test_a_late_reply_is_refused_and_what_its_run_left_stays_deleted(scene: Scene) -> None:
    id = scene.send_order()
    taken = scene.take()
    assert scene.state.finish_task(scene.task.task_id, "completed", "")
    assert id in scene.state.object_store
    with pytest.raises(RunNotRunningException):
        scene.store.store_reply(*scene.reply(taken[0]))
    assert id not in scene.state.object_store
    assert not scene.state.get_message_ids_from_run_id(scene.run)


def test_a_reply_for_an_unknown_run_is_not_valid(scene: Scene) -> None:
    scene.send_order()
    taken = scene.take()
    request, contents = scene.reply(taken[0])
    request.messages_list[0].metadata.run_id = scene.run + 1
    with pytest.raises(ValueError, match="unknown run"):
        scene.store.store_reply(request, contents)


def test_the_objects_of_an_announcement_are_counted_up_to_the_limit(scene: Scene) -> None:
    scene.send_order()
    taken = scene.take()
    request, _ = scene.reply(taken[0])
    tree = request.message_object_trees[0]
    del tree.children[:]
    tree.children.extend([ObjectTree(children=[ObjectTree()]), ObjectTree()])
    for limit, counts in ((10, (4, 3)), (4, (4, 3)), (3, (4, 3)), (2, (3, 2)), (1, (2, 2))):
        reply = read_pushed_reply(request.SerializeToString(), limit)
        assert (reply.objects, reply.depth) == counts
        assert reply.request == request
    tree.children.extend(ObjectTree() for _ in range(200_000))
    began = time.process_time()
    body = request.SerializeToString()
    reply = read_pushed_reply(body, 425)
    assert reply.objects == 426
    assert time.process_time() - began < 1.0


def test_an_order_of_a_run_that_has_ended_is_neither_sent_nor_sent_again(scene: Scene) -> None:
    first = scene.send_order()
    scene.send_order()
    taken = scene.take()
    assert taken[0].id == first
    assert scene.store.repeat_order(taken[0]) == taken[1]
    assert scene.state.finish_task(scene.task.task_id, "completed", "")
    assert scene.store.repeat_order(taken[0]) is None
    assert scene.store.take_order(scene.node) is None
    assert not scene.state.get_message_ids_from_run_id(scene.run)


def test_an_order_is_taken_again_after_an_error(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    id = scene.send_order()

    def full(*_: Any) -> Any:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(scene.store, "_read_contents", full)
        with pytest.raises(OSError, match="disk full"):
            scene.store.take_order(scene.node)
    taken = scene.take()
    assert taken[0].id == id


def test_replies_are_there_until_they_count_as_received(scene: Scene) -> None:
    id = scene.send_order()
    taken = scene.take()
    scene.store.store_reply(*scene.reply(taken[0]))
    sent, answer = scene.store.take_replies(scene.task, [id])
    assert sent.orders == {id}
    assert scene.store.repeat_replies(sent) == answer
    scene.store.delete_replies(sent)
    assert sent.trees[0].object_id not in scene.state.object_store


def test_the_last_reply_of_a_node_that_goes_offline_counts(scene: Scene) -> None:
    replied = scene.send_order()
    taken = scene.take()
    scene.store.store_reply(*scene.reply(taken[0]))
    assert scene.state.deactivate_node(scene.node)
    sent, answer = scene.store.take_replies(scene.task, [replied])
    head = PullAppMessagesResponse.FromString(unpack(answer, 64)[0]).messages_list[0]
    assert sent.orders == {replied}
    assert not head.HasField("error")
    assert len(sent.trees) == 1
    assert scene.node not in scene.state.get_nodes(scene.run)  # it is offline as before
    unanswered = scene.send_order()
    sent, answer = scene.store.take_replies(scene.task, [unanswered])
    assert PullAppMessagesResponse.FromString(unpack(answer, 64)[0]).messages_list[0].HasField("error")


def take_replies(scene: Scene, id: str, grace: float, stopped: tuple[int, ...] = ()) -> bool:
    """Take the replies to an order; return whether there is Flower's error."""
    sent, answer = scene.store.take_replies(scene.task, [id], grace, stopped)
    heads = PullAppMessagesResponse.FromString(unpack(answer, 64)[0]).messages_list
    assert sent.orders == ({id} if heads else set())
    return bool(heads) and heads[0].HasField("error")


def test_an_order_waits_for_a_node_that_lost_its_connection(scene: Scene) -> None:
    """Flower lets a node connect again only when it counts as offline, and then makes an error of its order."""
    id = scene.send_order()
    taken = scene.take()
    assert not scene.state.activate_node(scene.node, 30.0)  # it is killed, and comes back too early
    for seconds in (1, 58):
        scene.lose_connection(seconds)
        assert not take_replies(scene, id, 60.0)
    assert scene.node not in scene.state.get_nodes(scene.run)
    assert scene.state.activate_node(scene.node, 30.0)
    assert scene.store.repeat_order(taken[0]) == taken[1]
    assert not take_replies(scene, id, 60.0)
    scene.store.store_reply(*scene.reply(taken[0]))
    assert scene.store.take_replies(scene.task, [id], 60.0)[0].orders == {id}


@pytest.mark.parametrize("how", ["late", "stopped"])
def test_an_order_that_was_given_up_is_not_carried_out_later(how: str, scene: Scene) -> None:
    id = scene.send_order()
    taken = scene.take()
    if how == "stopped":
        assert scene.state.deactivate_node(scene.node)
        assert take_replies(scene, id, 60.0, (scene.node,))
    else:
        scene.lose_connection(61)
        assert take_replies(scene, id, 60.0)
    assert scene.state.activate_node(scene.node, 30.0)
    assert id not in scene.state.object_store
    assert scene.store.repeat_order(taken[0]) is None
    scene.store.return_orders(scene.node, "")
    assert scene.store.take_order(scene.node) is None
    assert scene.store.store_reply(*scene.reply(taken[0])).reply_to == ""  # of a node that was not restarted


def test_an_order_that_was_sent_and_not_received_is_taken_again(scene: Scene) -> None:
    """As after a restart of the SuperLink, which remembers only its database."""
    id = scene.send_order()
    first = scene.take()
    assert scene.store.take_order(scene.node) is None
    scene.store.return_orders(scene.node, "")
    again = scene.take()
    assert again[0].id == id
    assert again[1] == first[1]
    scene.store.return_orders(scene.node + 1, "")  # another node's request
    assert scene.store.take_order(scene.node) is None


def test_a_received_order_stays_received_and_nobody_deletes_that_of_another_node(scene: Scene) -> None:
    """As after two restarts of the SuperLink: in the second, the node names another order than in the first."""
    id = scene.send_order()
    scene.store.return_orders(scene.node, id)  # nothing was sent yet, so nothing can have been received
    assert id in scene.state.object_store
    assert scene.store.take_order(scene.node) is not None
    scene.store.return_orders(scene.node + 1, id)
    assert id in scene.state.object_store
    scene.store.return_orders(scene.node, id)
    assert id not in scene.state.object_store
    scene.store.return_orders(scene.node, "")
    assert scene.store.take_order(scene.node) is None


@pytest.mark.parametrize("how", ["received", "confirmed", "replied"])
def test_an_order_that_was_received_is_not_taken_again(how: str, scene: Scene) -> None:
    id = scene.send_order()
    taken = scene.take()
    if how == "confirmed":
        scene.store.delete(id)
    if how == "replied":
        scene.store.store_reply(*scene.reply(taken[0]))
    scene.store.return_orders(scene.node, id if how == "received" else "")
    assert scene.store.take_order(scene.node) is None
    assert id not in scene.state.object_store
    assert id in scene.state.get_message_ids_from_run_id(scene.run)  # the server waits for its reply still
    if how == "replied":
        assert scene.store.take_replies(scene.task, [id])[0].orders == {id}


class Unfinished:
    """An order of which a node has announced the reply and sent its first objects."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.id = scene, scene.send_order()
        taken = scene.take()
        self.request, self.contents = scene.reply(taken[0])
        assert len(self.contents) > 1
        stored = scene.store.store_reply(self.request, self.contents[:1])
        assert (stored.reply_to, stored.is_complete) == (self.id, False)
        answer = PushMessagesResponse.FromString(stored.answer)
        assert len(answer.objects_to_push) == len(self.contents) - 1
        self.push = answer.session_id

    def send_rest(self) -> None:
        """Send the missing objects, in the session of the announcement."""
        state, store = self.scene.state, self.scene.store
        request = PushObjectRequest(session_id=self.push).SerializeToString()
        for content in self.contents[1:]:
            assert not store.is_push_finished(request)
            assert state.store_object(self.scene.run, self.push, compute_object_id(content), content)
        assert store.is_push_finished(request)

    def is_taken(self) -> bool:
        """Take the complete replies; return whether that to the order is there."""
        return self.scene.store.take_replies(self.scene.task, [self.id], 60.0)[0].orders == {self.id}


def test_a_reply_is_taken_when_all_of_its_objects_have_arrived(scene: Scene) -> None:
    reply = Unfinished(scene)
    assert not reply.is_taken()
    scene.store.return_orders(scene.node, reply.id)  # as after a restart of the SuperLink: the node goes on
    assert scene.store.take_order(scene.node) is None
    scene.lose_connection(59)
    assert not reply.is_taken()
    reply.send_rest()
    assert reply.is_taken()
    assert reply.id not in scene.state.object_store


def test_a_node_that_was_restarted_sends_an_unfinished_reply_again(scene: Scene) -> None:
    reply, other = Unfinished(scene), scene.send_order()
    scene.store.return_orders(scene.node, "")
    again = scene.take()
    assert again[0].id == reply.id
    first = reply.request.messages_list[0].metadata.message_id
    assert first not in scene.state.object_store
    request, contents = scene.reply(again[0])
    assert request.messages_list[0].metadata.message_id != first
    assert scene.store.store_reply(request, contents).is_complete
    assert reply.is_taken()
    following = scene.take()
    assert following[0].id == other


@pytest.mark.parametrize("how", ["late", "stopped"])
def test_an_unfinished_reply_of_a_node_that_is_gone_is_an_error(how: str, scene: Scene) -> None:
    reply = Unfinished(scene)
    if how == "stopped":
        assert scene.state.deactivate_node(scene.node)
    else:
        scene.lose_connection(61)
    assert take_replies(scene, reply.id, 60.0, (scene.node,) if how == "stopped" else ())
    assert reply.id not in scene.state.object_store
    assert reply.request.messages_list[0].metadata.message_id not in scene.state.object_store


def test_what_is_no_request_with_an_object_finishes_no_reply(scene: Scene) -> None:
    assert not scene.store.is_push_finished(b"\xff")


SqlObjectStore = name_of("flwr.supercore.object_store.sql_object_store", "SqlObjectStore")
get_object_id = name_of("flwr.supercore.inflatable.inflatable_object", "get_object_id")
IDS = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(7)]
CHILDREN = {0: (1, 2), 1: (3, 4), 2: (4,), 3: (), 4: (5,), 5: (), 6: (1, 5)}
"""Objects and what they are made of; some are shared."""
TABLES = {
    "objects": "object_id, content, is_available, ref_count",
    "object_children": "parent_id, child_id",
    "run_objects": "run_id, object_id",
    "objectstore_locks": "lock_id, lock_value",
}


def build_tree(number: int) -> Any:
    return ObjectTree(object_id=IDS[number], children=[build_tree(child) for child in CHILDREN[number]])


def build_wrong_tree(number: int) -> Any:
    """A tree whose root has a child more, or less."""
    tree = build_tree(number)
    if len(tree.children):
        del tree.children[0]
    else:
        tree.children.append(ObjectTree(object_id=IDS[0]))
    return tree


def dump(store: Any) -> dict[str, list[tuple[Any, ...]]]:
    with store.session() as session:
        connection = session.connection()
        return {
            table: sorted(map(tuple, connection.exec_driver_sql(f"SELECT {columns} FROM {table}").all()))
            for table, columns in TABLES.items()
        }


CALLS: dict[str, Callable[[Any, int, int], Any]] = {
    "preregister": lambda store, number, run: store.preregister(run, build_tree(number)),
    "preregister-wrong": lambda store, number, run: store.preregister(run, build_wrong_tree(number)),
    "preregister-twice": lambda store, number, run: store.preregister(
        run, ObjectTree(object_id=IDS[number], children=[build_tree(5), build_tree(5)])
    ),
    "preregister-invalid": lambda store, number, run: store.preregister(run, ObjectTree(object_id="?")),
    "put": lambda store, number, run: store.put(IDS[number], b"content %d" % number),
    "get": lambda store, number, run: store.get(IDS[number]),
    "delete": lambda store, number, run: store.delete(IDS[number]),
    "tree": lambda store, number, run: store.get_object_tree(IDS[number]),
    "in": lambda store, number, run: (IDS[number] in store, len(store)),
    "delete-run": lambda store, number, run: store.delete_objects_in_run(run),
}
WEIGHTED = [*CALLS, "preregister", "preregister", "put", "put", "put", "delete", "tree"]


def call(store: Any, name: str, number: int, run: int) -> object:
    try:
        return CALLS[name](store, number, run)
    except Exception as error:
        return type(error), str(error)


def normalize(result: object) -> object:
    """A tree's children have no order of their own."""
    if not isinstance(result, ObjectTree):
        return result
    tree: Any = result
    return tree.object_id, sorted((normalize(child) for child in tree.children), key=repr)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Flower's store, and this one, on databases of their own; neither checks contents."""
    made = [SqlObjectStore(str(tmp_path_factory.mktemp("objects") / "flower.db"), verify=False) for _ in range(2)]
    for store in made:
        store.initialize()
    return made[0], PlainObjectStore(made[1])


@settings(deadline=None, max_examples=60)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(WEIGHTED), st.integers(0, 6), st.sampled_from([1, 2**63 + 5])),
        min_size=1,
        max_size=12,
    )
)
def test_it_does_what_flower_s_store_does(calls: list[tuple[str, int, int]], stores: tuple[Any, Any]) -> None:
    flower, plain = stores
    for store in stores:
        store.clear()
    for one in calls:
        assert normalize(call(plain, *one)) == normalize(call(flower, *one))
        assert dump(plain) == dump(flower)


def test_contents_are_checked_as_flower_does(tmp_path: Path) -> None:
    store = SqlObjectStore(str(tmp_path / "flower.db"))
    store.initialize()
    plain = PlainObjectStore(store)
    content = b"not an object of Flower"
    id = get_object_id(content)
    plain.preregister(1, ObjectTree(object_id=id))
    errors = [call_put(one, *arguments) for one in (store, plain) for arguments in ((IDS[0], content), (id, content))]
    assert errors[:2] == errors[2:]
    assert all(error is not None for error in errors)
    assert plain.get(id) == b""


def call_put(store: Any, id: str, content: bytes) -> tuple[type[Exception], str] | None:
    try:
        store.put(id, content)
    except Exception as error:
        return type(error), str(error)
    return None
