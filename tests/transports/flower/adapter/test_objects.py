"""Messages as objects: their ids, their parts, and errors of a pull."""

from __future__ import annotations

import importlib
import json
import re

import pytest

from helpers.flower_names import broken, build_array_message

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

OBJECTS = "flwr.supercore.inflatable.inflatable_object"


TRANSFER = "flwr.supercore.inflatable.inflatable_utils"


@pytest.mark.usefixtures("identity")
def test_a_message_s_id_is_the_hash_of_its_content() -> None:
    message = build_array_message(b"abc")
    message.metadata.__dict__["_message_id"] = message.object_id
    if message.metadata.message_id != message.object_id:
        broken('metadata.__dict__["_message_id"]', "naming a message by its content")
    if not re.fullmatch("[0-9a-f]{64}", message.object_id):
        broken("a SHA-256 as Message.object_id", "naming a message by its content")


@pytest.mark.usefixtures("identity")
def test_a_message_comes_apart_and_together_again() -> None:
    objects, transfer = importlib.import_module(OBJECTS), importlib.import_module(TRANSFER)
    body = bytes(25 * 2**20)  # three pieces, of which two are equal
    message = build_array_message(body)
    contents = {id: one.deflate() for id, one in objects.get_all_nested_objects(message).items()}
    purpose = "sending and assembling a message"
    if {one.object_id for one in objects.iterate_object_tree(objects.get_object_tree(message))} != set(contents):
        broken("an object tree of all nested objects", purpose)
    arrays = [data for data in contents.values() if objects.get_object_type_from_object_content(data) == "Array"]
    if len(arrays) != 1:
        broken('one object of type "Array" for an array', "the size of an assembled message")
    pieces = objects.get_object_children_ids_from_object_content(arrays[0])
    from flwr.app import Array

    positions = json.loads(objects.get_object_body(arrays[0], Array)).get("arraychunk_ids")
    if positions is None or sum(len(contents[pieces[one]]) for one in positions) < len(body):
        broken('"arraychunk_ids" with the positions of an array\'s pieces', "the size of an assembled message")
    whole = transfer.inflate_object_from_contents(message.object_id, contents)
    if whole.content["body"]["body"].data != body:
        broken("inflate_object_from_contents as the inverse of deflate", purpose)
    if contents:
        broken("an inflate_object_from_contents that removes the objects that it used", "saving memory")


def test_the_first_error_of_a_pull_is_raised() -> None:
    transfer = importlib.import_module(TRANSFER)
    error = transfer.ObjectPullError("id", "why")
    if str(error).partition("': ")[2] != "why":
        broken("an ObjectPullError whose text ends with ': and the reason", "the reason of a missing reply")

    def pull(id: str) -> bytes:
        raise error

    with pytest.raises(transfer.ObjectPullError) as raised:
        transfer.pull_objects(["a", "b"], pull_object_fn=pull)
    if raised.value is not error:
        broken("pull_objects that raises the first error unchanged", "the limit on the size of messages")
