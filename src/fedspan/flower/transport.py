"""Parcels through Flower's grid: the server's side of the network."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedspan.engines.parcels import Parcel
from fedspan.errors import FedspanError
from fedspan.flower.codec import from_records, to_records

__all__ = ["Grid", "GridTransport", "invite", "roll_call"]

_POLL = 0.05, 1.0
"""Seconds between two looks for replies: at first, and at most."""


class GridTransport:
    """Sends parcels to nodes and waits for their answers.

    Args:
        grid: Flower's.
        nodes: Flower's node ids by client id.
    """

    def __init__(self, grid: Grid, nodes: Mapping[str, int]) -> None:
        self.grid, self.nodes = grid, nodes

    def exchange(self, parcels: Mapping[str, Parcel], seconds: float) -> Iterator[tuple[str, Parcel | str]]:
        """``Transport.exchange``."""
        asked = dict(zip(parcels, self._push(parcels, seconds), strict=True))
        waiting = {message: id for id, message in asked.items() if message}
        for id in sorted(parcels.keys() - waiting.values()):
            yield id, "Flower took no message for it: its node is unknown or gone"
        for message in _replies(self.grid, waiting, seconds):
            id = waiting.pop(message.metadata.reply_to_message_id)
            if message.has_error():
                yield id, f"its node failed (Flower's code {message.error.code}: {message.error.reason})"
                continue
            try:
                yield id, from_records(message.content)
            except ValueError as error:
                yield id, str(error)
        for id in sorted(waiting.values()):
            yield id, f"no reply within {seconds:g} s"

    def _push(self, parcels: Mapping[str, Parcel], seconds: float) -> list[str]:
        ids: list[str] = []
        for id, parcel in parcels.items():  # one by one: their bodies may be large
            message = Message(to_records(parcel), dst_node_id=self.nodes[id], message_type="train", ttl=seconds + 60)
            ids.extend(self.grid.push_messages([message]))
        return ids


def roll_call(grid: Grid, count: int, seconds: float) -> dict[int, int]:
    """Ask every node of a simulation which client it is.

    Args:
        grid: Flower's.
        count: nodes to wait for.
        seconds: to wait, for the nodes and again for their answers.

    Returns:
        Node ids by partition number.

    Raises:
        FedspanError: if some do not answer.
    """
    until = time.monotonic() + seconds
    while len(nodes := list(grid.get_node_ids())) < count and time.monotonic() < until:
        time.sleep(_POLL[1])
    messages = [Message(RecordDict(), dst_node_id=node, message_type="query", ttl=seconds) for node in nodes]
    waiting = dict(zip(grid.push_messages(messages), nodes, strict=True))
    found: dict[int, int] = {}
    for reply in _replies(grid, waiting, seconds):
        record = None if reply.has_error() else reply.content.get("fedspan.node")
        partition = record.get("partition") if isinstance(record, ConfigRecord) else None
        if isinstance(partition, int):
            found[partition] = waiting[reply.metadata.reply_to_message_id]
    if sorted(found) != list(range(count)):
        raise FedspanError("nodes", sorted(found), f"answers of all {count} nodes; see Flower's log")
    return found


def invite(grid: Grid, parcel: Parcel, seconds: float) -> Iterator[tuple[int, Parcel | str]]:
    """Send a parcel to every node that there is, and to those that come, until time is up or the caller has enough.

    Args:
        grid: Flower's.
        parcel: an invitation.
        seconds: to wait.

    Returns:
        Node ids with their answers, or with the reason in words why there is none.
    """
    until = time.monotonic() + seconds
    waiting: dict[str, int] = {}
    asked: set[int] = set()
    while time.monotonic() < until:
        for node in sorted(set(grid.get_node_ids()) - asked):
            left = max(1.0, until - time.monotonic())
            message = Message(to_records(parcel), dst_node_id=node, message_type="query", ttl=left + 60)
            asked.add(node)
            waiting.update({id: node for id in grid.push_messages([message]) if id})
        for reply in grid.pull_messages(sorted(waiting)) if waiting else ():
            node = waiting.pop(reply.metadata.reply_to_message_id, None)
            if node is None:
                continue
            if reply.has_error():
                yield node, f"Flower's code {reply.error.code}: {reply.error.reason}"
                continue
            try:
                yield node, from_records(reply.content)
            except ValueError as error:
                yield node, str(error)
        time.sleep(_POLL[1] / 2)


def _replies(grid: Grid, waiting: Mapping[str, object], seconds: float) -> Iterator[Message]:
    """Replies to messages as they come, until all are there or time is up."""
    missing, pause, until = set(waiting), _POLL[0], time.monotonic() + seconds
    while missing:
        came = [reply for reply in grid.pull_messages(sorted(missing)) if reply.metadata.reply_to_message_id in missing]
        for reply in came:
            missing.discard(reply.metadata.reply_to_message_id)
            yield reply
        pause = _POLL[0] if came else min(2 * pause, _POLL[1])
        if missing:
            if time.monotonic() > until:
                return
            time.sleep(pause)
