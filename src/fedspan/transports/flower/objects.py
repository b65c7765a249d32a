"""A message from the objects that Flower sends it in; whatever came in their place gives an error and nothing else.

Objects have their content's hash for a name, so equal pieces of an array travel once, and a list says where they go. A
few bytes may so stand for many: a message is measured as it will be, before it is put together.
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
    """A message.

    Args:
        id: its object's.
        contents: its objects, with those within it; they are taken out, which saves memory.
        most: bytes that it may have.

    Raises:
        ValueError: if it is none, or has more.
    """
    try:
        if whole_bytes(contents) > most:
            raise ValueError(f"it has more than {most / 2**20:g} MiB, the most that is taken")
        whole = inflate_object_from_contents(id, contents)
    except ValueError:
        raise
    except Exception as error:  # Flower's code takes it for granted that other Flower wrote it
        raise ValueError(f"no message of Flower's ({type(error).__name__})") from error
    if not isinstance(whole, Message):
        raise ValueError("no message of Flower's")
    whole.metadata.__dict__["_message_id"] = id
    return whole


def whole_bytes(contents: Mapping[str, bytes]) -> int:
    """Bytes of objects once every array has its pieces in place."""
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
