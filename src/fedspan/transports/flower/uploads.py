"""Bodies of nodes' requests that arrive in parts: what a broken connection has brought is kept for the rest.

A body is named by its node and its SHA-256, and its size is declared and checked before the first byte is read. Parts
follow each other without gaps or overlaps, and the hash of a body in several parts is verified before it is used. What
is kept is bounded for a node, for all nodes together, and in time; what is dropped is sent again. The answers to the
latest bodies are kept, too: a node that lost one receives it without sending the body again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from fedspan.transports.flower.limits import DoorLimits
from fedspan.transports.flower.progress import ProgressClock
from fedspan.transports.flower.wire import UploadPart

__all__ = ["Upload", "Uploads"]

_ANSWERS, _SENDERS = 4, 4096
"""Maximum number of answers that are kept of a node, and of nodes whose answers are kept."""
_ANSWER_BYTES = 2**15
"""Maximum size of an answer that is kept, in bytes: one that lists the objects of a reply of 2 GiB."""

log = logging.getLogger("fedspan.server")


@dataclass
class Upload:
    """A body that arrives.

    Args:
        total: Size of the body, in bytes.
        clock: Says when progress is logged; None: it is not.
        name: Name of the sender for the log.
        sent: Bytes of the message before the body, for the log.
        message: Size of the message in bytes, for the log.
    """

    total: int
    clock: ProgressClock | None = None
    name: str = ""
    sent: int = 0
    message: int = 0
    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    requests: int = 0
    """Number of requests that have sent a part of it. Only the latest one may go on."""
    is_read: bool = False
    """Whether a request sends a part at the moment."""
    changed_at: float = field(default_factory=time.monotonic)

    def append(self, part: bytes) -> None:
        """Add bytes, and log the progress now and then."""
        self.parts.append(part)
        self.size += len(part)
        self.changed_at = time.monotonic()
        if self.clock is not None and self.clock.is_due():
            done = self.sent + self.size
            log.info("%s: reply received: %.1f of %.1f MB", self.name, done / 1e6, max(done, self.message) / 1e6)


class Uploads:
    """The bodies that have arrived in part.

    Args:
        limits: ``partial_bytes`` and ``partial_seconds`` bound what is kept, ``parallel`` the bodies of one node.
    """

    def __init__(self, limits: DoorLimits) -> None:
        self.limits = limits
        self._uploads: OrderedDict[tuple[bytes, str], Upload] = OrderedDict()
        self._answers: OrderedDict[bytes, OrderedDict[str, bytes]] = OrderedDict()
        self._processed: dict[tuple[bytes, str], asyncio.Event] = {}

    def find_offset(self, sender: bytes, digest: str) -> int:
        """Return how many bytes of a body have arrived. The request that sent them, if it has not ended, is ended."""
        self.drop_expired()
        upload = self._uploads.get((sender, digest))
        if upload is None:
            return 0
        upload.requests += 1
        self.interrupt(upload)
        return upload.size if (sender, digest) in self._uploads else 0

    def begin(self, sender: bytes, part: UploadPart, name: str = "", clock: ProgressClock | None = None) -> Upload:
        """Begin or continue a body.

        Args:
            sender: The node's key.
            part: The part that a request declares. The caller has checked its size against the path's maximum.
            name: Name of the node for the log.
            clock: Says when progress is logged; None: it is not.

        Raises:
            ValueError: If the part does not begin where the body ends that has arrived, or the size differs.
        """
        self.drop_expired()
        key = sender, part.digest
        upload = self._uploads.pop(key, None)
        if part.offset == 0:
            if upload is not None:
                upload.requests += 1  # ends the request that sends it
            upload = Upload(part.total, clock, name, part.sent, part.message)
        if upload is None or (part.offset, part.total) != (upload.size, upload.total):
            if upload is not None:
                self._uploads[key] = upload
            raise ValueError("a part that does not follow the bytes that have arrived")
        self._uploads[key] = upload  # the latest one is the last
        own = [other for other in self._uploads if other[0] == sender]
        for other in own[: max(0, len(own) - self.limits.parallel)]:
            del self._uploads[other]
        upload.requests += 1
        upload.is_read = True
        if upload.clock is not None:
            upload.clock.begin(is_first=part.sent == 0 and part.offset == 0)
        return upload

    def interrupt(self, upload: Upload) -> None:
        """Keep what has arrived of a body whose connection broke, within the limit for all nodes."""
        upload.is_read = False
        unread = [(key, other) for key, other in self._uploads.items() if not other.is_read]
        excess = sum(other.size for _, other in unread) - self.limits.partial_bytes
        for key, other in unread:
            if excess <= 0:
                break
            excess -= other.size
            del self._uploads[key]

    def finish(self, sender: bytes, digest: str, upload: Upload) -> bytes:
        """Return a body that has arrived as a whole, which is no longer kept.

        Raises:
            ValueError: If it arrived in several parts and is not the one that was declared.
        """
        if self._uploads.get((sender, digest)) is upload:
            del self._uploads[sender, digest]
        body = b"".join(upload.parts)
        if upload.requests > 1 and hashlib.sha256(body).hexdigest() != digest:
            raise ValueError("a body of another SHA-256 than declared")
        return body

    @asynccontextmanager
    async def process(self, sender: bytes, digest: str) -> AsyncGenerator[None]:
        """Process a body that has arrived as a whole for the duration of the context."""
        self._processed[sender, digest] = done = asyncio.Event()
        try:
            yield
        finally:
            done.set()
            if self._processed.get((sender, digest)) is done:
                del self._processed[sender, digest]

    def keep_answer(self, sender: bytes, digest: str, answer: bytes) -> None:
        """Keep the answer to a request, in place of the node's oldest one if there are several."""
        if len(answer) > _ANSWER_BYTES:
            return
        answers = self._answers.pop(sender, None) or OrderedDict[str, bytes]()
        self._answers[sender] = answers
        answers[digest] = answer
        while len(answers) > _ANSWERS:
            answers.popitem(last=False)
        while len(self._answers) > _SENDERS:
            self._answers.popitem(last=False)

    async def find_answer(self, sender: bytes, digest: str) -> bytes | None:
        """Return the answer to a request whose body has arrived as a whole; None: it has not.

        Args:
            sender: The node's key.
            digest: SHA-256 of the body. If it is being processed, the answer is waited for.
        """
        processed = self._processed.get((sender, digest))
        if processed is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(processed.wait(), self.limits.body_seconds)
        return self._answers.get(sender, {}).get(digest)

    def drop_expired(self) -> None:
        """Drop what has waited too long for its rest."""
        oldest = time.monotonic() - self.limits.partial_seconds
        for key, upload in list(self._uploads.items()):
            if not upload.is_read and upload.changed_at < oldest:
                del self._uploads[key]
