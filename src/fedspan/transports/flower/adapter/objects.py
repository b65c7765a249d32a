"""Messages of Flower and the objects that they are made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from flwr.app import Array, Message
from flwr.common.constant import (
    FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE,
)
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_body,
    get_object_children_ids_from_object_content,
    get_object_id,
    get_object_tree,
    get_object_type_from_object_content,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    ObjectUnavailableError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity

__all__ = [
    "OBJECT_BYTES",
    "PIECE_BYTES",
    "ObjectPullError",
    "ObjectPushError",
    "ObjectTree",
    "ObjectUnavailableError",
    "RunNotRunningException",
    "compute_object_id",
    "deflate_message",
    "inflate_message",
    "list_parent_ids",
    "list_tree_ids",
    "pull_all",
    "pull_failure",
    "read_array_bytes",
    "read_array_layout",
    "set_identity",
]

PIECE_BYTES = FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
"""Maximum size of a piece of an array, in bytes."""
OBJECT_BYTES = PIECE_BYTES + 2**16
"""Maximum size of an object in bytes: a piece with what is around it."""


def set_identity(task: int, run: int, node: int) -> None:
    """Set the task, run and node of the messages that this process makes from now on."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task, run, node


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


def read_array_layout(content: bytes) -> tuple[list[str], list[int]] | None:
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


def read_array_bytes(content: bytes) -> int:
    """Return the size of an array of bytes that an object declares; 0: the object is no such array."""
    try:
        if get_object_type_from_object_content(content) != "Array":
            return 0
        declared = json.loads(get_object_body(content, Array))
        size = declared["shape"][0]
        return size if type(size) is int and size > 0 and declared["dtype"] == "uint8" else 0
    except Exception:  # Flower's code assumes that Flower wrote the object; assembling the message reports it
        return 0


def compute_object_id(content: bytes) -> str:
    """Return an object's id: the hash of its content."""
    return get_object_id(content)


def pull_all(ids: Sequence[str], pull: Callable[[str], bytes]) -> dict[str, bytes]:
    """Pull objects, several at a time.

    Args:
        ids: The objects' ids.
        pull: Pulls one object. Its first error ends the function.

    Returns:
        The objects' contents by id.

    Raises:
        ObjectPullError: If an object is missing.
    """
    return pull_objects(list(ids), pull_object_fn=pull)


def list_tree_ids(tree: ObjectTree) -> list[str]:
    """Return the ids of the objects of a tree, each once."""
    return list(dict.fromkeys(node.object_id for node in iterate_object_tree(tree)))


def list_parent_ids(tree: ObjectTree) -> list[str]:
    """Return the ids of the objects of a tree that have others below them, each once."""
    return list(dict.fromkeys(node.object_id for node in iterate_object_tree(tree) if node.children))


def pull_failure(error: ObjectPullError) -> str:
    """Return the reason of a failure without the object's id."""
    return str(error).partition("': ")[2]
