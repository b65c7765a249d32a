"""The nodes that send requests: who they are, and how many requests and bytes each may still send."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict

from anyio.to_thread import run_sync

from fedspan.transports.flower.adapter import find_node_id
from fedspan.transports.flower.bodies import Refused, Scope
from fedspan.transports.flower.limits import KNOWN_SECONDS, Bucket, DoorLimits, Sender, Slot

__all__ = ["Senders", "require_room"]


class Senders:
    """The door's states of the nodes, by public key.

    Args:
        limits: Limits on the requests of one node.
    """

    def __init__(self, limits: DoorLimits) -> None:
        self._limits = limits
        self._senders: OrderedDict[bytes, Sender] = OrderedDict()

    def get(self, key: bytes) -> Sender:
        """Return the state of a node; that of an unknown node is made."""
        sender, limits = self._senders.pop(key, None), self._limits
        if sender is None:
            requests = Bucket(limits.rate, limits.burst)
            heartbeats = Bucket(limits.heartbeat_rate, limits.heartbeat_burst)
            sender = Sender(asyncio.Semaphore(limits.parallel), requests, heartbeats)
        self._senders[key] = sender
        while len(self._senders) > 4096 and next(iter(self._senders.values())).waiting == 0:
            self._senders.popitem(last=False)
        return sender

    async def require_admitted(self, scope: Scope, sender: Sender, key: bytes) -> None:
        """Check that the server's operator has admitted a node.

        Raises:
            Refused: If not.
        """
        now = time.monotonic()
        if now - sender.looked_up_at >= KNOWN_SECONDS:
            sender.node = await run_sync(find_node_id, scope["app"], key)
            sender.looked_up_at = now
        if sender.node is None:
            self._senders.pop(key, None)
            raise Refused(401, "this key was not admitted")

    async def wait(self, sender: Sender, slot: Slot) -> None:
        """Delay a request until its sender may send one.

        Raises:
            Refused: If too many of its requests wait.
        """
        if sender.waiting >= self._limits.waiting:
            raise Refused(429, "too many requests at once")
        sender.waiting += 1
        try:
            await slot.enter()
        finally:
            sender.waiting -= 1
        delay = sender.requests.take()
        if delay > 0:
            await asyncio.sleep(delay)


def require_room(body: bytes, sender: Sender | None) -> None:
    """Check that an object belongs to a node's reply, and that its reply is not too large with it.

    Raises:
        Refused: If not.
    """
    if sender is None or (digest := hashlib.sha256(body).digest()) in sender.counted:
        return
    if len(body) > sender.reply_left or not sender.objects_left:
        raise Refused(413, "the objects are larger or more than those of a reply may be, or belong to no reply")
    sender.reply_left -= len(body)
    sender.objects_left -= 1
    sender.counted.add(digest)
