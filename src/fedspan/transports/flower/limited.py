"""Flower's grid over HTTP with a limit on the size of replies."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flwr.app import Error, Message, Metadata
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, pull_objects
from flwr.superlink.grid import HttpGrid

from fedspan.transports.flower.objects import assemble_message

__all__ = ["LimitedGrid", "count_bytes"]


class LimitedGrid(HttpGrid):
    """``HttpGrid`` that stops fetching a reply at the size limit and has the SuperLink delete it."""

    most = 1 << 31
    """Maximum size of a reply, in bytes."""

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """``HttpGrid.pull_messages``; a reply that is too large or incomplete is replaced by an error."""
        client, run = self._runtime_client, self.run.run_id
        found = client.PullMessages(PullAppMessagesRequest(message_ids=list(message_ids)))
        messages: list[Message] = []
        why = ""
        for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            id, asked = message.metadata.message_id, message.metadata.reply_to_message_id
            pull = make_pull_object_fn_protobuf(client.PullObject, self.node, run)
            objects = [one.object_id for one in iterate_object_tree(tree)]
            try:
                contents = pull_objects(objects, pull_object_fn=count_bytes(pull, self.most))
            except ObjectPullError as error:
                contents, why = None, str(error).partition("': ")[2]  # without the object's id
            client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=self.node, run_id=run, message_object_id=id)
            )
            try:
                messages.append(
                    self._failed(run, asked, why) if contents is None else assemble_message(id, contents, self.most)
                )
            except ValueError as error:
                messages.append(self._failed(run, asked, f"the reply: {error}"))
        return messages

    def _failed(self, run: int, asked: str, why: str) -> Message:
        own = self.node.node_id
        metadata = Metadata(
            run_id=run,
            message_id="",
            src_node_id=own,
            dst_node_id=own,
            message_type=SYSTEM_MESSAGE_TYPE,
            group_id="",
            ttl=0,
            reply_to_message_id=asked,
            created_at=now().timestamp(),
        )
        return make_message(metadata=metadata, error=Error(ErrorCode.MESSAGE_UNAVAILABLE, why))


def count_bytes(pull: Callable[[str], bytes], most: int) -> Callable[[str], bytes]:
    """Wrap a pull function with a limit on the total size of the objects.

    Args:
        pull: Pulls one object.
        most: Maximum size of all objects together, in bytes.

    Returns:
        The wrapped function; it raises ``ObjectPullError`` once the limit is exceeded.
    """
    taken = 0

    def pulled(id: str) -> bytes:
        nonlocal taken
        if taken <= most:
            data = pull(id)
            taken += len(data)
            if taken <= most:
                return data
        raise ObjectPullError(id, f"the reply has more than {most / 2**20:g} MiB, the most that is taken")

    return pulled
