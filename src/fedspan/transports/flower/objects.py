"""Assembly of a message from the objects in which Flower sends it; any invalid object raises one kind of error.

Objects are named by the hash of their content, so equal pieces of an array are transmitted once, and a list holds their
positions. A few bytes can thus expand to many: the size of the assembled message is computed before assembly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from flwr.app import Array, Message
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_children_ids_from_object_content,
    get_object_type_from_object_content,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

__all__ = ["assemble_message", "whole_bytes"]


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
            raise ValueError(f"it has more than {most / 2**20:g} MiB, the most that is taken")
        whole = inflate_object_from_contents(id, contents)
    except ValueError:
        raise
    except Exception as error:  # Flower's code assumes that Flower wrote the objects
        raise ValueError(f"no message of Flower's ({type(error).__name__})") from error
    if not isinstance(whole, Message):
        raise ValueError("no message of Flower's")
    whole.metadata.__dict__["_message_id"] = id
    return whole


def whole_bytes(contents: Mapping[str, bytes]) -> int:
    """Return the size of the objects, in bytes, after every array is assembled from its pieces."""
    total = 0
    for content in contents.values():
        total += len(content)
        if get_object_type_from_object_content(content) != "Array":
            continue
        pieces = get_object_children_ids_from_object_content(content)
        sizes = [len(contents[piece]) for piece in pieces]
        places = json.loads(get_object_body(content, Array))["arraychunk_ids"]
        total += sum(sizes[place] for place in places) - sum(sizes)
    return total
