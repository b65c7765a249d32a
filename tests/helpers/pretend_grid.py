"""A grid whose nodes return the messages that they receive."""

from collections.abc import Iterable, Mapping
from typing import Any


class Grid:
    """Nodes that return the messages that they receive, after some polls.

    Args:
        online: Ids of the connected nodes.
        looks: Number of polls after which each node has answered.
    """

    def __init__(self, online: Iterable[int], polls: Mapping[int, int]) -> None:
        self.online, self.polls = list(online), dict(polls)
        self.sent: dict[str, Any] = {}
        self.requests: list[list[str]] = []

    def get_node_ids(self) -> list[int]:
        return self.online

    def push_messages(self, messages: list[Any]) -> list[str]:
        for message in messages:
            self.sent[f"m{len(self.sent)}"] = message
        return list(self.sent)[-len(messages) :]

    def pull_messages(self, ids: list[str]) -> list[Any]:
        self.requests.append(ids)
        back: list[Any] = []
        for id in ids:
            message = self.sent[id]
            node = message.metadata.dst_node_id
            self.polls[node] = self.polls.get(node, 0) - 1
            if self.polls[node] < 0:
                back.append(Reply(id, message.content))
        return back


class Reply:
    """As much of a Flower message as is inspected."""

    def __init__(self, id: str, content: Any) -> None:
        self.metadata, self.content = self, content
        self.reply_to_message_id = id

    def has_error(self) -> bool:
        return False


NODES = {"a": 1, "b": 2, "c": 3}
