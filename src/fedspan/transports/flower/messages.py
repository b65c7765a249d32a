"""Messages from the other side of the network: fetched and assembled with a limit on their size.

Objects are named by the hash of their content, so equal pieces of an array are transmitted once, and a list holds their
positions. A few bytes can thus expand to many: the size of the assembled message is computed before assembly. Whatever
the other side sends, only the errors named here are raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flwr.app import Message

from fedspan.transports.flower.adapter import ObjectPullError, ObjectTree, array_layout, inflate_message, pull_tree

__all__ = ["TooLarge", "assemble_message", "fetch_objects", "whole_bytes"]


class TooLarge(ObjectPullError):
    """Raised when a message's objects exceed the maximum size."""


def fetch_objects(tree: ObjectTree, pull: Callable[[str], bytes], most: int) -> dict[str, bytes]:
    """Fetch a message's objects; after the one that exceeds the maximum size, no other is fetched.

    Args:
        tree: The ids of the message's objects.
        pull: Fetches one object.
        most: Maximum size of all objects together, in bytes.

    Returns:
        The objects' contents by id.

    Raises:
        TooLarge: If the objects exceed the maximum size.
        ObjectPullError: If an object is missing.
    """
    taken = 0

    def counted(id: str) -> bytes:
        nonlocal taken
        if taken <= most:
            data = pull(id)
            taken += len(data)
            if taken <= most:
                return data
        raise TooLarge(id, _limit(most))

    return pull_tree(tree, counted)


def assemble_message(id: str, contents: dict[str, bytes], most: int) -> Message:
    """Assemble a message.

    Args:
        id: Id of the message's object.
        contents: The message's objects, including nested ones; they are removed, which saves memory.
        most: Maximum size of the message, in bytes.

    Raises:
        ValueError: If it is not a message or exceeds the maximum size.
    """
    try:
        if whole_bytes(contents) > most:
            raise ValueError(f"it has {_limit(most)}")
        message = inflate_message(id, contents)
    except ValueError:
        raise
    except Exception as error:  # Flower's code assumes that Flower wrote the objects
        raise ValueError(f"no message of Flower's ({type(error).__name__})") from error
    if message is None:
        raise ValueError("no message of Flower's")
    return message


def whole_bytes(contents: Mapping[str, bytes]) -> int:
    """Return the size of the objects, in bytes, after every array is assembled from its pieces."""
    total = 0
    for content in contents.values():
        total += len(content)
        layout = array_layout(content)
        if layout is not None:
            pieces, positions = layout
            sizes = [len(contents[piece]) for piece in pieces]
            total += sum(sizes[position] for position in positions) - sum(sizes)
    return total


def _limit(most: int) -> str:
    return f"more than {most / 2**20:g} MiB, the most that is taken"
