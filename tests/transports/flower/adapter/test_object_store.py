"""The store of objects leaves the rows of Flower's own, and raises its errors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

from fedspan.transports.flower.adapter.object_store import PlainObjectStore
from helpers.hostile_node import name_of

ObjectTree = name_of("flwr.proto.message_pb2", "ObjectTree")
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
    """All rows, sorted."""
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
    """A call's result, or its error."""
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
