"""Flower's store of objects, with plain SQL statements in place of those that SQLAlchemy builds.

SQLAlchemy took most of a SuperLink's time with many nodes: it builds a statement from Python objects each time, and
Flower's store runs a dozen of them for each object of a message. These methods leave the same rows and raise the same
errors (``evidence/regression/load.py`` profiles them).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_object_id, is_valid_sha256_hash, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import validate_object_content
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.utils import uint64_to_int64

__all__ = ["PlainObjectStore"]

_LOCK = """
INSERT INTO objectstore_locks (lock_id, lock_value) VALUES (?, 0)
ON CONFLICT (lock_id) DO UPDATE SET lock_value = objectstore_locks.lock_value
"""
_OBJECT = "INSERT INTO objects (object_id, content, is_available, ref_count) VALUES (?, x'', 0, 0)"
_CHILD = "INSERT INTO object_children (parent_id, child_id) VALUES (?, ?)"
_IN_RUN = "INSERT INTO run_objects (run_id, object_id) VALUES (?, ?) ON CONFLICT DO NOTHING"
_TREE = """
WITH RECURSIVE reached (id) AS (
    SELECT ? UNION SELECT child_id FROM object_children JOIN reached ON parent_id = id
)
SELECT parent_id, child_id, object_id FROM reached JOIN object_children ON parent_id = id
LEFT JOIN objects ON object_id = child_id ORDER BY parent_id, child_id
"""
"""Parents and children below an object; a child that is missing has no ``object_id``."""


class PlainObjectStore(SqlObjectStore):
    """Flower's store on the same database.

    Args:
        store: Flower's store; connections are shared with it.
    """

    def __init__(self, store: SqlObjectStore) -> None:
        super().__init__(store.database_url, store.verify)
        self._engine, self._session_factory = store._engine, store._session_factory
        self._session_scope = store._session_scope

    def preregister(self, run_id: int, object_tree: ObjectTree) -> list[str]:
        """Register the objects of a message, and return the ids of those whose content is missing.

        Raises:
            ValueError: If an id is not valid, or an object has other children than before.
        """
        nodes = list(iterate_object_tree(object_tree))
        for node in nodes:
            if not is_valid_sha256_hash(node.object_id):
                raise ValueError(f"Invalid object ID format: {node.object_id}")
        with self._mutation_session() as session:
            connection = session.connection()
            available, children = _read_registered(connection, {node.object_id for node in nodes})
            new, missing = dict[str, list[str]](), list[str]()
            for node in nodes:
                id, child_ids = node.object_id, [child.object_id for child in node.children]
                if len(child_ids) != len(set(child_ids)):
                    raise ValueError(f"Object {id} has duplicate children.")
                if id not in available and id not in new:
                    new[id] = child_ids
                elif set(new[id] if id in new else children.get(id, ())) != set(child_ids):
                    raise ValueError(f"Object {id} was preregistered with different children.")
                if not available.get(id):
                    missing.append(id)
            pairs = [(id, child) for id, child_ids in new.items() for child in child_ids]
            _execute_many(connection, _OBJECT, [(id,) for id in new])
            _execute_many(connection, _CHILD, pairs)
            _execute_many(
                connection,
                "UPDATE objects SET ref_count = ref_count + 1 WHERE object_id = ?",
                [(child,) for _, child in pairs],
            )
            run = uint64_to_int64(run_id)
            _execute_many(connection, _IN_RUN, [(run, id) for id in dict.fromkeys(node.object_id for node in nodes)])
        return missing

    def get_object_tree(self, object_id: str) -> ObjectTree:
        """Return the tree of an object's children.

        Raises:
            NoObjectInStoreError: If the object or one below it is not registered.
        """
        with self.session() as session:
            if object_id not in self:
                raise NoObjectInStoreError(f"Object {object_id} was not pre-registered.")
            children: dict[str, list[str]] = {}
            for parent, child, registered in session.connection().exec_driver_sql(_TREE, (object_id,)).all():
                if registered is None:
                    problem = f"Object tree for object ID '{object_id}' contains missing children."
                    raise NoObjectInStoreError(f"{problem} This may indicate a corrupted object store.")
                children.setdefault(parent, []).append(child)
        return _build_tree(object_id, children)

    def put(self, object_id: str, object_content: bytes) -> None:
        """Store the content of a registered object.

        Raises:
            NoObjectInStoreError: If it is not registered.
            ValueError: If the content is not that of the object.
        """
        if self.verify:
            if object_id != get_object_id(object_content):
                raise ValueError(f"Object ID {object_id} does not match content hash")
            validate_object_content(content=object_content)
        with self.session() as session:
            rows = session.connection().exec_driver_sql(
                "UPDATE objects SET content = ?, is_available = 1 WHERE object_id = ? AND is_available = 0",
                (object_content, object_id),
            )
            if not rows.rowcount and object_id not in self:
                raise NoObjectInStoreError(f"Object with ID '{object_id}' was not pre-registered.")

    def get(self, object_id: str) -> bytes | None:
        """Return the content of an object, empty if it is missing; None: the object is not registered."""
        with self.session() as session:
            query = "SELECT content FROM objects WHERE object_id = ?"
            return session.connection().exec_driver_sql(query, (object_id,)).scalar()

    def delete(self, object_id: str) -> None:
        """Delete an object that belongs to no other, and what below it then belongs to none."""
        with self._mutation_session() as session:
            connection, pending = session.connection(), [object_id]
            while pending:
                id = pending.pop()
                children = connection.exec_driver_sql(
                    "SELECT child_id FROM object_children WHERE parent_id = ?", (id,)
                ).scalars()
                children = list(children)
                query = "DELETE FROM objects WHERE object_id = ? AND ref_count = 0"
                if not connection.exec_driver_sql(query, (id,)).rowcount:
                    continue
                _execute_many(
                    connection,
                    "UPDATE objects SET ref_count = ref_count - 1 WHERE object_id = ? AND ref_count > 0",
                    [(child,) for child in children],
                )
                pending += reversed(children)

    def _lock_objectstore_mutation(self) -> None:
        with self.session() as session:
            session.connection().exec_driver_sql(_LOCK, (self._MUTATION_LOCK_ID,))

    def __contains__(self, object_id: str) -> bool:
        """Return whether an object is registered."""
        with self.session() as session:
            query = "SELECT 1 FROM objects WHERE object_id = ?"
            return session.connection().exec_driver_sql(query, (object_id,)).first() is not None


def _read_registered(connection: Any, ids: Iterable[str]) -> tuple[dict[str, int], dict[str, set[str]]]:
    """Return of the registered objects among some whether their content is there, and their children."""
    listed = (json.dumps(list(ids)),)
    query = "SELECT object_id, is_available FROM objects WHERE object_id IN (SELECT value FROM json_each(?))"
    available = {id: is_available for id, is_available in connection.exec_driver_sql(query, listed).all()}
    children: dict[str, set[str]] = {}
    if available:
        query = "SELECT parent_id, child_id FROM object_children WHERE parent_id IN (SELECT value FROM json_each(?))"
        for parent, child in connection.exec_driver_sql(query, (json.dumps(list(available)),)).all():
            children.setdefault(parent, set()).add(child)
    return available, children


def _execute_many(connection: Any, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
    if rows:
        connection.exec_driver_sql(statement, [*rows])


def _build_tree(id: str, children: Mapping[str, Sequence[str]]) -> ObjectTree:
    return ObjectTree(object_id=id, children=[_build_tree(child, children) for child in children.get(id, ())])
